"""The command config: the settings in force, where each is from, and a sample of the configuration file. It asks no
daemon, so it also explains why none starts."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import wrap

import click
import msgspec

from modelrunner import durable
from modelrunner.cli import output
from modelrunner.cli.common_options import json_option
from modelrunner.cli.help_commands import DOCS
from modelrunner.config.locations import Locations
from modelrunner.config.settings import Settings
from modelrunner.errors import Conflict

_ROW = re.compile(r"^\| (`[a-z_`, ]+`) \| ([^|]*) \| (.*) \|$", re.MULTILINE)
_LINK = re.compile(r"\[([^][]*)\]\([^()]*\)")
_TOML_VALUE = re.compile(r"true|false|-?[0-9]+")


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of docs/configuration.md: settings with the words of their defaults, and what they mean."""

    defaults: Mapping[str, str]
    meaning: str


@click.group(name="config", invoke_without_command=True)
@json_option
@click.pass_context
def config(context: click.Context, as_json: bool) -> None:
    """Show the settings, and where each is from.

    Values come from MODELRUNNER_... variables, else from the configuration file, else they are defaults. A running
    daemon has those of its start; `modelrunner reload` lets it read the file again.
    """
    if context.invoked_subcommand is not None:
        return
    locations = Locations.find()
    settings = Settings.load(locations)
    rows = [(name, *_value(name, settings)) for name in Settings.model_fields if name != "config"]
    if as_json:
        listed = [{"name": name, "value": value, "source": source} for name, value, source in rows]
        output.json(msgspec.json.encode({"file": str(locations.config_file), "settings": listed}))
        return
    state = "" if locations.config_file.exists() else " (not there; `modelrunner config sample --write` makes it)"
    output.say(f"{locations.config_file}{state}\n")
    output.table(("SETTING", "VALUE", "FROM"), rows)


@config.command()
@click.option("--write", is_flag=True, help="Write it to the place of the configuration file, if none is there.")
def sample(write: bool) -> None:
    """Print a configuration file with every setting, its default and its meaning, all of it commented out."""
    text = _sample()
    if not write:
        output.say(text)
        return
    path = Locations.find().config_file
    if path.exists():
        raise Conflict(f"{path} exists already: move it away, or compare it with `modelrunner config sample`")
    with durable.translated("writing the configuration file", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write(path, f"{text}\n".encode())
    output.say(f"wrote {path}")


def _value(name: str, settings: Settings) -> tuple[str, str]:
    """Returns a setting's value as text, and where it is from. Of a table only the keys are shown: it may hold
    passwords."""
    source, shown = settings.source(name)
    value = getattr(settings, name)
    if source == "default" and not isinstance(value, Path):
        words = next((row.defaults[name] for row in _documented() if name in row.defaults), "none")
        return words.strip('`"'), source
    shown = value if shown is None else shown
    return ", ".join(map(str, shown)) if isinstance(shown, list | Mapping) else str(shown), source


@cache
def _documented() -> tuple[_Row, ...]:
    """Reads the table of docs/configuration.md. Settings of one row have a default each, or one for all."""
    rows = []
    page, _, _ = (DOCS / "configuration.md").read_text("utf-8").partition("\n## ")
    for names, defaults, meaning in _ROW.findall(page):
        settings = [name.strip("` ") for name in names.split(",")]
        words = [value.strip() for value in defaults.split(",")]
        each = words if len(words) == len(settings) else [defaults.strip() or "none"] * len(settings)
        if settings[0] in Settings.model_fields:
            rows.append(_Row(dict(zip(settings, each, strict=True)), _LINK.sub(r"\1", meaning).strip()))
    return tuple(rows)


def _sample() -> str:
    lines = [
        "# Settings of modelrunner. `modelrunner help configuration` has more: models, aliases, tools, registries."
    ]
    for row in _documented():
        lines += ["", *(f"# {line}" for line in wrap(row.meaning, 110, break_on_hyphens=False))]
        lines += [_assignment(name, default) for name, default in row.defaults.items()]
    return "\n".join(lines)


def _assignment(name: str, default: str) -> str:
    """Returns the line that would set the default, or one that says in words what it is."""
    words = default.strip('`"')
    if _TOML_VALUE.fullmatch(words):
        return f"#{name} = {words}"
    is_value = default in (f"`{words}`", f'`"{words}"`')
    return f'#{name} = "{words}"' if is_value else f"#{name} =  # {default}"
