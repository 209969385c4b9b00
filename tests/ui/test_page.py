"""The page as a whole: what every view must keep."""

import asyncio
import json
from pathlib import Path

import pytest
from playwright.async_api import Route, expect

from modelrunner.config.locations import Locations
from tests.api.conftest import Daemon, StartDaemon
from tests.ui.conftest import DESK, PHONE, TALKS, VIEWS, ZOOMED, OpenPage, Watch, choose, say, show

pytestmark = pytest.mark.engine

CHAT = {"model": "smol", "messages": [{"role": "user", "content": "x"}]}
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
CLIENTS = Locations.find().cache / "clients"
TEXT = "Mapped files are **shared**: two runners of one model count once.\n\n```python\nbudget - used\n```\n"


async def ask(daemon: Daemon, **fields: object) -> None:
    async with daemon.tcp.post("/v1/chat/completions", json=CHAT | {"stream": True} | fields) as answer:
        await answer.read()


@pytest.fixture
async def busy(start_daemon: StartDaemon, tmp_path: Path):
    """A daemon with runners, a model that waits, requests that ended, under way and in the line, and usage."""
    models = {"smol": 0, "ai/gemma3": 1, "hf.co/qwen/Qwen3-4B-GGUF:Q4_K_M": 2, "ai/llama": 3}
    daemon = await start_daemon(models=models, metadata=TALKS, memory_budget=200 << 20)
    daemon.backend.knobs = ("--text", TEXT, "--rate", "200")
    for _ in range(4):
        await ask(daemon)
    await ask(daemon, model="gemma3", messages=[])
    daemon.backend.knobs = ("--gate", str(tmp_path / "gate"))
    waiting = [asyncio.create_task(ask(daemon, model=model)) for model in ("Qwen3-4B-GGUF:Q4_K_M", "llama")]
    yield daemon
    (tmp_path / "gate").touch()
    await asyncio.gather(*waiting)


@pytest.mark.parametrize(
    ("scheme", "sizes"),
    [
        ("light", {"light": DESK, "light-phone": PHONE, "light-zoomed": ZOOMED}),
        ("dark", {"dark": DESK, "dark-phone": PHONE}),
        ("forced", {"forced": DESK}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_every_view_is_accessible_and_photographed(
    busy: Daemon, open_page: OpenPage, shots: Path, scheme: str, sizes: dict[str, dict[str, int]]
) -> None:
    for folder in sorted(CLIENTS.glob("npm-axe-core-*")):
        axe = (folder / "node_modules/axe-core/axe.min.js").read_text()
        break
    else:
        pytest.skip("axe-core is missing: scripts/install-clients")
    for name, size in sizes.items():
        page = await open_page(busy, scheme=scheme, size=size)
        for view in VIEWS:
            await show(page, busy, view)
            if view == "chat":
                await choose(page, "smol")
                await say(page, "Why do two runners of one model need less memory?")
                await expect(page.get_by_text("first token")).to_be_visible()
            if view == "requests":
                await page.locator(".request").last.click()
            await page.screenshot(path=shots / f"{view}-{name}.png", full_page=True)
            width = await page.evaluate("document.documentElement.scrollWidth")
            assert width <= size["width"], f"{view} is {width} pixels wide"
            await page.evaluate(axe)  # by the debugger, which no policy of the page concerns
            found = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            told = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found["violations"]]
            assert not told, (view, name, told)


async def test_the_dialogs_are_accessible(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    scripts = sorted(CLIENTS.glob("npm-axe-core-*/node_modules/axe-core/axe.min.js"))
    if not scripts:
        pytest.skip("axe-core is missing: scripts/install-clients")
    daemon = await start_daemon(models={"smol": 0})
    page = await open_page(daemon)
    for view, button in (
        ("models", "Settings of smol"),
        ("models", "Remove smol"),
        ("usage", "New key"),
        ("chat", "Options of this conversation"),
    ):
        await show(page, daemon, view)
        await page.get_by_role("button", name=button).click()
        await expect(page.get_by_role("dialog").get_by_role("button").last).to_be_visible()
        await page.evaluate(scripts[0].read_text())
        found = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        assert not [(each["id"], each["nodes"][0]["html"][:200]) for each in found["violations"]], button
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)


async def test_an_address_that_changes_while_the_page_appears_is_heeded(
    start_daemon: StartDaemon, open_page: OpenPage
) -> None:
    """The address changes at the moment at which the first view is there, before the page listens to changes."""
    script = """new MutationObserver((_, observer) => {
        if (!document.querySelector("nav")) return;
        observer.disconnect();
        location.hash = "#/models";
    }).observe(document, { childList: true, subtree: true });"""
    daemon = await start_daemon()
    page = await open_page(daemon, script=script)
    await expect(page.get_by_role("heading", level=1, name="Models")).to_be_attached()


async def test_what_clients_call_things_does_nothing(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon(models={"smol": 0}, metadata={"general.name": HOSTILE, **TALKS})
    await ask(daemon)
    headers = {"X-Caller": HOSTILE}
    async with daemon.tcp.post("/v1/chat/completions", json=CHAT | {"model": HOSTILE}, headers=headers) as answer:
        assert answer.status in (400, 404)
    page = await open_page(daemon)
    for view in VIEWS:
        await show(page, daemon, view)
        assert await page.locator("img[src=x]").count() == 0
        assert "modelrunner" in await page.title()
    await show(page, daemon, "requests")
    await expect(page.locator(".request").filter(has_text="<img src=x")).to_be_visible()  # as text


async def test_login_with_a_key_and_logout(start_daemon: StartDaemon, open_page: OpenPage, watch: Watch) -> None:
    watch.allowed = ["401", "403"]
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    texts = {}
    for name, scopes in (("boss", ["inference", "models", "admin"]), ("guest", ["inference"])):
        async with daemon.unix.post("/keys", json={"name": name, "scopes": scopes}) as answer:
            texts[name] = (await answer.json())["text"]
    page = await open_page(daemon, "#/now")
    field = page.get_by_label("API key", exact=True)
    await field.fill("wrong")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_contain_text("does not know this key")
    await field.fill(texts["boss"])
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("No model is loaded")).to_be_visible()
    await page.reload()  # the same session
    await expect(page.get_by_text("No model is loaded")).to_be_visible()
    assert texts["boss"] not in json.dumps(await page.evaluate("({...localStorage})"))
    await show(page, daemon, "usage")
    await expect(page.get_by_role("cell", name="guest", exact=True)).to_be_visible()
    await page.get_by_role("button", name="Revoke the key guest").click()
    await page.get_by_role("button", name="Keep it").click()
    await page.get_by_role("button", name="Log out").click()
    await page.get_by_label("API key", exact=True).fill(texts["guest"])
    await page.keyboard.press("Enter")
    await show(page, daemon, "now")
    await expect(page.get_by_role("alert")).to_contain_text("Log in with a key that has this scope")
    await show(page, daemon, "chat")
    await say(page, "Hello")
    await expect(page.get_by_text("first token")).to_be_visible()


async def test_a_key_is_made_and_revoked(start_daemon: StartDaemon, open_page: OpenPage, watch: Watch) -> None:
    # Its feed ends with each change, and comes back before it knows the key.
    watch.allowed = ["ERR_CONNECTION_RESET", "ERR_INCOMPLETE_CHUNKED_ENCODING", "401 (Unauthorized)"]
    daemon = await start_daemon()
    page = await open_page(daemon, "#/usage")
    refused = asyncio.Event()
    page.on("response", lambda response: refused.set() if response.status == 401 else None)

    async def answer_late(route: Route) -> None:
        if route.request.method != "POST":
            await route.continue_()
            return
        response = await route.fetch()
        await refused.wait()
        await route.fulfill(response=response)

    await page.route("**/keys", answer_late)
    await page.get_by_role("button", name="New key").click()
    await page.get_by_label("Name").fill("kim")
    await page.get_by_role("button", name="Create").click()
    text = await page.locator(".secret").inner_text()
    await page.get_by_role("button", name="Done").click()
    await expect(page.get_by_role("cell", name="kim", exact=True)).to_be_visible()  # this tab is logged in with it
    async with daemon.tcp.get("/keys", headers={"X-API-Key": text}) as answer:
        assert answer.status == 200
    await page.get_by_role("button", name="Revoke the key kim").click()
    await expect(page.get_by_text("It is the last key")).to_be_visible()
    await page.get_by_role("button", name="Revoke and open").click()
    await expect(page.get_by_text("There are no keys")).to_be_visible()


async def test_everything_by_keyboard(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    await ask(daemon)
    page = await open_page(daemon)
    await expect(page.get_by_role("article", name="smol")).to_be_visible()

    async def reach(name: str) -> None:
        for _ in range(60):
            await page.keyboard.press("Tab")
            label = await page.evaluate(
                "(document.activeElement.ariaLabel || document.activeElement.textContent).trim()"
            )
            if label == name:
                return
        raise AssertionError(f"Tab never reaches {name}")

    await reach("Skip to the content")
    await page.keyboard.press("Enter")
    await reach("Pin smol")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("button", name="Unpin smol")).to_be_visible()
    await page.reload()
    await reach("Models")
    await page.keyboard.press("Enter")
    await reach("Settings of smol")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await page.keyboard.press("Escape")
    assert await page.evaluate("document.activeElement.ariaLabel") == "Settings of smol"
