"""The commands about models in memory: preload, pin, unpin, pause, resume."""

import click

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import HttpClient
from modelrunner.cli.common_options import Command, json_option, with_client
from modelrunner.cli.progressdisplay import follow
from modelrunner.cli.several import each

_models = click.argument("models", nargs=-1, required=True, metavar="MODEL...")


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
        told = follow(lines, f"the load of {model}").message
        output.done(told, as_json, model=model, message=told)

    return each(models, load)


def _command(action: str, text: str) -> Command:
    @click.command(name=action, help=text)
    @_models
    @json_option
    @with_client()
    def command(client: HttpClient, models: tuple[str, ...], as_json: bool) -> int:
        def ask(model: str) -> None:
            # A pause waits for the requests that the model answers.
            told = client.call("POST", f"/engines/{action}", wire.ModelState, wire.ModelName(model), timeout=None)
            output.done(told.message, as_json, model=model, message=told.message)

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
