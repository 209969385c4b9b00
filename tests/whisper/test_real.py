"""What espeak-ng says, a real Whisper model writes down: through the daemon, for clients and on the command line."""

import contextlib
import json
import re
import struct
import subprocess
import threading
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.clients.test_programs import installed as program
from tests.e2e.daemons import Daemon, until
from tests.models.prepare import WHISPER
from tests.waiting import HUNG
from tests.whisper.conftest import SENTENCES, Speech

pytestmark = pytest.mark.engine
TEXT = " ".join(SENTENCES).lower()
"""The words. Whether the first one is a capital depends on the processor."""
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def nothing_left(no_process_left: None) -> None:
    """Instead of the check after every test, for these."""


@pytest.fixture
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    base = daemon.get("/version").json()["listen"]
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, timeout=5 * HUNG) as made:
        yield made


def ask(daemon: Daemon, path: str = TRANSCRIPTIONS, *, files: Any, **texts: str) -> httpx.Response:
    with daemon.client() as client:
        return client.post(path, data={"model": WHISPER, **texts}, files=files)


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


def test_openais_client_gets_both_sentences_word_for_word(client: openai.OpenAI, speech: Speech) -> None:
    answer = client.audio.transcriptions.create(model=WHISPER, file=speech.file)
    assert answer.text.lower() == TEXT


def test_openais_client_gets_them_as_a_stream(client: openai.OpenAI, speech: Speech) -> None:
    with client.audio.transcriptions.create(model=WHISPER, file=speech.file, stream=True) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas).lower() == TEXT
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text.lower() == TEXT


TRANSCRIBE = """
import fs from "node:fs";
import OpenAI from "openai";
const [base, model, file] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0 });
const ask = { model, file: fs.createReadStream(file) };
const { text } = await client.audio.transcriptions.create(ask);
const deltas = [];
let done = "";
ask.file = fs.createReadStream(file);
for await (const event of await client.audio.transcriptions.create({ ...ask, stream: true })) {
  if (event.type === "transcript.text.delta") deltas.push(event.delta);
  else done = event.text;
}
ask.file = fs.createReadStream(file);
const srt = await client.audio.transcriptions.create({ ...ask, response_format: "srt" });
console.log(JSON.stringify({ text, deltas, done, srt }));
"""


def test_npms_openai_gets_them_whole_as_a_stream_and_as_subtitles(
    daemon: Daemon, speech: Speech, tmp_path: Path
) -> None:
    (tmp_path / "node_modules").symlink_to(program("npm", "openai") / "node_modules")
    (tmp_path / "transcribe.mjs").write_text(TRANSCRIBE)
    base = daemon.get("/version").json()["listen"]
    command = ["node", tmp_path / "transcribe.mjs", base, WHISPER, speech.file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=5 * HUNG, check=False)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert {shown["text"].lower(), "".join(shown["deltas"]).lower(), shown["done"].lower()} == {TEXT}
    assert len(shown["deltas"]) > 1
    assert [float(second) for second in re.findall(r"--> 00:00:(\d+),", shown["srt"])] == pytest.approx(
        [int(end) for _, end in speech.times], abs=1
    )


def test_subtitles_have_the_times_of_the_sentences(client: openai.OpenAI, speech: Speech) -> None:
    srt = client.audio.transcriptions.create(model=WHISPER, file=speech.file, response_format="srt")
    cues = re.findall(r"(\d+)\n(\S+) --> (\S+)\n(.*)\n\n", srt)
    assert [(number, text.lower()) for number, _, _, text in cues] == [
        (str(number), sentence.lower()) for number, sentence in enumerate(SENTENCES, 1)
    ]
    for (_, start, end, _), (begins, ends) in zip(cues, speech.times, strict=True):
        assert seconds(start) == pytest.approx(begins, abs=0.3)
        assert seconds(end) == pytest.approx(ends, abs=0.3)


def seconds(clock: str) -> float:
    hours, minutes, rest = clock.replace(",", ".").split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(rest)


def test_words_with_their_times(client: openai.OpenAI, speech: Speech) -> None:
    answer = client.audio.transcriptions.create(
        model=WHISPER, file=speech.file, response_format="verbose_json", timestamp_granularities=["word", "segment"]
    )
    words = answer.words or []
    assert [word.word.lower() for word in words] == TEXT.split()
    assert all(word.start <= word.end for word in words)
    [monday] = [word for word in words if word.word == "Monday"]
    assert speech.times[1][0] < monday.start < monday.end < speech.times[1][1]
    assert answer.language == "en"
    assert answer.duration == pytest.approx(speech.times[1][1], abs=0.05)


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the client's own, about every translation
def test_a_translation_and_further_fields(client: openai.OpenAI, speech: Speech) -> None:
    assert client.audio.translations.create(model=WHISPER, file=speech.file).text.lower() == TEXT
    vtt = client.audio.transcriptions.create(
        model=WHISPER, file=speech.file, response_format="vtt", language="en", prompt="The door.", temperature=0.2
    )
    assert str(vtt).startswith("WEBVTT\n\n00:00:")


def test_twenty_at_once(daemon: Daemon, speech: Speech) -> None:
    data = speech.file.read_bytes()
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: ask(daemon, files={"file": ("a.wav", data)}), range(20)))
    assert {(answer.status_code, answer.json()["text"].lower()) for answer in answers} == {(200, TEXT)}


def test_a_long_file_is_heard_in_windows(daemon: Daemon, speech: Speech, tmp_path: Path) -> None:
    """Each sentence of many minutes comes, with its time. Whisper may repeat one in the silence."""
    with wave.open(str(speech.file)) as file:
        settings, talk = file.getparams(), file.readframes(file.getnframes())
    rate, pause = settings.framerate, 14.0
    once = talk + bytes(2 * round(pause * rate))
    with wave.open(str(tmp_path / "long.wav"), "wb") as file:
        file.setparams(settings)
        file.writeframes(once * 12)
    with (tmp_path / "long.wav").open("rb") as sound:
        asked = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
        answer = ask(daemon, files={"file": ("a.wav", sound)}, **asked).json()
    doors = [word["start"] for word in answer["words"] if "door" in word["word"]]
    assert {int(start / (len(once) / 2 / rate)) for start in doors} == set(range(12))


def test_a_client_that_leaves_ends_the_work(daemon: Daemon, speech: Speech, tmp_path: Path) -> None:
    """It left between two segments of a sound of minutes: the lease ends with the work, and the next is answered."""
    with wave.open(str(speech.file)) as file:
        settings, talk = file.getparams(), file.readframes(file.getnframes())
    with wave.open(str(tmp_path / "long.wav"), "wb") as file:
        file.setparams(settings)
        file.writeframes(talk * 40)
    before = len(daemon.get("/engines/requests?status=499").json())
    with daemon.client() as client, (tmp_path / "long.wav").open("rb") as sound:
        sent = {"model": WHISPER, "stream": "true"}
        with client.stream("POST", TRANSCRIPTIONS, data=sent, files={"file": ("a.wav", sound)}) as answer:
            assert b"delta" in next(answer.iter_bytes())
    until(lambda: len(daemon.get("/engines/requests?status=499").json()) == before + 1)
    until(lambda: not any(runner["in_use"] for runner in daemon.runners()))
    assert ask(daemon, files={"file": speech.file.read_bytes()}).json()["text"].lower() == TEXT


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "it is empty"),
        (b"Hello, this is no sound.\n" * 40, "it is text"),
        (b"\x89PNG\r\n\x1a\n" + bytes(3000), "it is a PNG picture"),
        (b"%PDF-1.7\n" + bytes(3000), "it is a PDF document"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nfile:///etc/passwd\n", "it is text"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "it is text"),
    ],
)
def test_a_file_that_is_no_sound(daemon: Daemon, data: bytes, said: str) -> None:
    status, message = refusal(ask(daemon, files={"file": ("a.wav", data)}))
    assert (status, message.startswith("the file")) == (400, True)
    assert said in message


def test_none_two_and_a_text_in_place_of_a_file(daemon: Daemon, speech: Speech) -> None:
    data = speech.file.read_bytes()
    assert refusal(ask(daemon, files={"other": (None, b"x")})) == (400, "the form has no files: send one, as `file`")
    two = [("file", ("a.wav", data)), ("file", ("b.wav", data))]
    assert refusal(ask(daemon, files=two)) == (400, "the form has 2 files: send one, as `file`")
    status, message = refusal(ask(daemon, files={"file": (None, b"x")}))
    assert (status, "`file` is a text" in message) == (400, True)
    answer = ask(daemon, files={"file": ("a.wav", data)}, language="klingon")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "language")


BOMB = """
import sys, av
class Pipe:
    def write(self, data): return sys.stdout.buffer.write(data)
hours, target = float(sys.argv[1]), Pipe() if sys.argv[2] == "pipe" else sys.argv[2]
with av.open(target, "w", format="flac") as file:
    track = file.add_stream("flac", rate=8000, layout="mono")
    frame = av.AudioFrame("s16", "mono", 65536)
    frame.planes[0].update(bytes(131072))
    frame.sample_rate = 8000
    for number in range(int(hours * 3600 * 8000 / 65536)):
        frame.pts = None
        for packet in track.encode(frame):
            file.mux(packet)
    for packet in track.encode(None):
        file.mux(packet)
"""


@pytest.mark.parametrize("tells_its_length", [True, False])
def test_a_bomb_is_refused(daemon: Daemon, installed: Path, tmp_path: Path, tells_its_length: bool) -> None:
    """Five hours of silence in a fortieth of their samples, whose head says so or does not."""
    target = str(tmp_path / "bomb.flac") if tells_its_length else "pipe"
    made = subprocess.run([installed / "bin/python", "-c", BOMB, "5", target], capture_output=True, check=True)
    data = (tmp_path / "bomb.flac").read_bytes() if tells_its_length else made.stdout
    assert len(data) < 5 * 3600 * 8000 / 40
    status, message = refusal(ask(daemon, files={"file": ("a.flac", data)}))
    assert (status, "longer than 14400 seconds" in message) == (413, True)


def test_a_wav_that_no_ear_would_hear(daemon: Daemon) -> None:
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, 1, 1, 1, 8)
    data = b"RIFF" + struct.pack("<I", MIB) + b"WAVE" + form + struct.pack("<4sI", b"data", MIB) + bytes(MIB)
    status, message = refusal(ask(daemon, files={"file": ("a.wav", data)}))
    assert (status, "1 samples a second" in message) == (400, True)


def test_200_megabytes_pass_without_being_held_in_memory(daemon: Daemon, tmp_path: Path) -> None:
    file, size = tmp_path / "big", 200 * MIB
    with file.open("wb") as written:
        written.truncate(size)
    assert daemon.process is not None
    process = psutil.Process(daemon.process.pid)
    ask(daemon, files={"file": ("a.wav", bytes(16 * MIB))})  # what the first large body takes once, such as threads
    before = most = process.memory_info().rss
    answers: list[httpx.Response] = []

    def send() -> None:
        with file.open("rb") as opened:
            answers.append(ask(daemon, files={"file": ("a.wav", opened)}))

    sending = threading.Thread(target=send)
    sending.start()
    while sending.is_alive():
        most = max(most, process.memory_info().rss)
        sending.join(0.005)
    [answer] = answers
    assert answer.status_code == 400, answer.text
    assert most - before < 20 * MIB
    with contextlib.suppress(httpx.HTTPError):  # the answer may come before all is sent
        status, message = refusal(ask(daemon, files={"file": ("a.wav", bytes(257 * MIB))}))
        assert (status, "upload_limit" in message) == (413, True)


def test_the_command_line(daemon: Daemon, speech: Speech) -> None:
    done = daemon.run("transcribe", str(speech.file))
    assert (done.returncode, done.stdout.lower()) == (0, f"{TEXT}\n"), done.stderr
    done = daemon.run("run", WHISPER, str(speech.file))
    assert (done.returncode, done.stdout.lower()) == (0, f"{TEXT}\n"), done.stderr
    done = daemon.run("transcribe", str(speech.file), "--format", "json", "--model", WHISPER)
    assert json.loads(done.stdout)["text"].lower() == TEXT
    done = daemon.run("transcribe", __file__, str(speech.file), "--format", "srt")
    assert (done.returncode, "it is text" in done.stderr, "2\n00:00:0" in done.stdout) == (1, True, True)


def test_nothing_is_left_in_the_folder_of_the_runner(daemon: Daemon, tmp_path: Path) -> None:
    for name in ("../../stray", str(tmp_path / "stray")):
        assert ask(daemon, files={"file": (name, b"no sound")}).status_code == 400
    assert not [*daemon.data.rglob("stray"), *tmp_path.iterdir()]
    [runner] = (daemon.data / "state" / "whisper").iterdir()
    assert not list(runner.iterdir())
    assert daemon.run("unload", "--all").returncode == 0
    assert not list((daemon.data / "state" / "whisper").iterdir())
