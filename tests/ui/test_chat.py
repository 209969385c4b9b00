"""The view Chat, in a browser."""

import asyncio
import base64
import json
import re
import sys
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.api.conftest import StartDaemon
from tests.ui.conftest import PHONE, TALKS, ZOOMED, OpenPage, Watch, say
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
FORMULAS = r"""It costs $5 and $10, and $x^2$ is \(y\), but $\nothing{x$ is none.

$$
\frac{a}{b}
$$

```python
def half(x):  # half
    return x / 2
```
"""
HOSTILE = """<img src=x onerror="document.title='owned'"> <script>document.title='owned'</script>
[press](javascript:document.title='owned') [data](data:text/html,x) [here](https://example.com/page)
![picture](https://example.com/picture.png) <svg onload="document.title='owned'"></svg>
<style>body{display:none}</style><form action="https://example.com"><button>send</button></form>
"""


async def asked(record: Path, count: int) -> list[dict]:
    """The bodies that the engine got, once there are so many."""
    async with asyncio.timeout(HUNG):
        while True:
            lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
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
    await page.get_by_role("link", name="Write code").click()
    await expect(page.locator(".message.user .body")).to_have_text("Write more code")
    await expect(page.locator(".message.assistant")).to_have_count(1)


async def test_formulas_and_code_are_shown_as_such(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    daemon.backend.knobs = ("--text", FORMULAS)
    page = await open_page(daemon, "#/chat")
    await say(page, "Explain it")
    answer = page.locator(".message.assistant")
    await expect(answer.get_by_text("first token")).to_be_visible()
    await expect(answer.locator("math")).to_have_count(3)
    await expect(answer.locator(".display mfrac")).to_have_count(1)
    await expect(answer.locator("p").first).to_contain_text("costs $5 and $10")
    await expect(answer.get_by_text("$\\nothing{x$")).to_be_visible()  # no formula: it stays as it was written
    await expect(answer.locator(".code-word")).to_have_text(["def", "return"])
    await expect(answer.locator(".code-comment")).to_have_text("# half")


async def test_a_tool_of_the_daemon_is_run_when_a_person_says_so(
    start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path
) -> None:
    server = {"command": [sys.executable, str(Path(__file__).parent.parent / "tools" / "server.py")]}
    template = {"tokenizer.chat_template": "{{ tools }}" + TALKS["tokenizer.chat_template"]}
    daemon = await start_daemon(models={"smol": 0}, metadata=template, mcp={"local": server}, tools_time=20.0)
    record = tmp_path / "record"
    calls = json.dumps([["local__add", {"a": 2, "b": 3}]])
    daemon.backend.knobs = ("--round", calls, "--text", "It is five.", "--record", str(record))
    page = await open_page(daemon, "#/chat")
    await page.get_by_role("button", name="Options of this conversation").click()
    await page.get_by_role("button", name="Add the daemon's tools").click()
    await expect(page.get_by_label("Tools", exact=True)).to_have_value(re.compile("local__add"))
    await page.get_by_role("button", name="Save").click()
    await say(page, "What is 2 and 3?")
    await page.get_by_role("button", name="Run it on the daemon").click()
    await expect(page.get_by_text("Result of local__add")).to_be_visible()
    _, second = await asked(record, 2)
    called, result = second["messages"][-2:]
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"a": 2, "b": 3}
    assert (result["role"], result["content"]) == ("tool", "5")
    assert result["tool_call_id"] == called["tool_calls"][0]["id"]
    await expect(page.get_by_role("button", name="Run it on the daemon")).to_have_count(0)


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
    links = await answer.locator(".prose a").evaluate_all("links => links.map((link) => link.getAttribute('href'))")
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
    await page.clock.set_fixed_time(1_790_000_000_000)  # question and answer are of one moment
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


async def test_a_fault_is_told_and_the_next_try_works(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    daemon.backend.knobs = ("--die", "2", "--only-for", "perish")
    page = await open_page(daemon, "#/chat", size=PHONE)
    await say(page, "perish")
    await expect(page.locator(".message .notice.bad")).to_contain_text("the fake engine threw up")
    await page.get_by_role("button", name="Edit the message").click()
    await say(page, "live")
    await expect(page.get_by_text("first token")).to_be_visible()


async def test_an_edit_keeps_what_was_said_before(
    start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path
) -> None:
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    record = tmp_path / "record"
    daemon.backend.knobs = ("--record", str(record))
    page = await open_page(daemon, "#/chat")
    await say(page, "First words")
    await expect(page.get_by_text("first token")).to_be_visible()
    await say(page, "More words")
    await expect(page.get_by_text("first token")).to_have_count(2)
    await page.get_by_role("button", name="Edit the message").first.click()
    await expect(page.get_by_label("Message", exact=True)).to_have_value("First words")
    await say(page, "Other words")
    await expect(page.get_by_text("first token")).to_have_count(1)
    await page.get_by_role("button", name="Ask again").click()
    await expect(page.locator(".message.assistant").get_by_text("2 of 2")).to_be_visible()
    bodies = await asked(record, 4)
    assert [message["content"] for message in bodies[3]["messages"]] == ["Other words"]
    await page.reload()
    await page.get_by_role("button", name="Earlier version").first.click()
    await expect(page.locator(".message.user .body")).to_have_text(["First words", "More words"])
    await expect(page.locator(".message.assistant")).to_have_count(2)


async def test_conversations_are_found_and_renamed(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    daemon.backend.knobs = ("--text", "Oranges are round.", "--only-for", "fruit")
    page = await open_page(daemon, "#/chat")
    await say(page, "About fruit")
    await expect(page.get_by_text("first token")).to_be_visible()
    daemon.backend.knobs = ()
    await page.get_by_role("link", name="New").click()
    await say(page, "About stars")
    await expect(page.get_by_text("first token")).to_be_visible()
    for words, found in (("STARS", ["About stars"]), ("fruit", ["About fruit"]), ("nothing like it", [])):
        await page.get_by_label("Search the conversations").fill(words)
        await expect(page.locator(".talks li a")).to_have_text(found)
    await page.get_by_label("Search the conversations").fill("")
    await page.get_by_role("button", name="Rename: About fruit").click()
    await page.get_by_label("Title").fill("Apples")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("dialog")).to_be_hidden()
    await page.reload()
    await expect(page.locator(".talks li a")).to_have_text(["About stars", "Apples"])


async def test_options_reach_the_engine_and_are_kept_as_a_preset(
    start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path
) -> None:
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    record = tmp_path / "record"
    daemon.backend.knobs = ("--record", str(record))
    page = await open_page(daemon, "#/chat")
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    options = page.get_by_role("button", name="Options of this conversation")
    await options.click()
    form = page.get_by_role("dialog")
    values = {"temperature": 0.5, "top_k": 40, "min_p": 0.1, "presence_penalty": -0.5, "seed": 7}
    for name, value in values.items():
        await form.get_by_label(name, exact=True).fill(str(value))
    await form.get_by_label("stop", exact=True).fill("END\nSTOP")
    await form.get_by_label("JSON schema").fill("{")
    await form.get_by_role("button", name="Save").click()
    await expect(form.get_by_role("alert")).to_have_text("The schema is not valid JSON.")
    await form.get_by_label("JSON schema").fill('{"type": "object"}')
    await form.get_by_label("Name of a preset").fill("strict")
    await form.get_by_role("button", name="Keep as a preset").click()
    await form.get_by_role("button", name="Copy as curl").click()
    await expect(page.get_by_text("Copied")).to_be_visible()
    copied = await page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith(f"curl http://127.0.0.1:{daemon.port}/v1/chat/completions ")
    assert json.loads(copied.partition("-d '")[2].removesuffix("'")).items() >= values.items()
    await form.get_by_role("button", name="Copy as Python").click()
    await form.get_by_role("button", name="Save").click()
    await say(page, "Hello")
    (body,) = await asked(record, 1)
    assert body.items() >= (values | {"stop": ["END", "STOP"]}).items()
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    await page.get_by_role("link", name="New").click()
    await options.click()
    await form.get_by_label("Preset", exact=True).select_option("strict")
    await expect(form.get_by_label("top_k")).to_have_value("40")


async def test_a_text_file_goes_with_the_message_and_counts(
    start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path
) -> None:
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    record = tmp_path / "record"
    daemon.backend.knobs = ("--record", str(record))
    page = await open_page(daemon, "#/chat")
    chooser = page.locator("input[type=file][multiple]")
    await chooser.set_input_files({"name": "no.bin", "mimeType": "", "buffer": b"\xff\x00"})
    await expect(page.get_by_text("no.bin is no text in UTF-8.")).to_be_visible()
    await chooser.set_input_files({"name": "long.txt", "mimeType": "text/plain", "buffer": b"word " * 100_000})
    await expect(page.get_by_role("alert")).to_contain_text("more than the window has")
    await page.get_by_role("button", name="Remove long.txt").click()
    await chooser.set_input_files({"name": "note.txt", "mimeType": "text/plain", "buffer": b"the secret is 42"})
    await page.get_by_role("link", name="Now", exact=True).click()
    await page.get_by_role("link", name="Chat", exact=True).click()
    await expect(page.get_by_text("note.txt")).to_be_visible()  # a draft has its files
    await say(page, "What is it?")
    (body,) = await asked(record, 1)
    assert body["messages"][0]["content"] == "What is it?\n\nnote.txt:\n```\nthe secret is 42\n```"
    await expect(page.locator(".composer")).to_contain_text(re.compile(r"\d+ of [\d,]+ tokens"))


HIDDEN_BELOW = (
    "() => (({ scrollHeight, scrollTop, clientHeight }) => scrollHeight - scrollTop - clientHeight)"
    "(document.querySelector('.messages'))"
)
"""The height of what is below the end of the box of messages."""


async def test_a_small_window_follows_a_growing_answer(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    """At 200 % few lines are in sight. Who scrolls up stays there, and the next question leads to the end again."""
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    daemon.backend.knobs = ("--text", "A paragraph of the answer.\n\n" * 60, "--rate", "400")
    page = await open_page(daemon, "#/chat", size=ZOOMED)
    box = page.get_by_label("Messages")
    for count in (1, 2):
        await say(page, "Hello")
        await expect(page.get_by_text("first token")).to_have_count(count)
        await page.wait_for_function(HIDDEN_BELOW + " < 2")
        assert await box.evaluate("box => box.scrollHeight > 3 * box.clientHeight")
        await box.hover()
        await page.mouse.wheel(0, -400)
        await page.wait_for_function(HIDDEN_BELOW + " > 300")
