"""What the chat may never lose: answers, turns and drafts, whatever happens to its tabs."""

import asyncio
import json
from pathlib import Path

import pytest
from playwright.async_api import FilePayload, Page, expect

from tests.api.conftest import Daemon, StartDaemon
from tests.ui.conftest import TALKS, OpenPage, Watch, say, show
from tests.waiting import HUNG

pytestmark = pytest.mark.engine

TURNS = ["Hello", "From the second tab", "From the first tab"]
WHOLE = "w0 w1 w2 w3 w4"


@pytest.fixture
async def held(start_daemon: StartDaemon, tmp_path: Path) -> Daemon:
    """A daemon whose answers stop after their first word until `tmp_path / "gate"` exists."""
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    record = str(tmp_path / "record")
    daemon.backend.knobs = ("--tokens", "5", "--token-gate", str(tmp_path / "gate"), "--record", record)
    return daemon


async def beside(page: Page, address: str = "") -> Page:
    """Another tab of the same browser."""
    other = await page.context.new_page()
    await other.goto(address or page.url)
    return other


async def test_an_answer_goes_on_after_a_reload(held: Daemon, open_page: OpenPage, tmp_path: Path) -> None:
    page = await open_page(held, "#/chat")
    await say(page, "Count")
    answer = page.locator(".message.assistant")
    await expect(answer).to_contain_text("w0")
    await page.reload()
    await expect(answer).to_contain_text("w0")
    await expect(page.get_by_role("button", name="Stop the answer")).to_be_visible()
    (tmp_path / "gate").touch()
    await expect(answer).to_contain_text(WHOLE)
    await expect(page.get_by_text("first token")).to_be_visible()
    await page.reload()
    await expect(answer).to_contain_text(WHOLE)
    assert '"left"' not in (tmp_path / "record").read_text()


async def test_an_answer_goes_on_in_the_tab_that_is_left(held: Daemon, open_page: OpenPage, tmp_path: Path) -> None:
    page = await open_page(held, "#/chat")
    await say(page, "Count")
    await expect(page.locator(".message.assistant")).to_contain_text("w0")
    other = await beside(page)
    await expect(other.locator(".message.assistant")).to_contain_text("w0")
    await page.close()
    (tmp_path / "gate").touch()
    await expect(other.locator(".message.assistant")).to_contain_text(WHOLE)
    await expect(other.get_by_text("first token")).to_be_visible()


async def test_an_answer_that_the_daemon_lost_says_so_and_keeps_what_came(
    held: Daemon, open_page: OpenPage, start_daemon: StartDaemon, watch: Watch
) -> None:
    watch.allowed = ["ERR_", "404", "503"]
    page = await open_page(held, "#/chat")
    await say(page, "Count")
    answer = page.locator(".message.assistant")
    await expect(answer).to_contain_text("w0")
    port = held.port
    async with held.unix.post("/shutdown") as left:
        assert left.status == 202
    await held.task
    await start_daemon(listen=f"127.0.0.1:{port}")
    await expect(answer.get_by_role("alert")).to_be_visible()
    await expect(answer).to_contain_text("w0")
    await page.reload()
    await expect(answer).to_contain_text("w0")


async def test_two_conversations_answer_at_once_and_each_has_its_stop(
    held: Daemon, open_page: OpenPage, tmp_path: Path
) -> None:
    async with held.tcp.post("/engines/_configure", json={"model": "smol", "parallel": 2}) as answer:
        assert answer.status == 202
    page = await open_page(held, "#/chat")
    for words in ("One", "Two"):
        await page.get_by_role("link", name="New").click()
        await say(page, words)
        await expect(page.locator(".message.assistant")).to_contain_text("w0")
    await page.get_by_role("link", name="One", exact=True).click()
    await expect(page.locator(".message.user")).to_contain_text("One")
    await expect(page.locator(".message.assistant")).to_contain_text("w0")
    await expect(page.get_by_role("img", name="answers")).to_have_count(2)
    await page.get_by_role("button", name="Stop the answer").click()
    await expect(page.get_by_text("stopped")).to_be_visible()
    await expect(page.get_by_role("img", name="answers")).to_have_count(1)
    await page.get_by_role("link", name="Two", exact=True).click()
    (tmp_path / "gate").touch()
    await expect(page.locator(".message.assistant")).to_contain_text(WHOLE)
    await page.get_by_role("link", name="One", exact=True).click()
    await expect(page.locator(".message.assistant")).not_to_contain_text("w1")


async def test_an_answer_that_a_person_stopped_is_no_failure(held: Daemon, open_page: OpenPage) -> None:
    page = await open_page(held, "#/chat")
    await say(page, "Count")
    await expect(page.locator(".message.assistant")).to_contain_text("w0")
    other = await beside(page)  # a tab that only watches stops it, too
    await other.get_by_role("button", name="Stop the answer").click()
    await expect(page.get_by_text("stopped")).to_be_visible()
    await expect(other.get_by_text("stopped")).to_be_visible()
    await show(page, held, "now")
    await expect(page.get_by_role("article", name="smol")).to_contain_text("0 of 1")
    await show(page, held, "requests")
    await expect(page.locator(".request")).to_contain_text("left")
    await page.get_by_label("State").select_option("failed")
    await expect(page.locator(".request")).to_have_count(0)


async def test_two_tabs_agree_and_keep_the_turns_of_both(
    start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path
) -> None:
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    page = await open_page(daemon, "#/chat")
    await say(page, "Hello")
    await expect(page.get_by_text("first token")).to_be_visible()
    other = await beside(page)
    await expect(other.get_by_text("first token")).to_be_visible()
    await say(other, "From the second tab")
    await expect(page.locator(".message.user").last).to_contain_text("From the second tab")
    await expect(page.get_by_text("first token")).to_have_count(2)
    await say(page, "From the first tab")
    for tab in (page, other):
        await expect(tab.get_by_text("first token")).to_have_count(3)
        await expect(tab.locator(".message.user .body")).to_have_text(TURNS)
    await page.get_by_role("button", name="Rename: Hello").click()
    await page.get_by_label("Title").fill("Greetings")
    await page.keyboard.press("Enter")
    await expect(other.get_by_role("link", name="Greetings")).to_be_visible()
    await page.get_by_role("button", name="Delete: Greetings").click()
    await page.get_by_role("button", name="Delete", exact=True).click()
    await expect(other.get_by_role("link", name="Greetings")).to_have_count(0)


async def test_a_draft_stays(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    page = await open_page(daemon, "#/chat")
    box = page.get_by_label("Message", exact=True)
    await say(page, "Hello")
    await expect(page.get_by_text("first token")).to_be_visible()
    await box.fill("half a quest")
    await page.get_by_role("link", name="New").click()
    await expect(box).to_have_value("")
    await box.fill("something new")
    await show(page, daemon, "models")
    await page.get_by_role("link", name="Chat", exact=True).click()
    await expect(box).to_have_value("half a quest")
    await page.reload()
    await expect(box).to_have_value("half a quest")
    await page.get_by_role("link", name="New").click()
    await expect(box).to_have_value("something new")


async def test_an_answer_of_a_model_that_loads_goes_on_after_a_reload(
    start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path
) -> None:
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    daemon.backend.knobs = ("--gate", str(tmp_path / "gate"), "--tokens", "5")
    page = await open_page(daemon, "#/chat")
    await say(page, "Hello")
    await expect(page.get_by_text("Its model: loading")).to_be_visible()
    await page.reload()
    await expect(page.get_by_text("Its model: loading")).to_be_visible()
    (tmp_path / "gate").touch()
    await expect(page.locator(".message.assistant")).to_contain_text(WHOLE)
    async with asyncio.timeout(HUNG), daemon.tcp.get("/engines/requests") as answer:
        assert len(await answer.json()) == 1


async def test_a_browser_that_had_no_room_once_keeps_what_comes_later(
    held: Daemon, open_page: OpenPage, tmp_path: Path
) -> None:
    (tmp_path / "gate").touch()
    page = await open_page(held, "#/chat")
    await page.evaluate(
        """() => {
            const put = IDBObjectStore.prototype.put;
            window.full = true;
            IDBObjectStore.prototype.put = function (...values) {
                const wanted = put.apply(this, values);
                if (window.full) { // a browser finds it out when it writes
                    const error = new DOMException("none", "QuotaExceededError");
                    Object.defineProperty(this.transaction, "error", { value: error });
                    this.transaction.abort();
                }
                return wanted;
            };
        }"""
    )
    text = FilePayload(name="notes.txt", mimeType="text/plain", buffer=b"some notes")
    await page.locator("input[type=file][multiple]").set_input_files([text])
    await expect(page.get_by_text("no more room for conversations")).to_be_visible()
    await page.get_by_role("button", name="Remove notes.txt").click()
    await say(page, "Hello")
    await expect(page.locator(".message.assistant")).to_contain_text(WHOLE)
    await expect(page.get_by_text("no more room for conversations")).to_be_visible()
    await page.evaluate("() => { window.full = false; }")
    await page.get_by_role("link", name="New").click()
    await say(page, "Again")
    await expect(page.locator(".message.assistant")).to_contain_text(WHOLE)
    await expect(page.get_by_text("no more room for conversations")).to_have_count(0)
    await page.reload()
    await expect(page.locator(".message.user")).to_contain_text("Again")
    await expect(page.locator(".message.assistant")).to_contain_text(WHOLE)


PICTURED = """async ([most, text]) => {
    const talks = await import("/ui/talks.js");
    talks.bounds.pictures = most;
    const { talks: [talk] } = talks.chat.value;
    const [id, at] = [talks.newId(), talks.now()];
    const message = { id, talk: talk.id, parent: talk.head, role: "user", content: text, at };
    const images = [`data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg'/>${"x".repeat(30)}`];
    await talks.commit({ talks: [{ id: talk.id, head: message.id }], messages: [{ ...message, images }] });
}"""
"""Says a text with a picture of 82 characters in the newest conversation, which may have `most` of them."""


@pytest.fixture
async def told(held: Daemon, open_page: OpenPage, tmp_path: Path) -> Page:
    """A page with a conversation."""
    (tmp_path / "gate").touch()
    page = await open_page(held, "#/chat")
    await say(page, "Hello")
    await expect(page.locator(".message.assistant")).to_contain_text(WHOLE)
    return page


async def test_the_oldest_pictures_make_room_for_new_ones_and_it_is_said(told: Page) -> None:
    for text in ("First", "Second", "Third"):
        await told.evaluate(PICTURED, [200, text])
    for _ in range(2):
        await expect(told.locator(".message.user", has_text="First")).to_contain_text("A picture that was here is gone")
        for text in ("Second", "Third"):
            await expect(told.locator(".message.user", has_text=text).get_by_role("img")).to_have_count(1)
        await told.reload()


CROWDED = """() => {
    const put = IDBObjectStore.prototype.put;
    let full = true;
    IDBObjectStore.prototype.put = function (value, ...more) {
        if (value.lost) full = false;
        if (full) throw new DOMException("no room", "QuotaExceededError");
        return put.call(this, value, ...more);
    };
}"""
"""Leaves no room for anything until a picture goes."""


async def test_pictures_go_before_words_where_the_browser_has_no_more_room(told: Page) -> None:
    await told.evaluate(PICTURED, [200, "First"])
    await told.evaluate(CROWDED)
    await say(told, "Second")
    await expect(told.locator(".message.assistant").last).to_contain_text(WHOLE)
    for _ in range(2):  # it is said once it is kept
        await expect(told.locator(".message.user", has_text="First")).to_contain_text("A picture that was here is gone")
        await told.reload()
    await expect(told.locator(".message.assistant").last).to_contain_text(WHOLE)


FULL = """(room) => { // characters that all pictures may have
    const put = IDBObjectStore.prototype.put;
    const length = (message) => (message.images || []).join("").length;
    IDBObjectStore.prototype.put = function (value, ...more) {
        const written = put.call(this, value, ...more);
        if (this.name === "messages" && length(value)) {
            const under = this.transaction, all = this.getAll();
            all.onsuccess = () => {
                if (all.result.reduce((sum, each) => sum + length(each), 0) <= room) return;
                Object.defineProperty(under, "error", { value: new DOMException("no room", "QuotaExceededError") });
                under.abort();
            };
        }
        return written;
    };
}"""


async def test_no_more_pictures_go_than_a_new_one_needs(told: Page) -> None:
    texts = ["First", "Second", "Third", "Fourth", "Fifth"]
    await told.evaluate(FULL, 4 * 82)
    for text in texts:
        await told.evaluate(PICTURED, [1000, text])
    for _ in range(2):
        for text in texts[:2]:
            await expect(told.locator(".message.user", has_text=text)).to_contain_text(
                "A picture that was here is gone"
            )
        for text in texts[2:]:
            await expect(told.locator(".message.user", has_text=text).get_by_role("img")).to_have_count(1)
        await told.reload()


async def test_a_file_of_a_draft_also_takes_the_room_of_old_pictures(told: Page) -> None:
    await told.evaluate(PICTURED, [1000, "First"])
    await told.evaluate(CROWDED)
    text = FilePayload(name="notes.txt", mimeType="text/plain", buffer=b"some notes")
    await told.locator("input[type=file][multiple]").set_input_files([text])
    await expect(told.locator(".message.user", has_text="First")).to_contain_text("A picture that was here is gone")
    await told.reload()
    await expect(told.get_by_role("button", name="Remove notes.txt")).to_be_visible()


async def test_changes_at_once_share_the_room_that_one_of_them_makes(told: Page) -> None:
    await told.evaluate(PICTURED, [1000, "First"])
    await told.evaluate(CROWDED)
    kept = await told.evaluate(
        """async () => {
            const { chat, commit, draft } = await import("/ui/talks.js");
            const { id } = chat.value.talks[0];
            return Promise.all([draft.setFiles(id, []), commit({ talks: [{ id, title: "Named" }] })]);
        }"""
    )
    assert kept == [True, True]


async def test_a_conversation_that_finds_no_room_replaces_none(told: Page) -> None:
    counts = await told.evaluate(
        """async () => {
            const put = IDBObjectStore.prototype.put;
            IDBObjectStore.prototype.put = function (value, ...more) {
                if (value.content === "New") throw new DOMException("no room", "QuotaExceededError");
                return put.call(this, value, ...more);
            };
            const talks = await import("/ui/talks.js");
            const { id } = talks.chat.value.talks[0];
            const message = { id: "m", parent: "", role: "user", content: "New" };
            const news = { id, title: "New", head: "m", messages: [message] };
            return talks.take(JSON.stringify({ conversations: [news] }));
        }"""
    )
    assert counts == {"taken": 0, "all": 1}
    await expect(told.get_by_text("no more room for conversations")).to_be_visible()
    await told.reload()
    await expect(told.locator(".message.user")).to_contain_text("Hello")
    await expect(told.locator(".message.assistant")).to_contain_text(WHOLE)


OPENED = """(version) => new Promise((resolve) => {
    const opening = indexedDB.open("modelrunner", version);
    opening.onsuccess = () => resolve(Boolean(window.held = opening.result));
})"""
"""Opens the conversations as a page of another version does, and holds them."""


async def test_a_page_makes_way_for_a_newer_one_and_says_so(told: Page) -> None:
    other = await beside(told, told.url.partition("#")[0] + "ui/talks.js")
    async with asyncio.timeout(HUNG):
        assert await other.evaluate(OPENED, 100)
    await expect(told.get_by_text("A newer version of this page was opened")).to_be_visible()
    await say(told, "Again")
    await expect(told.locator(".message.assistant").last).to_contain_text(WHOLE)


EXPORTED = """async () => {
    const talks = await import("/ui/talks.js");
    return JSON.parse(await (await talks.exported()).text()).conversations;
}"""
FAILING = """(name) => {
    IDBObjectStore.prototype.put = () => { throw new DOMException("broken", name); };
}"""


async def begin(page: Page, text: str) -> None:
    """Begins another conversation."""
    await page.get_by_role("link", name="New").click()
    await expect(page.locator(".message")).to_have_count(0)
    await say(page, text)
    await expect(page.locator(".message.assistant")).to_contain_text(WHOLE)


async def turn(page: Page, title: str, texts: list[str]) -> None:
    """Shows a conversation, in which these texts were said and answered."""
    await page.get_by_role("link", name=title, exact=True).click()
    await expect(page.locator(".message.user .body")).to_have_text(texts)
    await expect(page.locator(".message.assistant", has_text=WHOLE)).to_have_count(len(texts))


async def test_a_page_that_made_way_keeps_what_it_has_and_exports_nothing(told: Page) -> None:
    await begin(told, "Second")
    other = await beside(told, told.url.partition("#")[0] + "ui/talks.js")
    async with asyncio.timeout(HUNG):
        assert await other.evaluate(OPENED, 100)
    await expect(told.get_by_text("A newer version of this page was opened")).to_be_visible()
    await say(told, "More")
    await expect(told.locator(".message.assistant", has_text=WHOLE)).to_have_count(2)
    await begin(told, "Third")
    await turn(told, "Second", ["Second", "More"])
    await turn(told, "Third", ["Third"])
    await told.get_by_role("button", name="Export the conversations").click()
    await expect(
        told.get_by_text("The conversations cannot be read here any more: load this page again")
    ).to_be_visible()


@pytest.mark.parametrize("name", ["UnknownError", "QuotaExceededError"])
async def test_a_page_that_cannot_write_keeps_and_exports_all(told: Page, name: str) -> None:
    await begin(told, "Second")
    await told.evaluate(FAILING, name)
    await say(told, "More")
    await expect(told.locator(".message.assistant", has_text=WHOLE)).to_have_count(2)
    await begin(told, "Third")
    await turn(told, "Second", ["Second", "More"])
    await turn(told, "Hello", ["Hello"])
    said = {
        each["title"]: [message["content"].strip() for message in each["messages"]]
        for each in await told.evaluate(EXPORTED)
    }
    assert said == {
        "Hello": ["Hello", WHOLE],
        "Second": ["Second", WHOLE, "More", WHOLE],
        "Third": ["Third", WHOLE],
    }


@pytest.mark.parametrize("name", ["UnknownError", "QuotaExceededError"])
async def test_another_tab_shows_what_is_kept_where_this_one_cannot_write(told: Page, name: str) -> None:
    other = await beside(told)
    await turn(other, "Hello", ["Hello"])
    await told.evaluate(FAILING, name)
    await say(told, "More")
    await expect(told.locator(".message.assistant", has_text=WHOLE)).to_have_count(2)
    await begin(other, "Second")
    await turn(other, "Hello", ["Hello"])


async def test_a_browser_that_keeps_nothing_exports_what_was_said(
    held: Daemon, open_page: OpenPage, tmp_path: Path
) -> None:
    (tmp_path / "gate").touch()
    none = "IDBFactory.prototype.open = () => { throw new Error('none'); };"
    page = await open_page(held, "#/chat", script=none)
    await expect(page.get_by_text("This browser keeps no conversations here")).to_be_visible()
    await begin(page, "Hello")
    await begin(page, "Second")
    await turn(page, "Hello", ["Hello"])
    assert [len(each["messages"]) for each in await page.evaluate(EXPORTED)] == [2, 2]


async def test_a_conversation_without_messages_replaces_none_that_has_some(told: Page) -> None:
    [talk] = await told.evaluate(EXPORTED)
    emptied = json.dumps({"conversations": [{**talk, "title": "Nothing", "messages": []}]})
    file = FilePayload(name="conversations.json", mimeType="application/json", buffer=emptied.encode())
    await told.get_by_label("File of conversations").set_input_files([file])
    await expect(told.get_by_text("Conversations imported: 0 of 1")).to_be_visible()
    await told.reload()
    await turn(told, "Hello", ["Hello"])


async def test_a_page_that_waits_for_an_older_one_says_so(
    held: Daemon, open_page: OpenPage, watch: Watch, tmp_path: Path
) -> None:
    watch.allowed = ["404"]  # a file has no icon
    (tmp_path / "gate").touch()
    older = await open_page(held, "ui/talks.js")
    assert await older.evaluate(OPENED, 1)
    page = await beside(older, f"http://127.0.0.1:{held.port}/#/chat")
    await expect(page.get_by_text("Another tab shows an older version of this page")).to_be_visible()
    await older.close()
    await say(page, "Hello")
    await expect(page.locator(".message.assistant")).to_contain_text(WHOLE)
    await expect(page.get_by_text("older version")).to_have_count(0)
    await page.reload()
    await expect(page.locator(".message.user")).to_contain_text("Hello")
