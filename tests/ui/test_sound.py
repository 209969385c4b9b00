"""Answers that are read aloud, and speech that is written down, in a browser with a microphone of its own."""

import json
import struct

import pytest
from playwright.async_api import Page, Request, Route, expect

from tests.api.conftest import Daemon, StartDaemon
from tests.ui import conftest
from tests.ui.conftest import TALKS, OpenPage, Watch, say

pytestmark = pytest.mark.engine

# What is played, in seconds, each with its first sample.
PLAYED = """window.played = [];
const start = AudioBufferSourceNode.prototype.start;
AudioBufferSourceNode.prototype.start = function (at) {
  window.played.push([this.buffer.duration, this.buffer.getChannelData(0)[0]]);
  return start.call(this, at);
};"""
SPEECH, TRANSCRIPTIONS = "**/v1/audio/speech", "**/v1/audio/transcriptions"


@pytest.fixture(autouse=True)
def microphone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chromium's own, which beeps, and which every page may use."""
    fake = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    monkeypatch.setattr(conftest, "FLAGS", [*conftest.FLAGS, *fake])


async def with_models(page: Page, *capabilities: str) -> None:
    """The daemon's list has a model for each of these besides its own."""

    async def more(route: Route) -> None:
        answer = await route.fetch()
        found = await answer.json()
        found["data"] += [{"id": f"the-{one}", "object": "model", "capabilities": [one]} for one in capabilities]
        await route.fulfill(response=answer, json=found)

    await page.route("**/v1/models", more)
    await page.reload()


@pytest.fixture
async def daemon(start_daemon: StartDaemon) -> Daemon:
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    daemon.backend.knobs = ("--text", "Here is *it*:\n\n```python\nprint()\n```\n\nThe [end](https://example.com).")
    return daemon


async def test_an_answer_is_read_aloud(daemon: Daemon, open_page: OpenPage) -> None:
    page = await open_page(daemon, "#/chat", script=PLAYED)
    await with_models(page, "speech")
    asked: list[Request] = []

    async def sound(route: Route) -> None:
        asked.append(route.request)
        await route.fulfill(body=struct.pack("<2400h", 16384, *range(2399)), content_type="audio/pcm")

    await page.route(SPEECH, sound)
    await say(page, "Say it")
    await page.get_by_role("button", name="Read the answer aloud").click()
    await page.wait_for_function("window.played.length === 1")
    assert await page.evaluate("window.played[0].map((one) => Math.round(one * 100))") == [10, 50]
    await expect(page.get_by_role("button", name="Read the answer aloud")).to_be_visible()  # again, at its end
    [request] = asked
    body = json.loads(request.post_data or "")
    assert (body["model"], body["response_format"]) == ("the-speech", "pcm")
    assert " ".join(body["input"].split()) == "Here is it : The end."


async def test_the_reading_is_stopped(daemon: Daemon, open_page: OpenPage) -> None:
    page = await open_page(daemon, "#/chat", script=PLAYED)
    await with_models(page, "speech")
    await page.route(SPEECH, lambda route: route.fulfill(body=bytes(2 * 24000 * 60), content_type="audio/pcm"))
    await say(page, "Say it")
    await page.get_by_role("button", name="Read the answer aloud").click()
    await page.get_by_role("button", name="Stop reading").click()
    await expect(page.get_by_role("button", name="Read the answer aloud")).to_be_visible()


async def test_speech_is_written_down(daemon: Daemon, open_page: OpenPage) -> None:
    page = await open_page(daemon, "#/chat")
    await with_models(page, "transcription")
    forms: list[bytes] = []

    async def heard(route: Route) -> None:
        forms.append(route.request.post_data_buffer or b"")
        await route.fulfill(json={"text": " close the door. "})

    await page.route(TRANSCRIPTIONS, heard)
    field = page.get_by_label("Message", exact=True)
    await field.fill("Please ")
    await page.get_by_role("button", name="Dictate").click()
    await page.get_by_role("button", name="End the dictation").click()
    await expect(field).to_have_value("Please close the door.")
    await expect(page.get_by_role("button", name="Dictate")).to_be_enabled()
    assert b'name="model"\r\n\r\nthe-transcription\r\n' in forms[0]
    assert b'name="file"' in forms[0]


async def test_a_fault_is_told_and_the_button_comes_back(daemon: Daemon, open_page: OpenPage, watch: Watch) -> None:
    watch.allowed = ["400"]
    page = await open_page(daemon, "#/chat")
    await with_models(page, "transcription", "speech")
    fault = {"error": {"message": "the file is no sound", "code": "bad_request"}}
    await page.route("**/v1/audio/*", lambda route: route.fulfill(status=400, json=fault))
    await page.get_by_role("button", name="Dictate").click()
    await page.get_by_role("button", name="End the dictation").click()
    await expect(page.get_by_text("the file is no sound")).to_be_visible()
    await expect(page.get_by_role("button", name="Dictate")).to_be_enabled()
    await say(page, "Say it")
    await page.get_by_role("button", name="Read the answer aloud").click()
    await expect(page.get_by_text("the file is no sound").last).to_be_visible()
    await expect(page.get_by_role("button", name="Read the answer aloud")).to_be_enabled()


async def test_without_models_of_sound_there_are_no_buttons(daemon: Daemon, open_page: OpenPage) -> None:
    page = await open_page(daemon, "#/chat")
    await say(page, "Say it")
    await expect(page.get_by_role("button", name="Ask again")).to_be_visible()
    await expect(page.get_by_role("button", name="Dictate")).to_have_count(0)
    await expect(page.get_by_role("button", name="Read the answer aloud")).to_have_count(0)
