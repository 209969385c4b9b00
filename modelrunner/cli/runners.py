"""The commands about models that are loaded, and how they are run."""

import shlex
from typing import Any

import click
import msgspec

from modelrunner import api
from modelrunner.cli import output
from modelrunner.cli.options import json_option, with_client
from modelrunner.cli.times import until
from modelrunner.client import Client, decode, path
from modelrunner.errors import ModelRunnerError
from modelrunner.units import format_bytes


@click.command()
@json_option
@with_client(start=False)
def list_runners(client: Client, as_json: bool) -> None:
    """List the models that are loaded."""
    raw = client.fetch("GET", "/engines/ps")
    runners = decode(raw, list[api.Runner])
    if as_json:
        output.json(raw)
    else:
        headings = ("MODEL NAME", "BACKEND", "MODE", "STATE", "MEMORY", "CONTEXT", "REQUESTS", "UNLOADS", "ID")
        output.table(headings, [_row(runner) for runner in runners])


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--all", "everything", is_flag=True, help="All of them.")
@click.option("--backend", metavar="NAME", help="Only those of this inference engine.")
@click.option("-f", "--force", is_flag=True, help="Even those that are answering.")
@json_option
@with_client()
def unload(
    client: Client, models: tuple[str, ...], everything: bool, backend: str | None, force: bool, as_json: bool
) -> None:
    """Stop models that are loaded."""
    if bool(models) == everything and not (backend and not models):
        raise click.UsageError("name the models to stop, or give --all")
    wanted = api.UnloadRequest(everything or not models, backend, list(models), force)
    raw = client.fetch("POST", "/engines/unload", wanted, timeout=None)
    done = decode(raw, api.UnloadResponse)
    if as_json:
        output.json(raw)
    else:
        for name in done.unloaded:
            output.say(f"stopped: {name}")
        if not done.unloaded and not done.kept:
            output.note("nothing was loaded")
    if done.kept:
        raise ModelRunnerError("still loaded: " + "; ".join(f"{kept.id} ({kept.reason})" for kept in done.kept))


@click.command()
@click.argument("model")
@click.option("--context-size", metavar="N", help="Tokens, shared by the parallel sequences.")
@click.option("--parallel", metavar="N", help="Sequences that are worked on at once.")
@click.option("--keep-alive", metavar="DURATION", help="How long it stays loaded unused: 5m, 0, or -1 for ever.")
@click.option("--runtime-flags", metavar="FLAGS", help="Flags of the engine, as one argument.")
@click.option("--backend", metavar="NAME", help="The inference engine.")
@json_option
@with_client()
def configure(client: Client, model: str, as_json: bool, **options: str | None) -> None:
    """Show or change how a model is run.

    Changes hold from its next load. "default" takes a value back. Without an option the configuration is shown.
    """
    changes = {
        name.replace("_", "-") if name != "keep_alive" else name: v for name, v in options.items() if v is not None
    }
    if changes:
        body = {"model": model} | {name: _value(name, text) for name, text in changes.items()}
        client.fetch("POST", "/engines/_configure", body)
    raw = client.fetch("GET", path("engines", "_configure", model=model))
    if as_json:
        output.json(raw)
        return
    for found in decode(raw, list[api.Configuration]):
        values = [(name, _text(value)) for name, value in found.config.items() if value is not None]
        output.fields([("model", found.model), ("mode", found.mode), ("revision", str(found.revision)), *values])


def _value(name: str, text: str) -> Any:
    if text == "default":
        return None
    if name == "runtime-flags":
        try:
            return shlex.split(text)
        except ValueError as error:
            raise click.UsageError(f"--runtime-flags: {error}") from None
    if name in ("context-size", "parallel"):
        if not text.isascii() or not text.isdecimal():
            raise click.UsageError(f"--{name} is a number, or default")
        return int(text)
    return text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _row(runner: api.Runner) -> tuple[str, ...]:
    memory = runner.memory.measured or runner.memory.estimated
    state = f"{runner.state} ({runner.stage})" if runner.stage else runner.state
    requests = f"{runner.leases}" + (f" + {runner.queued} waiting" if runner.queued else "")
    return (
        runner.model_name,
        runner.backend_name,
        runner.mode,
        state,
        format_bytes(memory.ram + sum(memory.vram)),
        str(runner.context_size),
        requests,
        "in use" if runner.leases else until(runner.expires_at),
        runner.id,
    )
