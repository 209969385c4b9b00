"""The command help: the help of a command, and the pages of the documentation."""

import re
import sys
from pathlib import Path

import click

from modelrunner.cli import output
from modelrunner.cli.commands import meant

_PACKAGE = Path(__file__).parents[1]
DOCS = next((place for place in (_PACKAGE / "docs", _PACKAGE.parent / "docs") if place.is_dir()), _PACKAGE / "docs")
"""The folders of the pages: in an installed wheel, or in a checkout."""


@click.command(name="help")
@click.argument("name", required=False, metavar="[COMMAND|TOPIC]")
@click.pass_context
def help_about(context: click.Context, name: str | None) -> None:
    """Show the help of a command, or a page of the documentation.

    If a command and a topic have the same name, both are shown.
    """
    root = context.find_root()
    group = root.command
    assert isinstance(group, click.Group)
    topics = sorted(page.stem for page in DOCS.glob("*.md"))
    if name is None:
        output.say(root.get_help())
        output.say(f"\nTopics of `modelrunner help`: {', '.join(topics)}.")
        return
    command = group.get_command(root, name)
    if command is None and name not in topics:
        commands = group.list_commands(root)
        places = [f"`modelrunner help {topic}`" for topic in topics if _has_heading(topic, name)]
        near = f"; see {' or '.join(places)}" if places else meant(name, [*commands, *topics])
        raise click.UsageError(f"there is no command and no topic {name!r}{near}")
    if command is not None:
        output.say(command.get_help(click.Context(command, info_name=name, parent=root)))
    if name in topics:
        _show((DOCS / f"{name}.md").read_text("utf-8"))


def _has_heading(topic: str, word: str) -> bool:
    lines = (DOCS / f"{topic}.md").read_text("utf-8").splitlines()
    return any(re.search(rf"(?i)\b{re.escape(word)}\b", line) for line in lines if line.startswith("#"))


def _show(text: str) -> None:
    if output.moves_cursor(sys.stdout):
        from modelrunner.cli.markdown import MarkdownView

        view = MarkdownView(sys.stdout.write)
        view.feed(text)
        view.finish()
    else:
        output.say(text)
