"""The command engines: tables for known servers, and the suite for backends."""

import json
import os
import sys
from pathlib import Path

import pytest

from modelrunner.cli.engines import _known
from modelrunner.config.locations import Locations
from modelrunner.config.settings import Settings
from tests.cli.conftest import Cli
from tests.fakes import FAKE_ENGINE


@pytest.mark.parametrize("server", _known())
def test_every_table_that_is_written_is_read(cli: Cli, folders: Path, server: str) -> None:
    added = cli("engines", "add", server, "--yes", "--json")
    assert added.code == 0, added.err
    assert json.loads(added.out) == {"engine": server, "file": str(folders / "config.toml")}
    assert list(Settings.load(Locations.find()).engines) == [server]


def test_the_rest_of_the_file_stays_and_no_name_is_taken_twice(cli: Cli, folders: Path) -> None:
    file = folders / "config.toml"
    file.write_text("# mine\nmax_queue = 7  # few")
    assert cli("engines", "add", "ollama", "--yes", "--name", "next-door").code == 0
    before = file.read_text()
    assert before.startswith("# mine\nmax_queue = 7  # few\n\n[engines.")
    again = cli("engines", "add", "openai", "--yes", "--name", "next-door")
    assert (again.code, "already" in again.err, "in use" in again.err) == (2, True, False)
    unnamed = cli("engines", "add")
    assert (unnamed.code, "there are llama-server, " in unnamed.err) == (2, True)
    unknown = cli("engines", "add", "olama", "--yes")
    assert (unknown.code, "did you mean `ollama`" in unknown.err) == (2, True)
    wrong = cli("engines", "add", "ollama", "--yes", "--name", "No Name")
    assert (wrong.code, file.read_text()) == (2, before)


def test_places_are_asked_for(cli: Cli, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["/mine/base.bin"])
    monkeypatch.setattr("click.prompt", lambda text, default, err: next(answers))
    assert cli("engines", "add", "whisper-server").code == 0
    assert '"-m", "/mine/base.bin"' in (folders / "config.toml").read_text()


def test_the_suite_runs_against_a_command(cli: Cli, folders: Path) -> None:
    command = json.dumps([os.path.realpath(sys.executable), str(FAKE_ENGINE), "--port", "{port}"])
    endpoints = '{ "/v1/chat/completions" = "chat" }'
    (folders / "config.toml").write_text(
        f'[engines.mine]\ncommand = {command}\nmodels = ["m"]\nendpoints = {endpoints}\n[engines.far]\nurl = "http://x"\n'
    )
    tested = cli("engines", "test", "mine")
    assert (tested.code, "14 passed" in tested.out) == (0, True), tested.out
    assert "test_killed_engine_is_reported_and_not_restarted PASSED" in tested.out
    assert "modelrunner check far/MODEL" in cli("engines", "test", "far").err
    assert "there is no [engines.mein]" in cli("engines", "test", "mein").err


def test_a_program_that_is_not_here_is_named(cli: Cli, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folders))
    added = cli("engines", "add", "koboldcpp", "--yes")
    assert (added.code, "koboldcpp is not a program on PATH here" in added.err) == (0, True)
    tested = cli("engines", "test", "koboldcpp")
    assert (tested.code, tested.out, "correct `command` of [engines.koboldcpp]" in tested.err) == (2, "", True)
