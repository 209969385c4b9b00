"""The view Machine, in a browser."""

import asyncio
import json
import os
import re
import sys
import time
import tomllib
from pathlib import Path

import pytest
from playwright.async_api import expect

from modelrunner.config.settingsfile import EDITABLE
from modelrunner.store import Store
from tests.api.conftest import StartDaemon
from tests.ui.conftest import OpenPage, Watch

pytestmark = pytest.mark.engine


async def test_an_engine_is_removed_and_installed(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon()
    page = await open_page(daemon, "#/machine")
    engine = page.get_by_role("listitem", name="fake")
    await expect(engine).to_contain_text("installed")
    await engine.get_by_role("button", name="Remove fake").click()
    await page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    await expect(engine).to_contain_text("binary not found")
    await expect(engine.get_by_role("button", name="Update fake")).to_have_count(0)
    await engine.get_by_role("button", name="Install fake").click()
    await expect(engine.get_by_role("button", name="Update fake")).to_be_visible()
    await expect(engine).to_contain_text("fake 1.0")


async def test_leftovers_are_shown_before_they_are_removed(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon(models={"smol": 0})
    left = Store(daemon.settings.data_dir).partial / "download"
    left.write_bytes(b"x" * 2048)
    page = await open_page(daemon, "#/machine")
    disk = page.get_by_role("region", name="Disk")
    await expect(disk.get_by_role("row")).to_have_count(2)
    await disk.get_by_role("button", name="Remove leftovers").click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text("2.00 KiB")
    assert left.exists()
    await dialog.get_by_role("button", name="Remove").click()
    await expect(page.get_by_text("2.00 KiB came free")).to_be_visible()
    assert not left.exists()


async def test_settings_are_written_and_what_a_reload_does_is_told(
    start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path, watch: Watch
) -> None:
    watch.allowed = ["400"]
    daemon = await start_daemon()
    file = tmp_path / "config.toml"
    page = await open_page(daemon, "#/machine")
    settings = page.get_by_role("region", name="Settings", exact=True)
    await settings.get_by_label("keep_alive").fill("soon")
    await settings.get_by_role("button", name="Write config.toml").click()
    await expect(page.get_by_text(re.compile("keep_alive.*soon"))).to_be_visible()
    assert not file.exists()
    await settings.get_by_label("keep_alive").fill("2h")
    await settings.get_by_label("log_level").select_option("debug")
    await settings.get_by_role("button", name="Write config.toml").click()
    told = settings.get_by_role("region", name="What a reload does").get_by_role("row")
    await expect(told).to_have_count(3)
    await expect(told.filter(has_text="keep_alive")).to_contain_text("holds at once")
    assert tomllib.loads(file.read_text()) == {"keep_alive": "2h", "log_level": "debug"}
    await settings.get_by_role("button", name="Reload").click()
    await expect(told).to_have_count(0)
    await expect(settings.get_by_label("keep_alive")).to_have_value("2h")


async def test_each_setting_shows_the_default_that_the_command_line_shows(
    start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path
) -> None:
    page = await open_page(await start_daemon(), "#/machine")
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "modelrunner", "config", "--json"]
    process = await asyncio.create_subprocess_exec(*command, env=variables, stdout=asyncio.subprocess.PIPE)
    told = json.loads((await process.communicate())[0])["settings"]
    defaults = {each["name"]: each["value"] for each in told}
    for name in EDITABLE:
        field = page.get_by_role("region", name="Settings", exact=True).get_by_label(name, exact=True)
        shown = await field.get_attribute("placeholder") or await field.locator("option").first.text_content() or ""
        assert shown.removesuffix(" (default)") in defaults[name] or shown == "what is free", name


async def test_the_hour_of_the_machine(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon()
    now = int(time.time())
    figures = {"processor": 40.0, "memory": [2 << 30, 6 << 30], "busy": [75]}
    steps = [{"time": now - 10 * n, **figures} for n in range(100, -1, -1)]
    told = {"devices": ["A card"], "totals": [8 << 30, 8 << 30], "steps": steps}
    page = await open_page(daemon)
    await page.route("**/engines/machine", lambda route: route.fulfill(json=told))
    await page.get_by_role("link", name="Machine").click()
    await expect(page.get_by_role("img", name=re.compile("^Busy .*: processor 40 %, A card 75 %"))).to_be_visible()
    memory = page.locator("figure").filter(has=page.get_by_role("heading", name="Memory in use"))
    await expect(memory).to_contain_text("main memory, 8.00 GiB 25 %")
    await expect(memory).to_contain_text("A card, 8.00 GiB 75 %")
