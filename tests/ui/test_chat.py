"""The view Chat, in a browser."""

import asyncio
import base64
import json
from pathlib import Path

import pytest
from playwright.async_api import Page, expect

from tests.api.conftest import StartDaemon
from tests.ui.conftest import PHONE, TALKS, OpenPage, Watch
from tests.waiting import HUNG

pytestmark = pytest.mark.engine

TEXT = """Here is a *list* and `code`:

- one
- two

```python
print("hello")
```

| name | size |
|---|---|
| smol | 5 KiB |
"""
HOSTILE = """<img src=x onerror="document.title='owned'"> <script>document.title='owned'</script>
[press](javascript:document.title='owned') [data](data:text/html,x) [here](https://example.com/page)
![picture](https://example.com/picture.png) <svg onload="document.title='owned'"></svg>
<style>body{display:none}</style><form action="https://example.com"><button>send</button></form>
"""


async def say(page: Page, text: str) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()  # the list of models is here
    await page.keyboard.press("Enter")


async def asked(record: Path, count: int) -> list[dict]:
    """The bodies that the engine got, once there are so many."""
    async with asyncio.timeout(HUNG):
        while True:
            lines = [json.loads(line) for line in record.read_text().splitlines()]
            bodies = [json.loads(line["body"]) for line in lines if "body" in line]
            if len(bodies) >= count:
                return bodies
            await asyncio.sleep(0.01)


async def test_a_conversation(start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path):
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    record = tmp_path / "record"
    daemon.backend.knobs = (
        "--text",
        TEXT,
        "--reasoning",
        "So **be it**.",
        "--tool",
        "get_weather",
        "--record",
        str(record),
    )
    page = await open_page(daemon, "#/chat")
    await say(page, "Write code")
    answer = page.locator(".message.assistant")
    await expect(answer.get_by_text("first token")).to_be_visible()
    await expect(answer.get_by_role("listitem")).to_have_count(2)
    await expect(answer.locator("pre code").first).to_have_text('print("hello")')
    await expect(answer.get_by_text("So be it.")).to_be_hidden()  # folded
    await answer.get_by_text("Thought").click()
    await expect(answer.get_by_text("So be it.")).to_be_visible()
    await expect(answer.get_by_text("get_weather")).to_be_visible()
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await answer.get_by_role("button", name="Copy the code").click()
    await expect(answer.get_by_text("Copied")).to_be_visible()
    assert await page.evaluate("navigator.clipboard.readText()") == 'print("hello")'
    # options
    await page.get_by_role("button", name="Options of this conversation").click()
    await page.get_by_label("System prompt").fill("Be brief.")
    await page.get_by_label("temperature").fill("0.5")
    await page.get_by_role("button", name="Save").click()
    # again, and edited
    await page.get_by_role("button", name="Ask again").click()
    await asked(record, 2)
    await page.get_by_role("button", name="Edit the message").click()
    await say(page, "Write more code")
    first, again, edited = await asked(record, 3)
    await expect(page.get_by_text("first token")).to_be_visible()
    assert "temperature" not in first
    assert again["temperature"] == 0.5
    assert [message["content"] for message in edited["messages"]] == ["Be brief.", "Write more code"]
    # kept, once it is complete
    await expect(page.get_by_role("button", name="Ask again")).to_be_visible()
    await page.reload()
    await page.get_by_role("link", name="Write more code").click()
    await expect(page.locator(".message.assistant")).to_have_count(1)


async def test_stop_in_the_middle(start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path):
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    record = tmp_path / "record"
    daemon.backend.knobs = ("--token-gate", str(tmp_path / "gate"), "--record", str(record))
    page = await open_page(daemon, "#/chat")
    await say(page, "Count")
    await expect(page.locator(".message.assistant")).to_contain_text("w0")
    await page.get_by_role("button", name="Stop the answer").click()
    await expect(page.get_by_text("stopped")).to_be_visible()
    await expect(page.locator(".message.assistant")).to_contain_text("w0")
    await page.goto(f"http://127.0.0.1:{daemon.port}/#/now")
    await expect(page.get_by_role("article", name="smol")).to_contain_text("0 of 1")  # the engine is free again
    assert any("left" in line for line in record.read_text().splitlines())


async def test_the_stage_while_the_model_loads(start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path):
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    gate = tmp_path / "gate"
    daemon.backend.knobs = ("--gate", str(gate))
    page = await open_page(daemon, "#/chat")
    await say(page, "Hello")
    await expect(page.get_by_text("Its model: loading")).to_be_visible()
    gate.touch()
    await expect(page.get_by_text("first token")).to_be_visible()


async def test_the_place_in_line_while_another_model_has_the_memory(
    start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path
):
    """Memory for one model: the first waits for its load, the second for room, and the page is behind them."""
    models = {"smol": 0, "second": 1, "third": 2}
    daemon = await start_daemon(models=models, metadata=TALKS, memory_budget=100 << 20)
    gate = tmp_path / "gate"
    daemon.backend.knobs = ("--gate", str(gate))
    page = await open_page(daemon)

    async def ask(model: str) -> int:
        body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
        async with daemon.tcp.post("/v1/chat/completions", json=body) as answer:
            await answer.read()
            return answer.status

    first = asyncio.create_task(ask("smol"))
    await expect(page.get_by_role("article", name="smol")).to_contain_text("loading")
    second = asyncio.create_task(ask("second"))
    await expect(page.get_by_role("region", name="Waiting")).to_contain_text("second")
    await page.goto(f"http://127.0.0.1:{daemon.port}/#/chat/new/third")
    await say(page, "Hello")
    await expect(page.get_by_role("status").filter(has_text="Its model: queued")).to_contain_text("place 3 in line")
    gate.touch()
    await expect(page.get_by_text("first token")).to_be_visible()
    assert (await first, await second) == (200, 200)


async def test_a_hostile_answer_does_nothing(
    start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path, watch: Watch
):
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    daemon.backend.knobs = ("--text", HOSTILE, "--reasoning", HOSTILE)
    page = await open_page(daemon, "#/chat")
    await say(page, HOSTILE)
    answer = page.locator(".message.assistant")
    await expect(answer.get_by_text("first token")).to_be_visible()
    await answer.get_by_text("Thought").click()
    await expect(answer.locator(".prose").locator("img, script, svg, style, form, button")).to_have_count(0)
    links = await answer.locator(".prose > div a").evaluate_all(
        "links => links.map((link) => link.getAttribute('href'))"
    )
    assert [link for link in links if link] == [*(["https://example.com/page", "https://example.com/picture.png"] * 2)]
    await answer.get_by_text("press").last.click()
    assert await page.title() == "Chat · modelrunner"


async def test_images_for_a_model_that_sees(start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path):
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    record = tmp_path / "record"
    daemon.backend.knobs = ("--record", str(record))
    page = await open_page(daemon)
    seeing = {"data": [{"id": "smol", "capabilities": ["chat", "vision"]}]}
    await page.route("**/v1/models", lambda route: route.fulfill(json=seeing))
    await page.goto(f"http://127.0.0.1:{daemon.port}/#/chat")
    png = base64.b64decode(
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    )
    await page.locator("input[type=file][multiple]").set_input_files(
        {"name": "dot.png", "mimeType": "image/png", "buffer": png}
    )
    await expect(page.get_by_alt_text("Image 1 to send")).to_be_visible()
    await say(page, "What is it?")
    await expect(page.locator(".notice.bad, .speed").first).to_be_visible()  # the model here does not really see
    await expect(page.get_by_alt_text("Image 1 of the message")).to_be_visible()


async def test_conversations_are_exported_and_imported(start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path):
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    page = await open_page(daemon, "#/chat")
    await say(page, "Remember this")
    await expect(page.get_by_text("first token")).to_be_visible()
    async with page.expect_download() as download:
        await page.get_by_role("button", name="Export the conversations").click()
    saved = tmp_path / "conversations.json"
    await (await download.value).save_as(saved)
    assert json.loads(saved.read_text())["conversations"][0]["messages"][0]["content"] == "Remember this"
    other = await open_page(daemon, "#/chat")
    await expect(other.get_by_role("link", name="Remember this")).to_have_count(0)
    await other.get_by_label("File of conversations").set_input_files(saved)
    await other.get_by_role("link", name="Remember this").click()
    await expect(other.locator(".message.assistant")).to_contain_text("w0")
    await other.get_by_role("button", name="Delete: Remember this").click()
    await other.get_by_role("button", name="Delete", exact=True).click()
    await expect(other.get_by_role("link", name="Remember this")).to_have_count(0)


async def test_a_fault_is_told_and_the_next_try_works(start_daemon: StartDaemon, open_page: OpenPage, watch: Watch):
    watch.allowed = ["ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET", "502"]
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    daemon.backend.knobs = ("--die", "2", "--only-for", "perish")
    page = await open_page(daemon, "#/chat", size=PHONE)
    await say(page, "perish")
    await expect(page.locator(".message .notice.bad")).to_be_visible()
    await page.get_by_role("button", name="Edit the message").click()
    await say(page, "live")
    await expect(page.get_by_text("first token")).to_be_visible()
