"""`transcribe`, and `run` with files: what is sent, and what is shown."""

from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.cli.fake_daemon import FakeDaemon, Status, Text, events

HEARS = {"id": "sha256:1", "tags": ["ear"], "created": 1, "config": {}, "capabilities": ["transcription"]}
TALKS = {"id": "sha256:2", "tags": ["m"], "created": 1, "config": {}, "capabilities": ["chat", "completion"]}
ROUTE = "/v1/audio/transcriptions"


@pytest.fixture
def daemon(daemon: FakeDaemon) -> FakeDaemon:
    """With a model that hears, and its engine."""
    said = [{"type": "transcript.text.delta", "delta": text} for text in ("Close", " the door.")]
    daemon.answers |= {
        "GET /models": [TALKS, HEARS],
        "GET /models/ear": HEARS,
        "GET /models/m": TALKS,
        "GET /v1/models/ear": {"id": "ear", "backend": "whisper"},
        "GET /engines/status": {"whisper": "Running: faster-whisper 1"},
        f"POST {ROUTE}": events(*said, {"type": "transcript.text.done", "text": "Close the door."}),
    }
    return daemon


@pytest.fixture
def talk(tmp_path: Path) -> str:
    file = tmp_path / "talk.wav"
    file.write_bytes(b"RIFF\0\xff sound")
    return str(file)


def sent(daemon: FakeDaemon, path: str = ROUTE) -> bytes:
    [body] = daemon.asked("POST", path)
    assert isinstance(body, bytes)
    return body


def part(name: str, value: str) -> bytes:
    return f'form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


@pytest.mark.parametrize("command", ["transcribe", "run ear"])
def test_the_text_comes_as_it_is_heard(daemon: FakeDaemon, cli: Cli, talk: str, command: str) -> None:
    result = cli(*command.split(), talk)
    assert (result.code, result.out) == (0, "Close the door.\n"), result.err
    body = sent(daemon)
    assert part("model", "ear") in body
    assert part("stream", "true") in body
    assert b'name="file"; filename="file.wav"\r\n\r\nRIFF\0\xff sound\r\n--' in body


def test_subtitles_and_further_options(daemon: FakeDaemon, cli: Cli, talk: str) -> None:
    daemon.answers[f"POST {ROUTE}"] = Text("1\nGrüezi\n\n".encode())
    result = cli("transcribe", talk, "--format", "srt", "--language", "de", "--prompt", "Zürich")
    assert (result.code, result.out) == (0, "1\nGrüezi\n\n"), result.err
    body = sent(daemon)
    assert part("response_format", "srt") in body
    assert part("language", "de") in body
    assert part("prompt", "Zürich") in body
    assert b"stream" not in body


def test_a_translation(daemon: FakeDaemon, cli: Cli, talk: str) -> None:
    daemon.answers["POST /v1/audio/translations"] = Text(b'{"text": "Hi"}')
    assert cli("transcribe", talk, "--translate", "--format", "json").out == '{"text": "Hi"}\n'
    assert cli("transcribe", talk, "--translate", "--language", "de").code == 2


def test_a_file_that_fails_does_not_stop_the_others(daemon: FakeDaemon, cli: Cli, talk: str) -> None:
    good = daemon.answers[f"POST {ROUTE}"]
    daemon.answers[f"POST {ROUTE}"] = [Status(400, "bad_request", "the file is no sound: it is text"), good]
    result = cli("transcribe", __file__, talk)
    assert (result.code, "it is text" in result.err) == (1, True)
    assert result.out == f"[{__file__}]\n\n[{talk}]\nClose the door.\n"


def test_a_stream_that_fails_in_the_middle(daemon: FakeDaemon, cli: Cli, talk: str) -> None:
    said = {"type": "transcript.text.delta", "delta": "Close"}
    daemon.answers[f"POST {ROUTE}"] = events(said, {"error": {"message": "the engine failed", "code": "engine_failed"}})
    result = cli("transcribe", talk)
    assert (result.code, result.out, "the engine failed" in result.err) == (1, "Close", True)


def test_without_a_model_that_hears(daemon: FakeDaemon, cli: Cli, talk: str) -> None:
    daemon.answers["GET /models"] = [TALKS]
    result = cli("transcribe", talk)
    assert (result.code, "no model here transcribes: `modelrunner pull " in result.err) == (4, True)


def test_a_chat_model_is_asked_about_the_words(daemon: FakeDaemon, cli: Cli, talk: str) -> None:
    daemon.answers |= {"GET /v1/models/m": {"id": "m", "backend": "whisper"}}
    assert cli("run", "m", talk).code != 0
    assert not daemon.asked("POST", ROUTE)
