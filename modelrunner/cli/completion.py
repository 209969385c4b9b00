"""The command completion, and the completion of model names (https://click.palletsprojects.com/shell-completion)."""

import click
from click.shell_completion import CompletionItem, get_completion_class

from modelrunner import wire
from modelrunner.cli import output
from modelrunner.cli.commands import COMPLETING
from modelrunner.cli.common_options import connect
from modelrunner.errors import ModelRunnerError

_FILES = {
    "bash": "~/.bashrc",
    "zsh": "~/.zshrc",
    "fish": "~/.config/fish/completions/modelrunner.fish",
}
# bash divides words at colons, which model names have.
_BEFORE = {"bash": "COMP_WORDBREAKS=${COMP_WORDBREAKS//:}\n"}


@click.command(
    help="Print the completion of commands and models for a shell.\n\n"
    + " ".join(f"{shell}: add `modelrunner completion {shell}` to {file}." for shell, file in _FILES.items())
)
@click.argument("shell", type=click.Choice(list(_FILES)), metavar="bash|zsh|fish")
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    completer = get_completion_class(shell)
    assert completer is not None
    script = completer(context.find_root().command, {}, "modelrunner", COMPLETING).source()
    output.say(_BEFORE.get(shell, "") + script.strip())


class _CompletedModel(click.ParamType[str]):
    name = "model"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Asks a running daemon for the models; starts none. Without a daemon, there are no names."""
        try:
            models = connect(ctx.find_root().params.get("host"), start=False).call("GET", "/models", list[wire.Model])
        except (ModelRunnerError, click.ClickException):
            return []
        names = [name for model in models for name in model.tags or [model.id]]
        return [CompletionItem(name) for name in sorted(names) if incomplete in name]


def complete_models(command: click.Command) -> None:
    """Lets the shell complete the command's MODEL, an argument or an option."""
    for parameter in command.params:
        if parameter.name in ("model", "models"):
            parameter.type = _CompletedModel()
