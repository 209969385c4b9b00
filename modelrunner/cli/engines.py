"""The command engines, which writes tables of engines into the configuration file, and runs the suite for backends
against one."""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from pydantic import TypeAdapter, ValidationError

from modelrunner import durable
from modelrunner.cli import output
from modelrunner.cli.commands import meant
from modelrunner.cli.common_options import json_option
from modelrunner.cli.help_commands import DOCS
from modelrunner.config.enginetables import AnyEngineTable, EngineName, ServerTable
from modelrunner.config.locations import Locations
from modelrunner.config.settings import Settings

_ROW = re.compile(r"^\| ([^|]+) \| (`(?:command|url) = [^|]+`) \| [^|]+ \|$", re.MULTILINE)
_ASKED = re.compile(r'"(/(?!v1|api)[^"{]+|https?://[^"]+|[A-Z][A-Z_]*)"')
"""The values that are another one for everybody: places, addresses, and names in capitals."""
_SUITE = """
from pathlib import Path
import pytest
from modelrunner.cli.engines import table_of
from modelrunner.daemon.engines import configured
from modelrunner.testing import BackendContract, spec_for
from modelrunner.types import RunSpec

KIND = configured({name!r}, table_of({name!r}))

class TestEngine(BackendContract):
    @pytest.fixture
    def backend(self, context):
        return KIND(context)

    @pytest.fixture
    def spec(self, tmp_path):
        if not KIND.declared:
            return spec_for(Path({model!r}), tmp_path)
        bundle = KIND.declared[0].bundle(KIND.name)
        return RunSpec(bundle.model_id, bundle, min(KIND.modes), bundle.context_length or 512, 1)
"""


@click.group()
def engines() -> None:
    """Add engines that are commands, or servers elsewhere, and test them."""


@engines.command()
@click.argument("server", required=False)
@click.option("--name", help="The engine's name here; by default the server's.")
@click.option("--yes", is_flag=True, help="Ask nothing: take what the documentation has.")
@json_option
def add(server: str | None, name: str | None, yes: bool, as_json: bool) -> None:
    """Write the table of a known server into the configuration file, after asking for places and names.

    `modelrunner help engines` lists the servers. `modelrunner reload` makes a running daemon read the table.
    """
    known = _known()
    if server is None:
        raise click.UsageError(f"name a server; there are {', '.join(known)}")
    if server not in known:
        raise click.UsageError(f"no table for {server!r} is known{meant(server, known)}; there are {', '.join(known)}")
    name, text = name or server, known[server]
    if not yes:
        for value in dict.fromkeys(_ASKED.findall(text)):
            answer = click.prompt(f"{server}: in place of", default=value, err=True)
            text = text.replace(f'"{value}"', _quoted(answer))
    path = Locations.find().config_file
    table = _checked(name, text)
    before = path.read_text("utf-8") if path.exists() else ""
    if name in tomllib.loads(before).get("engines", {}):
        raise click.UsageError(
            f"{path} has [engines.{_quoted(name)}] already: give the new one another name with --name"
        )
    with durable.translated("writing the configuration file", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        start = f"{before.rstrip()}\n\n" if before.strip() else ""
        durable.write(path, f"{start}[engines.{_quoted(name)}]\n{text}\n".encode())
    if (missing := _missing(table)) is not None:
        output.note(f"{missing}; write its whole path into the table")
    output.note(f"`modelrunner reload` makes a running daemon read {path}")
    output.done(f"[engines.{_quoted(name)}]\n{text}", as_json, engine=name, file=str(path))


@engines.command()
@click.argument("name")
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="A small GGUF file, or a folder.")
def test(name: str, model: Path | None) -> None:
    """Run the suite that every backend must pass against an engine of the configuration file.

    It starts the engine several times, without the daemon, and prints what it saw. pytest and pytest-asyncio must be
    there.
    """
    table = table_of(name)
    if isinstance(table, ServerTable):
        raise click.UsageError(f"{name} is a server elsewhere: `modelrunner check {name}/MODEL` tries it")
    if (missing := _missing(table)) is not None:
        raise click.UsageError(f"{missing}; correct `command` of [engines.{name}]")
    if not table.models and model is None:
        raise click.UsageError(f"{name} runs models of this machine: name a small one with --model")
    for needed in ("pytest", "pytest_asyncio"):
        if importlib.util.find_spec(needed) is None:
            raise click.UsageError(f"{needed} is not here: install pytest and pytest-asyncio beside modelrunner")
    with TemporaryDirectory() as folder:
        suite = Path(folder) / "test_engine.py"
        suite.write_text(_SUITE.format(name=name, model=str(model and model.absolute())))
        options = (
            "-v",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            "-o",
            "asyncio_default_fixture_loop_scope=function",
            "--rootdir",
            folder,
        )
        done = subprocess.run([sys.executable, "-m", "pytest", *options, str(suite)], check=False)
    raise click.exceptions.Exit(done.returncode)


def table_of(name: str) -> AnyEngineTable:
    """Returns the table of an engine of the configuration file. Raises `ConfigurationError`, and `click.UsageError`
    if there is none."""
    tables = Settings.load(Locations.find()).engines
    if name not in tables:
        raise click.UsageError(f"there is no [engines.{name}] in the configuration file{meant(name, tables)}")
    return tables[name]


@cache
def _known() -> dict[str, str]:
    """Returns the tables of docs/engines.md, as TOML, by the names of their servers."""
    page = (DOCS / "engines.md").read_text("utf-8")
    models = {}
    for server, table in _ROW.findall(page):
        name = (re.findall(r"`([^`]+)`", server) or [server])[0].strip().lower()
        models[name] = "\n".join(re.findall(r"`([^`]+)`", table))
    return models


def _missing(table: AnyEngineTable) -> str | None:
    """Returns a sentence about the program of the table if it is not here."""
    if isinstance(table, ServerTable) or shutil.which(table.command[0]) is not None:
        return None
    return f"{table.command[0]} is not a program on PATH here"


def _checked(name: str, text: str) -> AnyEngineTable:
    try:
        return TypeAdapter(dict[EngineName, AnyEngineTable]).validate_python({name: tomllib.loads(text)})[name]
    except (ValidationError, tomllib.TOMLDecodeError) as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ") if isinstance(error, ValidationError) else error
        raise click.UsageError(f"that is no engine: {said}") from None


def _quoted(text: str) -> str:
    """Returns a basic string of TOML."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
