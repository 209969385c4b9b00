"""`say`: what is asked for, and where the sound goes."""

import os
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.fake_daemon import FakeDaemon, Status, Stream

SPEAKS = {"id": "sha256:1", "tags": ["joe"], "created": 1, "config": {}, "capabilities": ["speech"]}
TALKS = {"id": "sha256:2", "tags": ["m"], "created": 1, "config": {}, "capabilities": ["chat", "completion"]}
ROUTE = "/v1/audio/speech"


@pytest.fixture
def daemon(daemon: FakeDaemon) -> FakeDaemon:
    """With a model that speaks, and its engine."""
    daemon.answers |= {
        "GET /models": [TALKS, SPEAKS],
        "GET /models/joe": SPEAKS,
        "GET /v1/models/joe": {"id": "joe", "backend": "piper"},
        "GET /engines/status": {"piper": "Running: piper-tts 1"},
        f"POST {ROUTE}": Stream([b"so", b"und"], "audio/pcm"),
    }
    return daemon


def player(folder: Path, script: str) -> Path:
    """A program that plays, as the only one of its path, beside the shell."""
    (folder / "bin").mkdir()
    program = folder / "bin" / "aplay"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program.parent


def test_a_file_has_the_form_of_its_ending(daemon: FakeDaemon, cli: Cli, tmp_path: Path) -> None:
    result = cli("say", "Good", "morning", "-o", str(tmp_path / "a.OGG"), "--voice", "joe", "--speed", "1.5")
    assert (result.code, result.out, (tmp_path / "a.OGG").read_bytes()) == (0, "", b"sound"), result.err
    asked = {"model": "joe", "input": "Good morning", "voice": "joe", "speed": 1.5, "response_format": "opus"}
    assert daemon.asked("POST", ROUTE) == [asked]


def test_standard_output_has_samples(daemon: FakeDaemon, cli: Cli) -> None:
    assert cli("say", "Hello", "-o", "-").out == "sound"
    assert daemon.asked("POST", ROUTE) == [{"model": "joe", "input": "Hello", "response_format": "pcm"}]


def test_a_player_gets_the_samples(
    daemon: FakeDaemon, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{player(tmp_path, f'cat > {tmp_path}/played')}{os.pathsep}/bin")
    assert cli("say", "Hello").code == 0
    assert (tmp_path / "played").read_bytes() == b"sound"


def test_a_player_that_fails(daemon: FakeDaemon, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(player(tmp_path, "exit 3")))
    result = cli("say", "Hello")
    assert (result.code, "aplay ended with 3: name a file with -o" in result.err) == (1, True)


def test_without_a_player(daemon: FakeDaemon, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = cli("say", "Hello")
    assert (result.code, "no program here plays sound (paplay, aplay, ffplay)" in result.err) == (2, True)
    assert not daemon.asked("POST", ROUTE)


def test_nothing_is_left_of_a_sound_that_breaks_off(daemon: FakeDaemon, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"older")
    for fault in (Stream([b"so"], "audio/wav", broken=True), Status(400, "bad_request", "`voice` must be one of: joe")):
        daemon.answers[f"POST {ROUTE}"] = fault
        assert cli("say", "Hello", "-o", str(tmp_path / "a.wav")).code == 1
    assert (tmp_path / "a.wav").read_bytes() == b"older"
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("arguments", [[], ["-o", "a.wav"], ["Hello", "-o", "a.midi"], ["Hello", "--speed", "9"]])
def test_wrong_usage(daemon: FakeDaemon, cli: Cli, arguments: list[str]) -> None:
    assert cli("say", *arguments).code == 2


def test_without_a_model_that_speaks(daemon: FakeDaemon, cli: Cli, tmp_path: Path) -> None:
    daemon.answers["GET /models"] = [TALKS]
    result = cli("say", "Hello", "-o", str(tmp_path / "a.wav"))
    assert (result.code, "no model here speaks: `modelrunner pull " in result.err) == (4, True)
