"""What a real voice says, through the daemon, for clients and on the command line; a real Whisper model writes it
down."""

import base64
import io
import re
import time
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.daemons import Daemon, until
from tests.models.prepare import PIPER, WHISPER
from tests.waiting import HUNG

pytestmark = pytest.mark.engine
SPEECH = "/v1/audio/speech"
SENTENCE = "Please open the window and close the door."
TEN = (
    "The ship left the harbor early on Monday morning.",
    "Please open the window and close the door.",
    "She put the letter into a drawer and never read it again.",
    "Two dogs were sleeping in front of the old house.",
    "A small boat can cross the river in a few minutes.",
    "He bought a new coat and a pair of shoes for the winter.",
    "The weather is nice today, so we can go for a walk.",
    "There is a book on the table next to the window.",
    "I would like a cup of coffee and a piece of cake.",
    "The teacher asked the students to write a short story.",
)
BEGINNINGS = {
    "mp3": rb"ID3|\xff[\xf2\xf3\xfb]",
    "opus": rb"OggS(?s:.*)OpusHead",
    "aac": rb"\xff[\xf0\xf1\xf9]",
    "flac": rb"fLaC",
    "wav": rb"RIFF....WAVE",
}


@pytest.fixture(autouse=True)
def nothing_left(no_process_left: None) -> None:
    """Instead of the check after every test, for these."""


@pytest.fixture
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    base = daemon.get("/version").json()["listen"]
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=5 * HUNG) as made:
        yield made


def ask(daemon: Daemon, text: str = SENTENCE, **fields: Any) -> httpx.Response:
    return daemon.post(SPEECH, {"model": PIPER, "input": text, **fields})


def seconds(pcm: bytes) -> float:
    return len(pcm) / 2 / 24000


def words(text: str) -> list[str]:
    return re.sub(r"[^\w' ]", " ", text.lower()).split()


def heard(daemon: Daemon, sound: bytes) -> list[str]:
    with daemon.client() as client:
        answer = client.post("/v1/audio/transcriptions", data={"model": WHISPER}, files={"file": ("a", sound)})
    assert answer.status_code == 200, answer.text
    return words(answer.json()["text"])


def edits(said: list[str], heard: list[str]) -> int:
    """The words that are wrong, missing or too many (Levenshtein's distance)."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]


@pytest.mark.parametrize("form", BEGINNINGS)
def test_openais_client_gets_sound_in_every_form(client: openai.OpenAI, daemon: Daemon, form: Any) -> None:
    sound = client.audio.speech.create(model=PIPER, voice="joe", input=SENTENCE, response_format=form).read()
    assert re.match(BEGINNINGS[form], sound, re.DOTALL)
    assert heard(daemon, sound) == words(SENTENCE)


def test_a_wave_file_has_the_rate_of_the_voice_and_pcm_that_of_openai(daemon: Daemon) -> None:
    with wave.open(io.BytesIO(ask(daemon, response_format="wav").content)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (22050, 1, 2)
    assert 1.5 < seconds(ask(daemon, response_format="pcm").content) < 4


def test_the_speed(daemon: Daemon) -> None:
    slow, fast = (seconds(ask(daemon, response_format="pcm", speed=speed).content) for speed in (0.5, 2))
    assert slow > 2 * fast


def test_the_sound_comes_as_it_is_made(client: openai.OpenAI) -> None:
    """The first piece is here long before the last one."""
    with client.audio.speech.with_streaming_response.create(
        model=PIPER, voice="joe", input=" ".join(TEN), response_format="pcm"
    ) as answer:
        begun = time.monotonic()
        times = [time.monotonic() - begun for _ in answer.iter_bytes(1 << 12)]
    assert times[0] < times[-1] / 3


def test_events(daemon: Daemon) -> None:
    lines = ask(daemon, stream_format="sse", response_format="wav").text.split("\n\n")
    events = [httpx.Response(200, text=line.removeprefix("data: ")).json() for line in lines if line]
    assert [event["type"] for event in events] == ["speech.audio.delta"] * (len(events) - 1) + ["speech.audio.done"]
    sound = b"".join(base64.b64decode(event["audio"]) for event in events[:-1])
    assert heard(daemon, sound) == words(SENTENCE)
    assert events[-1]["usage"]["input_tokens"] == len(SENTENCE)


def test_ten_sentences_there_and_back(daemon: Daemon) -> None:
    """At most one word in fifty is wrong. A new engine makes the same sounds each time."""
    assert daemon.run("unload", "--all").returncode == 0
    wrong = {text: edits(words(text), heard(daemon, ask(daemon, text).content)) for text in TEN}
    assert sum(wrong.values()) <= sum(len(words(text)) for text in TEN) / 50, wrong


def test_its_voices_are_listed(daemon: Daemon) -> None:
    assert daemon.get("/v1/audio/voices").json() == {"voices": [{"id": "joe", "name": "joe", "model": PIPER}]}


def test_twenty_at_once(daemon: Daemon) -> None:
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: ask(daemon, "Good morning.", response_format="pcm"), range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert all(0.3 < seconds(answer.content) < 3 for answer in answers)


def test_a_client_that_leaves_ends_the_work(daemon: Daemon) -> None:
    before = len(daemon.get("/engines/requests?status=499").json())
    body = {"model": PIPER, "input": (" ".join(TEN) * 8)[:4096], "response_format": "pcm"}
    with daemon.client() as client, client.stream("POST", SPEECH, json=body) as answer:
        next(answer.iter_raw())
    until(lambda: len(daemon.get("/engines/requests?status=499").json()) == before + 1)
    until(lambda: not any(runner["in_use"] for runner in daemon.runners()))
    assert ask(daemon).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": ""}, "input", "something to say"),
        ({"input": " .. !"}, "input", "something to say"),
        ({"input": ["a"]}, "input", "something to say"),
        ({"input": "a" * 4097}, "input", "4097 characters"),
        ({"voice": "alloy"}, "voice", "must be one of: joe"),
        ({"response_format": "midi"}, "response_format", "mp3, opus, aac, flac, wav, pcm"),
        ({"speed": 5}, "speed", "from 0.25 to 4.0"),
        ({"speed": True}, "speed", "from 0.25 to 4.0"),
        ({"stream_format": "websocket"}, "stream_format", "audio, sse"),
    ],
)
def test_what_is_refused(daemon: Daemon, fields: dict[str, Any], param: str, said: str) -> None:
    answer = daemon.post(SPEECH, {"model": PIPER, "input": SENTENCE, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], said in error["message"]) == (400, param, True), error


def test_the_command_line(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "said.flac"
    done = daemon.run("say", SENTENCE, "-o", str(file))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert file.read_bytes().startswith(b"fLaC")
    done = daemon.run("transcribe", str(file))
    assert (done.returncode, words(done.stdout)) == (0, words(SENTENCE)), done.stderr
    done = daemon.run("say", "-o", str(tmp_path / "piped.wav"), stdin=SENTENCE)
    assert (done.returncode, heard(daemon, (tmp_path / "piped.wav").read_bytes())) == (0, words(SENTENCE)), done.stderr
