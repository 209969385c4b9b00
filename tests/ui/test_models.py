"""The view Models, in a browser."""

import asyncio
import re
from collections.abc import AsyncIterator
from unittest.mock import ANY

import pytest
from playwright.async_api import expect

from modelrunner.cli.request import STARTER
from tests.api.conftest import StartDaemon
from tests.pull.hub import Fault, Hub, Repository
from tests.pull.models import gguf
from tests.ui.conftest import OpenPage

pytestmark = pytest.mark.engine

NAME = "hf.co/Org/Tiny-GGUF"


@pytest.fixture
async def hub(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Hub]:
    async with Hub().running() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        hub.repositories["Org/Tiny-GGUF"] = Repository({"tiny-Q4_K_M.gguf": gguf(3 << 20)})
        yield hub


async def test_a_pull_with_its_progress_and_a_cancel(start_daemon: StartDaemon, open_page: OpenPage, hub: Hub):
    daemon = await start_daemon()
    page = await open_page(daemon, "#/models")
    await expect(page.get_by_text("No model is here")).to_be_visible()
    await page.get_by_label("Name of the model").fill(NAME)
    await page.get_by_role("button", name="Would it fit?").click()
    await expect(page.get_by_text("It fits", exact=True)).to_be_visible()
    hold = asyncio.Event()
    hub.faults.append(Fault(hold=hold))
    await page.get_by_role("button", name="Pull", exact=True).click()
    bar = page.get_by_role("progressbar", name=f"Pull {NAME}")
    await expect(bar).to_have_attribute("aria-valuenow", re.compile(r"\d"))
    await expect(page.locator(".work")).to_contain_text("of 3.00 MiB")
    await page.get_by_role("button", name=f"Cancel: Pull {NAME}").click()
    await expect(bar).to_have_count(0)
    await expect(page.get_by_text("No model is here")).to_be_visible()
    hold.set()
    hub.faults.clear()
    await page.get_by_label("Name of the model").fill(NAME)
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("article", name=NAME)).to_be_visible()


async def test_a_pull_goes_on_without_the_page_and_everybody_sees_it(
    start_daemon: StartDaemon, open_page: OpenPage, hub: Hub
) -> None:
    daemon = await start_daemon()
    page = await open_page(daemon, "#/models")
    hold = asyncio.Event()
    hub.faults.append(Fault(hold=hold))
    await page.get_by_label("Name of the model").fill(NAME)
    await page.get_by_role("button", name="Pull", exact=True).click()
    await hub.held.wait()
    await page.close()
    other = await open_page(daemon, "#/models")
    await expect(other.get_by_role("progressbar", name=f"Pull {NAME}")).to_be_visible()
    hold.set()
    await expect(other.get_by_role("article", name=NAME)).to_be_visible()
    async with daemon.unix.delete(f"/models/{NAME}") as removed:  # by somebody else
        assert removed.status == 200
    await expect(other.get_by_text("No model is here")).to_be_visible()


async def test_a_model_of_the_hub_is_found_and_judged(start_daemon: StartDaemon, open_page: OpenPage, hub: Hub) -> None:
    hub.repositories["Org/Tiny-GGUF"] = Repository({f"tiny-{name}.gguf": gguf(1 << 20) for name in ("Q4_K_M", "Q8_0")})
    daemon = await start_daemon()
    page = await open_page(daemon, "#/models")
    words = page.get_by_label("Name of the model")
    await words.fill("nothing like it")
    await page.get_by_role("button", name="Search the hub").click()
    await expect(page.get_by_text("The hub has no model in GGUF")).to_be_visible()
    await words.fill("tiny")
    await page.get_by_role("button", name="Search the hub").click()
    offer = page.get_by_role("listitem", name=NAME)
    await expect(offer).to_contain_text("1,200 downloads")
    choice = offer.get_by_label(f"Quantization of {NAME}")
    assert await choice.locator("option").all_inner_texts() == ["Q4_K_M", "Q8_0"]
    await choice.select_option("Q8_0")
    await offer.get_by_role("button", name=f"Would {NAME}:Q8_0 fit?").click()
    await expect(offer.get_by_text("It fits", exact=True)).to_be_visible()
    await offer.get_by_role("button", name=f"Pull {NAME}:Q8_0").click()
    article = page.get_by_role("article", name=f"{NAME}:Q8_0")
    await article.get_by_role("button", name="Verify").click()
    await expect(page.get_by_text("is intact")).to_be_visible()


async def test_a_pull_that_fails_says_why(start_daemon: StartDaemon, open_page: OpenPage, hub: Hub, watch):
    watch.allowed = ["404"]
    daemon = await start_daemon()
    page = await open_page(daemon, "#/models")
    await page.get_by_label("Name of the model").fill("hf.co/Org/Nothing")
    await page.keyboard.press("Enter")
    await expect(page.locator(".work").get_by_role("alert")).to_be_visible()
    await page.get_by_role("button", name="Dismiss").click()
    await expect(page.locator(".work")).to_have_count(0)
    await page.get_by_role("link", name="Now").click()
    told = page.locator(".events li").filter(has_text="Nothing")
    await expect(told).to_contain_text("could not be pulled · ")
    assert await told.locator(".event").bounding_box() == {"x": ANY, "y": ANY, "width": 8, "height": 8}


async def test_the_starter_is_one_button_away(start_daemon: StartDaemon, open_page: OpenPage):
    daemon = await start_daemon()
    page = await open_page(daemon, "#/models")
    await page.get_by_role("button", name=f"Pull {STARTER}").click()
    await expect(page.get_by_role("group", name=f"Pull {STARTER}")).to_be_visible()


async def test_settings_are_a_form_and_removing_says_what_goes(start_daemon: StartDaemon, open_page: OpenPage):
    daemon = await start_daemon(models={"smol": 0})
    page = await open_page(daemon, "#/models")
    await page.get_by_role("button", name="Settings of smol").click()
    form = page.get_by_role("dialog")
    await form.get_by_label("context-size", exact=True).fill("1024")
    await form.get_by_label("pin").select_option("on")
    await form.get_by_label("runtime-flags").fill("--tokens\n3")
    await form.get_by_label("budget").fill("7")
    await form.get_by_role("button", name="Save").click()
    await expect(form).to_have_count(0)
    async with daemon.tcp.get("/engines/_configure?model=smol") as answer:
        (shown,) = await answer.json()
    flags = ["--tokens", "3"]
    assert shown["config"] == {"context-size": 1024, "pin": True, "runtime-flags": flags, "fake": {"budget": 7}}
    await page.get_by_role("button", name="Settings of smol").click()
    await expect(form.get_by_label("context-size", exact=True)).to_have_value("1024")
    await form.get_by_label("context-size", exact=True).fill("")  # the default again
    await form.get_by_label("min-context-size").fill("64")
    await form.get_by_role("button", name="Save").click()
    await expect(form).to_have_count(0)
    async with daemon.tcp.get("/engines/_configure?model=smol") as answer:
        (shown,) = await answer.json()
    assert shown["config"] == {"min-context-size": 64, "pin": True, "runtime-flags": flags, "fake": {"budget": 7}}
    model = page.get_by_role("article", name="smol")
    await model.get_by_role("button", name="Load").click()
    await expect(model).to_contain_text("ready")
    await model.get_by_role("button", name="Remove smol").click()
    await expect(page.get_by_role("dialog")).to_contain_text("5.22 KiB of the disk come free")
    await expect(page.get_by_role("dialog")).to_contain_text("It is loaded")
    await page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    await expect(page.get_by_text("No model is here")).to_be_visible()


async def test_a_check_of_the_command_line_is_seen(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon(models={"smol": 0})
    page = await open_page(daemon, "#/models")
    model = page.get_by_role("article", name="smol")
    await expect(model).to_be_visible()
    for failed, mark in (([], "checked"), (["tool call"], "failed 1 of 13")):
        async with daemon.unix.post("/models/smol/check", json={"passed": 12, "failed": failed}) as answer:
            assert answer.status == 200
        await expect(model.get_by_text(mark, exact=True)).to_be_visible()
    await expect(model.get_by_title("failed: tool call")).to_be_visible()


async def test_a_wrong_setting_is_told_and_changes_nothing(start_daemon: StartDaemon, open_page: OpenPage, watch):
    watch.allowed = ["400"]
    daemon = await start_daemon(models={"smol": 0})
    page = await open_page(daemon, "#/models")
    await page.get_by_role("button", name="Settings of smol").click()
    await page.get_by_label("runtime-flags").fill("--rm-rf")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("no knob")
    async with daemon.tcp.get("/engines/_configure?model=smol") as answer:
        assert (await answer.json())[0]["config"] == {}
