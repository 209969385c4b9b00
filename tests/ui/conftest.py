"""A browser, and daemons that it looks at: Debian's Chromium, driven by Playwright's Python package."""

import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page, Request, async_playwright, expect

from tests.api.conftest import Daemon, start_daemon
from tests.waiting import HUNG

__all__ = ["start_daemon"]

CHROMIUM = os.environ.get("MODELRUNNER_CHROMIUM") or shutil.which("chromium")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
PHONE = {"width": 390, "height": 844}
VIEWS = ("now", "models", "chat", "requests", "machine", "usage")
DESK = {"width": 1280, "height": 860}
ZOOMED = {"width": 640, "height": 430}
"""The desk at a zoom of 200 %."""
TALKS = {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
"""Metadata of a model with a chat template."""
OpenPage = Callable[..., Awaitable[Page]]

expect.set_options(timeout=HUNG * 1000)  # by default five seconds, which a busy machine needs at times


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium (Debian: apt-get install chromium)")
    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield launched
        await launched.close()


class Watch:
    """What a page may never do: log an error, or ask another host. `allowed` are parts of errors that a test causes
    on purpose."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.allowed: list[str] = []

    def follow(self, page: Page, host: str) -> None:
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))

        def asked(request: Request) -> None:
            url = urlsplit(request.url)
            if url.scheme not in ("data", "blob") and url.netloc != host:
                self.faults.append(f"request to {request.url}")

        page.on("request", asked)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.type}: {message.text}")

    def check(self) -> None:
        unexpected = [fault for fault in self.faults if not any(text in fault for text in self.allowed)]
        assert not unexpected, unexpected


@pytest.fixture
async def watch() -> AsyncIterator[Watch]:
    found = Watch()
    yield found
    found.check()


@pytest.fixture
async def open_page(browser: Browser, watch: Watch) -> AsyncIterator[OpenPage]:
    """`open_page(daemon, "#/models", scheme="dark", size=PHONE)` in a context of its own; `scheme` is light, dark or
    forced; `script` runs before the page's own ones."""
    contexts: list[BrowserContext] = []

    async def open(
        daemon: Daemon, view: str = "", *, scheme: str = "light", size: dict[str, int] = DESK, script: str = ""
    ) -> Page:
        forced = scheme == "forced"  # a system's own few colours, in place of the page's
        context = await browser.new_context(
            color_scheme="dark" if forced else scheme,  # type: ignore[arg-type]
            forced_colors="active" if forced else "none",
            device_scale_factor=2 if size == ZOOMED else 1,
            viewport=size,  # type: ignore[arg-type]
            reduced_motion="reduce",
        )
        context.set_default_timeout(HUNG * 1000)
        contexts.append(context)
        page = await context.new_page()
        if script:
            await page.add_init_script(script)
        watch.follow(page, f"127.0.0.1:{daemon.port}")
        await page.goto(f"http://127.0.0.1:{daemon.port}/{view}")
        return page

    yield open
    for context in contexts:
        await context.close()


@pytest.fixture(scope="session")
def shots() -> Path:
    """The folder of the screenshots: MODELRUNNER_SCREENSHOTS, by default `screenshots` beside the tests' cache."""
    folder = Path(os.environ.get("MODELRUNNER_SCREENSHOTS", ".pytest_cache/screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def show(page: Page, daemon: Daemon, view: str) -> None:
    """Goes to a view, and waits until its data are there."""
    await page.goto(f"http://127.0.0.1:{daemon.port}/#/{view}")
    await expect(page.get_by_role("heading", level=1, name=view.capitalize())).to_be_attached()
    await expect(page.locator(".skeleton")).to_have_count(0)


async def choose(page: Page, model: str) -> None:
    """Chooses the model of the conversation that is shown."""
    await page.get_by_role("button", name="Model: ").click()
    await page.get_by_role("dialog").get_by_role("button", name=model).click()


async def say(page: Page, text: str) -> None:
    """Sends a message in the conversation that is shown."""
    await page.get_by_label("Message", exact=True).fill(text)
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()  # the list of models is here
    await page.keyboard.press("Enter")
