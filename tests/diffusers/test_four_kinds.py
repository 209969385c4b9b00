"""A chat, a transcription, a speech and a picture at the same time, by four engines, where there is room for two."""

import base64
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from modelrunner.store import Store
from tests.e2e.conftest import SMOLLM2, StartDaemon, no_process_left
from tests.e2e.daemons import Daemon
from tests.models.prepare import PIPER, WHISPER
from tests.models.prepare import prepared as prepared_chats
from tests.models.prompts import MESSAGES, PARIS
from tests.whisper.conftest import SENTENCES, Speech, cached, known_format, prepared, speech

__all__ = ["known_format", "no_process_left", "prepared", "speech"]
pytestmark = [pytest.mark.engine, pytest.mark.nightly]
ROUNDS = 3
MODELS = ("chat", WHISPER, PIPER, "tiny")


@pytest.fixture(autouse=True)
def nothing_left(no_process_left: None) -> None:
    """Instead of the check after every test, for these."""


@pytest.fixture(scope="module")
def daemon(make_daemon: StartDaemon, tiny: Path) -> Daemon:
    """One with the four models and engines, and memory for the two largest of them."""
    daemon = make_daemon("wheel")
    for name in ("whisper", "piper", "diffusers"):
        (daemon.data / "engines" / name).symlink_to(cached(name))
    daemon.start()
    file = Store(prepared_chats()).bundle(SMOLLM2).model_file
    for options in (("--gguf", str(file), "chat"), ("--safetensors-dir", str(tiny), "tiny")):
        done = daemon.run("package", *options)
        assert done.returncode == 0, done.stderr
    needs = [daemon.get(f"/models/{model}/fit").json()["needed"]["ram"] for model in MODELS]
    daemon.stop()
    daemon.start(memory_budget=str(sum(sorted(needs)[-2:])), keep_alive="-1")
    return daemon


def test_each_is_answered_and_the_memory_is_kept(daemon: Daemon, speech: Speech) -> None:
    def chat() -> str:
        body = {"model": "chat", "messages": MESSAGES, "temperature": 0}
        return str(daemon.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"])

    def hear() -> str:
        with daemon.client() as client:
            files = {"file": ("a.wav", speech.file.read_bytes())}
            answer = client.post("/v1/audio/transcriptions", data={"model": WHISPER}, files=files)
        return str(answer.json()["text"]).lower()

    def say() -> bytes:
        return daemon.post("/v1/audio/speech", {"model": PIPER, "input": SENTENCES[0]}).content

    def draw() -> bytes:
        body = {"model": "tiny", "prompt": "a cat", "steps": 4}
        return base64.b64decode(daemon.post("/v1/images/generations", body).json()["data"][0]["b64_json"])

    most = 0
    with ThreadPoolExecutor(4 * ROUNDS) as pool:
        asked = [[pool.submit(kind) for kind in (chat, hear, say, draw)] for _ in range(ROUNDS)]
        while not all(one.done() for each in asked for one in each):
            most = max(most, len(daemon.runners()))
    assert 2 <= most < 4
    answers = [[one.result() for one in each] for each in asked]
    for said, written, sound, picture in answers:
        assert PARIS in str(said)
        assert written == " ".join(SENTENCES).lower()
        assert re.match(rb"ID3|\xff[\xf2\xf3\xfb]", bytes(sound))  # type: ignore[arg-type]
        assert bytes(picture).startswith(b"\x89PNG")  # type: ignore[arg-type]
