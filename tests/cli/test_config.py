"""The command config, which asks no daemon."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from modelrunner.config.locations import Locations
from modelrunner.config.settings import Settings
from tests.cli.conftest import Cli

_TABLES = {
    "cluster",
    "mcp",
    "registries",
    "models",
    "aliases",
    "groups",
    "backends",
    "engines",
}  # with sections of their own


def _shown(cli: Cli) -> dict[str, tuple[str, str]]:
    found = json.loads(cli("config", "--json").out)
    return {row["name"]: (row["value"], row["source"]) for row in found["settings"]}


def test_each_setting_is_shown_with_its_value_and_its_source(
    cli: Cli, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folders / "config.toml").write_text('keep_alive = "15m"\nmax_queue = 9\n[mcp.web]\nurl = "http://x/SECRET"\n')
    monkeypatch.setenv("MODELRUNNER_MAX_QUEUE", "7")
    shown = _shown(cli)
    assert shown["keep_alive"] == ("15m", f"{folders}/config.toml, line 1, column 1")
    assert shown["max_queue"] == ("7", "MODELRUNNER_MAX_QUEUE")
    assert shown["max_wait"] == ("10m", "default")
    assert shown["data_dir"][0] == str(folders / "data")
    assert shown["mcp"][0] == "web"
    result = cli("config")
    assert "SECRET" not in result.out
    assert re.search(r"keep_alive +15m +.*line 1", result.out)


def test_a_file_that_is_not_there_is_named_with_the_command_that_makes_it(cli: Cli, folders: Path) -> None:
    assert cli("config").out.splitlines()[0] == (
        f"{folders}/config.toml (not there; `modelrunner config sample --write` makes it)"
    )
    assert cli("config", "sample", "--write").code == 0
    assert "not there" not in cli("config").out
    second = cli("config", "sample", "--write")
    assert second.code == 1
    assert "exists already" in second.err


def test_a_wrong_setting_is_named_with_its_line(cli: Cli, folders: Path) -> None:
    (folders / "config.toml").write_text("\nmax_queue = 0\n")
    result = cli("config")
    assert result.code == 1
    assert f"{folders}/config.toml, line 2, column 1: max_queue" in result.err


def test_the_sample_has_every_setting_and_its_values_are_the_defaults(
    cli: Cli, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MODELRUNNER_LISTEN")
    lines = cli("config", "sample").out.splitlines()
    assignments = [line.removeprefix("#") for line in lines if re.match("#[a-z]", line)]
    assert {line.partition(" ")[0] for line in assignments} == set(Settings.model_fields) - _TABLES - {"config"}
    before = Settings.load(Locations.find())
    (folders / "config.toml").write_text("\n".join(line for line in assignments if "=  #" not in line))
    assert dict(Settings.load(Locations.find())) == dict(before)


def test_a_default_that_only_words_describe_cannot_be_taken_for_a_value(cli: Cli) -> None:
    assert "#memory_budget =  # free now" in cli("config", "sample").out


def test_a_sample_that_cannot_be_written_leaves_no_file(folders: Path) -> None:
    """Or the next try would find one. The shell's limit stands for a full disk."""
    command = 'ulimit -f 8; exec "$0" -m modelrunner config sample --write'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "writing the configuration file failed" in done.stderr
    assert list(folders.iterdir()) == []
