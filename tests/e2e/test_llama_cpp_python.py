"""A daemon whose configuration names llama-cpp-python's server: one sequence, no slots, usage in plain answers."""

import json
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import SMOLLM2, StartDaemon
from tests.e2e.daemons import Daemon, until
from tests.e2e.test_images_and_sound import BOTH, HEARS, NEITHER, PIXEL, SEES, TORN, chat, image, package, sound, wav
from tests.llamacpp.conftest import llama_cpp_python
from tests.models.projector import IMAGE_TOKENS
from tests.models.prompts import PARIS

pytestmark = pytest.mark.nightly
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def daemon(make_daemon: StartDaemon) -> Daemon:
    """One for the tests of this module."""
    daemon = make_daemon(None)
    python = json.dumps(str(llama_cpp_python()))
    (daemon.data.parent / "config.toml").write_text(f'[backends."llama.cpp"]\npython = {python}\n', "utf-8")
    daemon.start()
    return daemon


def test_a_chat_plain_and_streamed(daemon: Daemon) -> None:
    answer = daemon.chat(SMOLLM2, max_tokens=16)
    assert (answer.status_code, PARIS in answer.json()["choices"][0]["message"]["content"]) == (200, True)
    assert answer.json()["usage"]["completion_tokens"] > 3
    streamed = daemon.chat(SMOLLM2, max_tokens=16, stream=True)
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
    words = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]]
    assert (PARIS in "".join(words), events[-1]) == (True, "[DONE]")


def test_a_refusal_says_why(daemon: Daemon) -> None:
    too_long = daemon.chat(SMOLLM2, "hello " * 9000).json()["error"]
    assert (too_long["code"], too_long["n_ctx"]) == ("context_length_exceeded", 8192)
    wrong = daemon.chat(SMOLLM2, temperature="hot")
    assert (wrong.status_code, "temperature" in wrong.json()["error"]["message"]) == (400, True)


def test_requests_that_are_given_up_hold_nobody_up(daemon: Daemon) -> None:
    body = {"model": SMOLLM2, "messages": [{"role": "user", "content": "Tell a story"}], "max_tokens": 150}
    with daemon.client(timeout=0.2) as client, pytest.raises(httpx.ReadTimeout):
        client.post(CHAT, json=body)
    with daemon.client() as client, client.stream("POST", CHAT, json=body | {"stream": True}) as answer:
        next(answer.iter_bytes())
    assert daemon.chat(SMOLLM2, max_tokens=2).status_code == 200
    until(lambda: daemon.runners()[0]["leases"] == 0)


def test_images_are_seen_and_sound_is_not_heard(daemon: Daemon, tmp_path: Path) -> None:
    """An image is never left out in silence, which is what this server does for a model without a projector."""
    package(daemon, tmp_path)
    without = {model: chat(daemon, model) for model in (SEES, BOTH, HEARS, NEITHER)}
    assert {answer.status_code for answer in without.values()} == {200}
    for model in (SEES, BOTH):
        answer = chat(daemon, model, image(PIXEL))
        used = [one.json()["usage"]["prompt_tokens"] for one in (without[model], answer)]
        assert used[1] == used[0] + IMAGE_TOKENS
    listed = {model["id"]: model["capabilities"] for model in daemon.get("/v1/models").json()["data"]}
    assert [name for name, able in listed.items() if "audio" in able] == []
    assert {name for name, able in listed.items() if "vision" in able} == {SEES, BOTH}
    for model, part, said in (
        (HEARS, image(PIXEL), "image input is not supported"),
        (NEITHER, image(PIXEL), "image input is not supported"),
        (NEITHER, sound(wav(1)), "audio input is not supported"),
        (BOTH, sound(wav(1)), "audio input is not supported"),
        (SEES, {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}, "send one as a data: URL"),
        (SEES, {"type": "image_url", "image_url": "file:///etc/passwd"}, "send one as a data: URL"),
    ):
        for stream in (False, True):
            refused = chat(daemon, model, part, stream=stream)
            assert (refused.status_code, said in refused.json()["error"]["message"]) == (400, True)
    torn = chat(daemon, SEES, image(TORN))
    assert (torn.status_code, "Failed to create bitmap" in torn.json()["error"]["message"]) == (400, True)
