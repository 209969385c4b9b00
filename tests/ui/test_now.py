"""The view Now, in a browser."""

from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.api.conftest import StartDaemon
from tests.ui.conftest import OpenPage

pytestmark = pytest.mark.engine


async def test_a_loaded_model_is_shown_and_unloaded(start_daemon: StartDaemon, open_page: OpenPage, shots: Path):
    daemon = await start_daemon(models={"smol": 0})
    page = await open_page(daemon)
    await expect(page.get_by_text("No model is loaded")).to_be_visible()
    await daemon.tcp.post(
        "/v1/chat/completions", json={"model": "smol", "messages": [{"role": "user", "content": "x"}]}
    )
    runner = page.get_by_role("article", name="smol")
    await expect(runner).to_contain_text("ready")
    await page.screenshot(path=shots / "now.png", full_page=True)
    await runner.get_by_role("button", name="Unload").click()
    await expect(page.get_by_text("No model is loaded")).to_be_visible()
