"""/docs in a browser: a key is given once, and opens what it may."""

import pytest
from playwright.async_api import Browser

from tests.api.conftest import StartDaemon
from tests.ui.conftest import Watch

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("scheme", ["bearer", "key"])
async def test_a_key_opens_a_route(start_daemon: StartDaemon, browser: Browser, watch: Watch, scheme: str) -> None:
    daemon = await start_daemon(models={"smol": 0})
    async with daemon.unix.post("/keys", json={"name": "a"}) as answer:
        text = (await answer.json())["text"]
    page = await browser.new_page()
    watch.follow(page, f"127.0.0.1:{daemon.port}")
    await page.goto(f"http://127.0.0.1:{daemon.port}/docs")
    await page.locator(".auth-wrapper .authorize").click()
    dialog = page.locator(".auth-container").filter(has_text=f"{scheme} ")
    await dialog.locator("input").fill(text)
    await dialog.locator("button.authorize").click()
    await page.locator(".btn-done").first.click()
    await page.locator("#operations-tag-models").click()
    await page.locator("#operations-models-get_models").click()
    await page.locator("#operations-models-get_models .execute").click()
    found = page.locator("#operations-models-get_models .live-responses-table")
    assert "smol" in await found.inner_text()
