"""The commands about models in memory: ps, unload, preload, pin, unpin, pause, resume."""

import click
import msgspec

from modelrunner import wire
from modelrunner.cli import UNREACHABLE, output
from modelrunner.cli.client import HttpClient, decode
from modelrunner.cli.common_options import Command, absent, json_option, with_client
from modelrunner.cli.devices import place_text, print_devices
from modelrunner.cli.live_commands import states
from modelrunner.cli.progressdisplay import follow
from modelrunner.cli.several import each
from modelrunner.cli.times import until
from modelrunner.errors import DaemonUnreachable, ModelRunnerError
from modelrunner.units import format_bytes

_HEADINGS = (
    "MODEL NAME",
    "BACKEND",
    "MODE",
    "STATE",
    "ESTIMATED",
    "MEASURED",
    "CONTEXT",
    "REQUESTS",
    "UNLOADS",
    "SANDBOX",
    "ID",
)
_EXPENDABLE = ("SANDBOX", "ID", "ESTIMATED", "MODE", "CONTEXT", "BACKEND")
_models = click.argument("models", nargs=-1, required=True, metavar="MODEL...")


@click.command()
@click.option("-w", "--watch", is_flag=True, help="Follow every change, until Ctrl-C.")
@json_option
@with_client(start=False)
def list_runners(client: HttpClient, watch: bool, as_json: bool) -> int:
    """List the models that are loaded.

    With --watch --json, the command prints one array a line after every change.
    """
    if watch:
        for now in states(client):
            if as_json:
                output.say(msgspec.json.encode(now.runners).decode(), flush=True)
            else:
                output.clear()
                _print(now.runners, now.devices)
        return 0
    try:
        raw = client.fetch("GET", "/engines/ps")
    except DaemonUnreachable:
        if absent(client) is None:
            raise
        if as_json:
            output.json(b"[]")
        output.note(
            "no daemon runs, so no model is loaded: `modelrunner serve` starts one, and so does `modelrunner run`"
        )
        return UNREACHABLE
    runners = decode(raw, list[wire.RunnerStatus])
    if as_json:
        output.json(raw)
    else:
        _print(runners, client.call("GET", "/version", wire.Status).devices)
    return 0


def _print(runners: list[wire.RunnerStatus], devices: list[wire.DeviceStatus]) -> None:
    output.table(_HEADINGS, [_row(runner) for runner in runners], expendable=_EXPENDABLE)
    print_devices(devices, runners)


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--all", "everything", is_flag=True, help="Stop all of them.")
@click.option("--backend", metavar="NAME", help="Stop only those of this inference engine.")
@click.option("-f", "--force", is_flag=True, help="Stop them even while they answer.")
@json_option
@with_client(start=False)
def unload(
    client: HttpClient, models: tuple[str, ...], everything: bool, backend: str | None, force: bool, as_json: bool
) -> None:
    """Stop models that are loaded."""
    if bool(models) == everything and not (backend and not models):
        raise click.UsageError("name the models to stop, or give --all")
    wanted = wire.UnloadRequest(everything or not models, backend, list(models), force)
    raw = client.fetch("POST", "/engines/unload", wanted, timeout=None)
    done = decode(raw, wire.UnloadResponse)
    if as_json:
        output.json(raw)
    else:
        for name in dict.fromkeys(done.unloaded):  # a model may have run in several modes
            output.say(f"stopped: {name}")
        if not done.unloaded and not done.kept:
            output.note("nothing was loaded")
    if done.kept:
        reasons = "; ".join(f"{kept.id} ({kept.reason})" for kept in done.kept)
        raise ModelRunnerError(f"still loaded: {reasons}; `modelrunner unload --force` ends answers, too")


def _row(runner: wire.RunnerStatus) -> tuple[str, ...]:
    about = "; ".join(filter(None, [runner.stage or runner.variant, place_text(runner), _drafts(runner.drafts)]))
    state = f"{runner.state} ({about})" if about else runner.state
    requests = f"{runner.leases}" + (f" + {runner.queued} waiting" if runner.queued else "")
    return (
        ", ".join(runner.models.values()) or runner.model_name,
        runner.backend_name,
        runner.mode,
        state,
        _bytes(runner.memory.estimated),
        _bytes(runner.memory.measured),
        str(runner.context_size),
        requests,
        "in use" if runner.leases else "pinned" if runner.pinned else until(runner.expires_at),
        runner.sandbox.state if runner.sandbox else "",
        runner.id,
    )


def _drafts(drafts: wire.DraftStatus | None) -> str:
    return "" if drafts is None else f"{drafts.accepted / drafts.proposed:.0%} of {drafts.proposed} drafts accepted"


def _bytes(memory: wire.Memory | None) -> str:
    return "" if memory is None else format_bytes(memory.ram + sum(memory.vram))


@click.command()
@_models
@json_option
@with_client()
def preload(client: HttpClient, models: tuple[str, ...], as_json: bool) -> int:
    """Load models before a request needs them.

    The command ends when they are ready. They stay loaded for their keep-alive.
    """

    def load(model: str) -> None:
        lines = client.progress("/engines/preload", wire.ModelName(model))
        message = follow(lines, f"the load of {model}").message
        output.done(message, as_json, model=model, message=message)

    return each(models, load)


def _command(action: str, text: str) -> Command:
    @click.command(name=action, help=text)
    @_models
    @json_option
    @with_client()
    def command(client: HttpClient, models: tuple[str, ...], as_json: bool) -> int:
        def ask(model: str) -> None:
            # A pause waits for the requests that the model answers.
            state = client.call("POST", f"/engines/{action}", wire.ModelState, wire.ModelName(model), timeout=None)
            output.done(state.message, as_json, model=model, message=state.message)

        return each(models, ask)

    return command


pin = _command("pin", "Never evict models to make room for others.\n\nThe pin holds until `modelrunner unpin`.")
unpin = _command("unpin", "Evict pinned models again where room is needed.")
pause = _command(
    "pause",
    "Unload models and let their requests wait.\n\nRunning answers end first. The pause holds until `modelrunner "
    "resume`, or until the daemon ends.",
)
resume = _command("resume", "Answer the requests for paused models again.")
