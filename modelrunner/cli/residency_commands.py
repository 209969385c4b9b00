"""The commands about models in memory: preload, pin, unpin, pause, resume."""

from collections.abc import Callable

import click

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.client import Client
from modelrunner.cli.common_options import Command, with_client
from modelrunner.cli.progress import follow
from modelrunner.cli.several import each
from modelrunner.errors import ModelRunnerError

_models = click.argument("models", nargs=-1, required=True, metavar="MODEL...")


@click.command()
@_models
@with_client()
def preload(client: Client, models: tuple[str, ...]) -> int:
    """Load models before a request needs them.

    Ends when they are ready. They stay for as long as their keep-alive says.
    """

    def load(model: str) -> None:
        last = follow(client.progress("/engines/preload", wire.ModelName(model)))
        if last is None or last.type != "success":
            raise ModelRunnerError(f"the load of {model} ended without a result; see `modelrunner logs`")
        output.say(last.message)

    return each(models, load)


def _command(action: str, text: str) -> Command:
    @click.command(name=action, help=text)
    @_models
    @with_client()
    def command(client: Client, models: tuple[str, ...]) -> int:
        return each(models, _asking(client, action))

    return command


def _asking(client: Client, action: str) -> Callable[[str], None]:
    def ask(model: str) -> None:
        # A pause waits for the requests that the model answers.
        told = client.call("POST", f"/engines/{action}", wire.ModelState, wire.ModelName(model), timeout=None)
        output.say(told.message)

    return ask


pin = _command("pin", "Never evict models to make room for others.\n\nHolds until `modelrunner unpin`.")
unpin = _command("unpin", "Evict pinned models again where room is needed.")
pause = _command(
    "pause",
    "Unload models and let their requests wait.\n\nThose that are being answered end first. Holds until `modelrunner "
    "resume`, or until the daemon ends.",
)
resume = _command("resume", "Answer the requests for paused models again.")
