"""A chat with a real engine and a real model, from its load on."""

import asyncio
from types import SimpleNamespace

import pytest
from playwright.async_api import expect

from tests.e2e.conftest import SMOLLM2, daemon, engine, make_daemon, no_process_left, nothing_left, prepared
from tests.e2e.daemons import Daemon
from tests.ui.conftest import OpenPage
from tests.waiting import HUNG

__all__ = ["daemon", "engine", "make_daemon", "no_process_left", "nothing_left", "prepared"]
pytestmark = pytest.mark.engine


async def test_a_chat_with_a_real_model(daemon: Daemon, open_page: OpenPage) -> None:
    listen = (await asyncio.to_thread(daemon.get, "/version")).json()["listen"]
    page = await open_page(SimpleNamespace(port=int(listen.rpartition(":")[2])), "#/chat")
    await page.get_by_label("Model", exact=True).select_option(SMOLLM2)
    await page.get_by_role("button", name="Options of this conversation").click()
    await page.get_by_label("System prompt").fill("You are a helpful assistant.")
    await page.get_by_label("temperature").fill("0")
    await page.get_by_label("max_tokens").fill("40")
    await page.get_by_role("button", name="Save").click()
    await page.get_by_label("Message", exact=True).fill("What is the capital of France?")
    await page.keyboard.press("Enter")
    answer = page.locator(".message.assistant")
    await expect(answer).to_contain_text("tokens/s", timeout=HUNG * 1000)
    await expect(answer).to_contain_text("Paris")
