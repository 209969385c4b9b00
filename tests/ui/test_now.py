"""The view Now, in a browser."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.api.conftest import Daemon, StartDaemon
from tests.cli.test_commands_screen import DEVICE, GIB, NOW, RUNNER
from tests.ui.conftest import OpenPage

pytestmark = pytest.mark.engine


async def ask(daemon: Daemon, model: str) -> int:
    body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
    async with daemon.tcp.post("/v1/chat/completions", json=body) as answer:
        await answer.read()
        return answer.status


async def test_a_runner_is_pinned_paused_resumed_and_unloaded(start_daemon: StartDaemon, open_page: OpenPage):
    daemon = await start_daemon(models={"smol": 0})
    page = await open_page(daemon)
    await expect(page.get_by_text("No model is loaded")).to_be_visible()
    await ask(daemon, "smol")
    runner = page.get_by_role("article", name="smol")
    await expect(runner).to_contain_text("ready")
    await runner.get_by_role("button", name="Pin").click()
    await expect(runner.get_by_text("pinned").first).to_be_visible()
    await runner.get_by_role("button", name="Unpin").click()
    await expect(runner.get_by_role("button", name="Pin", exact=False)).to_be_visible()
    await runner.get_by_role("button", name="Pause").click()
    await expect(page.get_by_text("Its requests wait until it is resumed")).to_be_visible()
    await page.get_by_role("button", name="Resume smol").click()
    await expect(page.get_by_text("Its requests wait until it is resumed")).to_have_count(0)
    await ask(daemon, "smol")
    await runner.get_by_role("button", name="Unload").click()
    await expect(page.get_by_text("No model is loaded")).to_be_visible()


async def test_each_device_has_its_bar(start_daemon: StartDaemon, open_page: OpenPage):
    daemon = await start_daemon()
    memory = {"estimated": {"ram": GIB, "vram": [2 * GIB, 0]}, "measured": {"ram": GIB // 2, "vram": [3 * GIB, 0]}}
    runner = RUNNER | {"state": "ready", "loading": False, "memory": memory}
    elsewhere = runner | {"id": "r2", "model_name": "far", "host": "b"}
    now = NOW | {"runners": [runner, elsewhere], "waiting": {}}
    now |= {
        "budget": {"ram": 4 * GIB, "vram": [8 * GIB, 8 * GIB]},
        "free": {"ram": 3 * GIB, "vram": [5 * GIB, 8 * GIB]},
        "devices": [
            DEVICE,
            DEVICE | {"name": "AMD card1", "utilization": None, "hides_processes": True, "fault": "it does not answer"},
        ],
    }
    body = f"event: now\ndata: {json.dumps(now)}\n\n"
    page = await open_page(daemon, "#/models")
    await page.route("**/engines/now", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    await page.goto("about:blank")
    await page.goto(f"http://127.0.0.1:{daemon.port}/#/now")
    for told in (
        "Main memory: 1.00 GiB of 4.00 GiB in use",
        "GPU 0: 3.00 GiB of 8.00 GiB in use",
        "GPU 1: 0 B of 8.00 GiB in use",
    ):
        await expect(page.get_by_role("img", name=told, exact=True)).to_be_visible()
    await expect(page.get_by_role("article", name="far")).to_contain_text("on b, device 0")
    part = page.get_by_role("img", name="GPU 0").locator(".measured")
    await expect(part).to_have_attribute("style", re.compile(r"width: 37\.5%"))
    first, second = page.locator(".device").nth(1), page.locator(".device").nth(2)
    await expect(first).to_contain_text("3.00 GiB measured, 2.00 GiB predicted")
    said = "NVIDIA A30 · 10.0 GiB in all · other programs hold 1.00 GiB · 7 % busy · 61 °C"
    await expect(first.get_by_text(said)).to_be_visible()
    await expect(second).to_contain_text("not used it does not answer")
    await expect(second).to_contain_text("61 °C · measured by its free memory")


async def test_why_a_model_waits_and_a_cancel(start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path):
    """Two models of 64 MiB in 100 MiB: the second waits for the first, which loads."""
    daemon = await start_daemon(models={"smol": 0, "other": 1}, memory_budget=100 << 20)
    daemon.backend.knobs = ("--gate", str(tmp_path / "gate"))
    page = await open_page(daemon)
    first = asyncio.create_task(ask(daemon, "smol"))
    await expect(page.get_by_role("article", name="smol")).to_contain_text("loading")
    second = asyncio.create_task(ask(daemon, "other"))
    waiting = page.get_by_role("region", name="Waiting").get_by_role("article").filter(has_text="other")
    await expect(waiting).to_contain_text("1 request")
    async with daemon.tcp.get("/engines/why?model=other") as answer:
        reason = (await answer.json())["reason"]
    await expect(waiting).to_contain_text(reason)
    await expect(page.get_by_role("img", name="Main memory")).to_have_accessible_name(
        "Main memory: 64.0 MiB of 100 MiB in use, 64.0 MiB queued"
    )
    line = page.get_by_role("region", name="Requests under way").get_by_role("listitem").filter(has_text="other")
    await line.get_by_role("button").click()
    assert await second == 503
    await expect(waiting).to_have_count(0)
    (tmp_path / "gate").touch()
    assert await first == 200
