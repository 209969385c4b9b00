"""A chat with a real engine and a real model, from its load on."""

import asyncio
from types import SimpleNamespace

import pytest
from playwright.async_api import expect

from tests.e2e.conftest import SMOLLM2, daemon, engine, make_daemon, no_process_left, prepared
from tests.e2e.daemons import Daemon
from tests.ui.conftest import OpenPage
from tests.waiting import HUNG

__all__ = ["daemon", "engine", "make_daemon", "no_process_left", "prepared"]
pytestmark = pytest.mark.engine


async def test_a_chat_with_a_real_model(daemon: Daemon, open_page: OpenPage) -> None:
    listen = (await asyncio.to_thread(daemon.get, "/version")).json()["listen"]
    page = await open_page(SimpleNamespace(port=int(listen.rpartition(":")[2])), "#/chat")
    expect.set_options(timeout=HUNG * 1000)
    await page.get_by_label("Model", exact=True).select_option(SMOLLM2)
    await page.get_by_label("Message", exact=True).fill("What is the capital of France?")
    await page.keyboard.press("Enter")
    answer = page.locator(".message.assistant")
    await expect(answer).to_contain_text("tokens/s")
    await expect(answer).to_contain_text("Paris")
    await page.get_by_role("link", name="Now", exact=True).click()
    await expect(page.locator(".runner")).to_contain_text("ready")
