"""The page while it loads, when it cannot, and when its connection breaks."""

import asyncio

import pytest
from playwright.async_api import Route, expect

from tests.api.conftest import StartDaemon
from tests.ui.conftest import OpenPage, Watch

pytestmark = pytest.mark.engine


async def test_a_view_is_shown_while_it_loads_and_when_it_cannot(
    start_daemon: StartDaemon, open_page: OpenPage, watch: Watch
) -> None:
    watch.allowed = ["ERR_FAILED", "503"]
    daemon = await start_daemon()
    page = await open_page(daemon, "#/chat/%E0%A4%A")  # an address that was cut
    await expect(page.get_by_text("No model that talks is here")).to_be_visible()
    asked: asyncio.Queue[Route] = asyncio.Queue()
    await page.route("**/models", asked.put)
    await page.get_by_role("link", name="Models", exact=True).click()
    refused = await asked.get()
    await expect(page.get_by_role("status", name="Loading")).to_be_visible()
    fault = {"message": "it does not work today", "code": "some_error"}
    await refused.fulfill(status=503, json={"error": fault})
    await expect(page.get_by_role("alert")).to_contain_text("it does not work today")
    await page.unroute("**/models")
    await page.get_by_role("button", name="Try again").click()
    await expect(page.get_by_text("No model is here")).to_be_visible()
    await page.route("**/engines/now", lambda route: route.abort())
    await page.goto("about:blank")
    await page.goto(f"http://127.0.0.1:{daemon.port}/#/now")
    await expect(page.locator(".connection")).to_contain_text("Disconnected")
    await expect(page.get_by_role("alert")).to_contain_text("The daemon does not answer")
    await page.unroute("**/engines/now")
    await page.get_by_role("button", name="Try now").click()
    await expect(page.get_by_text("No model is loaded")).to_be_visible()


async def test_the_page_goes_on_after_a_restart(start_daemon: StartDaemon, open_page: OpenPage, watch: Watch) -> None:
    watch.allowed = ["ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET", "503"]
    daemon = await start_daemon(models={"smol": 0})
    async with daemon.tcp.post("/engines/preload", json={"model": "smol"}) as answer:
        await answer.read()
    page = await open_page(daemon)
    await expect(page.get_by_role("article", name="smol")).to_be_visible()
    state = page.locator(".connection")
    await expect(state).to_have_text("Live")
    port = daemon.port
    async with daemon.unix.post("/shutdown") as answer:
        assert answer.status == 202
    await daemon.task
    await expect(state).to_contain_text("Reconnecting")
    await expect(page.get_by_text("The connection to the daemon is lost")).to_be_visible()
    await expect(page.get_by_role("heading", name="Memory", exact=True)).to_be_visible()  # what was seen last
    await start_daemon(listen=f"127.0.0.1:{port}")
    await expect(state).to_have_text("Live")
    await expect(page.get_by_text("No model is loaded")).to_be_visible()
