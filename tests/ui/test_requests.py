"""The views Requests and Usage, in a browser."""

import asyncio
import json
import re
import time
from pathlib import Path

import pytest
from playwright.async_api import Route, expect

from tests.api.conftest import Daemon, StartDaemon
from tests.ui.conftest import OpenPage

pytestmark = pytest.mark.engine


async def ask(daemon: Daemon, model: str, caller: str = "", **fields: object) -> str:
    """Returns the request's ID."""
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], **fields}
    headers = {"X-Caller": caller} if caller else {}
    async with daemon.tcp.post("/v1/chat/completions", json=body, headers=headers) as answer:
        await answer.read()
        return answer.headers["X-Request-ID"]


async def test_what_ended_is_filtered_and_shown_in_detail(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1})
    named = await ask(daemon, "smol", "kim")
    await ask(daemon, "other")
    await ask(daemon, "smol")
    await ask(daemon, "missing")
    page = await open_page(daemon, "#/requests")
    rows = page.locator(".request")
    await expect(rows).to_have_count(4)
    await page.get_by_label("Model", exact=True).select_option(label="smol")
    await expect(rows).to_have_count(2)
    await page.get_by_label("Route, caller, ID or error").fill("KIM")
    await expect(rows).to_have_count(1)
    await rows.click()
    details = page.locator(".details")
    await expect(details).to_contain_text(named)
    for word in ("queued", "loading", "until the first token", "answering", "caller"):
        await expect(details.get_by_text(word, exact=True)).to_be_visible()
    await expect(details.get_by_text("kim", exact=True)).to_be_visible()
    await expect(details).to_contain_text(re.compile(r"[1-9]\d* tokens?"))
    await page.get_by_label("Route, caller, ID or error").fill("nobody")
    await expect(page.get_by_text("No request is like this")).to_be_visible()
    await page.get_by_label("Route, caller, ID or error").fill("")
    await page.get_by_label("Model", exact=True).select_option("")
    await page.get_by_label("State").select_option("failed")
    await expect(rows).to_have_count(1)
    await rows.click()
    await expect(details).to_contain_text("model_not_found")
    await page.get_by_label("State").select_option("ok")
    await expect(rows).to_have_count(3)


async def test_a_request_under_way_is_shown_and_cancelled(
    start_daemon: StartDaemon, open_page: OpenPage, tmp_path: Path
) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--token-gate", str(tmp_path / "gate"))
    page = await open_page(daemon, "#/requests")
    await expect(page.get_by_text("No request yet")).to_be_visible()
    asked = asyncio.create_task(ask(daemon, "smol", stream=True))
    row = page.locator(".request")
    await expect(row.locator(".badge")).to_have_text("now")
    await row.click()
    await expect(page.locator(".details")).to_contain_text("answering")
    await page.get_by_role("button", name="Cancel the request").click()
    await asked
    await expect(row.locator(".badge.bad")).to_have_text("cut")
    await expect(page.locator(".details")).to_contain_text("request_cancelled")
    await page.get_by_label("State").select_option("ok")
    await expect(page.get_by_text("No request is like this")).to_be_visible()
    await page.get_by_label("State").select_option("failed")
    await expect(row).to_have_count(1)


async def test_the_last_hour_is_plotted(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    """Fifty requests in each ten seconds, of which ten failed."""
    daemon = await start_daemon()
    now = int(time.time()) // 10 * 10
    step: dict[str, float] = {"requests": 50, "failed": 10, "prompt_tokens": 70, "completion_tokens": 200}
    step |= {"first_byte_p50": 0.05, "first_byte_p95": 0.25, "duration_p50": 0.4, "duration_p95": 0.6}
    steps = [{"time": at, **step} for at in range(now - 3600, now + 600, 10)]
    page = await open_page(daemon)
    await page.route("**/engines/history", lambda route: route.fulfill(json=steps))
    await page.goto(f"http://127.0.0.1:{daemon.port}/#/requests")
    for plot, told in (
        ("Requests per second", r"all 5, failed 1\. The scale ends at 5\."),
        ("Tokens per second", r"answers 20\. The scale ends at 20\."),
        ("Time to the first token", r"median 50 ms, 95 % 250 ms\. The scale ends at 500 ms\."),
    ):
        name = re.compile(rf"^{plot} of the last hour\. At [\d:]+: {told}$")
        await expect(page.get_by_role("img", name=name)).to_be_visible()
    figure = page.locator("figure").filter(has=page.get_by_role("heading", name="Requests per second"))
    line = await figure.locator("path.line").first.get_attribute("d")
    assert line is not None
    assert line.count("L") == 359
    alone = [{**step, "time": now - 100, "requests": 5, "failed": 0}]
    await page.route("**/engines/history", lambda route: route.fulfill(json=alone))
    await page.reload()
    await expect(figure.get_by_text("0.25", exact=True)).to_be_visible()
    figure = page.locator("figure").filter(has=page.get_by_role("heading", name="Time to the first token"))
    await expect(figure.locator("path.line").first).to_have_attribute("d", re.compile(r"^M[\d. ]+m-1\.5 0h3$"))


async def test_logs_of_daemon_and_runner_are_followed(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--access-log",)
    await ask(daemon, "smol")
    page = await open_page(daemon, "#/requests")
    await page.get_by_role("region", name="Logs").get_by_role("button", name="Show").click()
    log = page.get_by_role("log")
    path = daemon.settings.data_dir / "logs" / "daemon.log"
    await expect(log).not_to_contain_text("a line that came later")
    with path.open("a") as file:
        file.write("a line that came later\n")
    await expect(log).to_contain_text("a line that came later")
    await page.get_by_label("Lines with").fill("LATER line")
    await expect(log).to_have_text("a line that came later")
    await page.get_by_label("Lines with").fill("")
    await page.get_by_label("Log of").select_option(label="smol (fake)")
    await expect(log).to_contain_text("POST /v1/chat/completions")
    lines = (await log.inner_text()).count("POST")
    await ask(daemon, "smol")
    await expect(log).to_have_text(re.compile(rf"(POST[^P]*){{{lines + 1}}}"))


async def test_usage_is_summed_by_model_key_and_day(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1})
    for model in ("smol", "smol", "other"):
        await ask(daemon, model)
    page = await open_page(daemon, "#/usage")
    rows = page.get_by_role("region", name="Requests and tokens").locator("tbody tr")
    await expect(rows).to_have_count(2)
    await expect(rows.filter(has_text="smol").get_by_role("cell").nth(1)).to_have_text("2")
    await page.get_by_label("Sum by").select_option("key")
    await expect(rows).to_have_count(1)
    await expect(rows).to_contain_text("nobody named")
    await page.get_by_label("Sum by").select_option("day")
    await expect(rows.get_by_role("cell").first).to_have_text(re.compile(r"^\d{4}-\d{2}-\d{2}$"))
    await expect(rows.get_by_role("cell").nth(1)).to_have_text("3")


async def test_a_request_that_comes_by_both_ways_is_one_row(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    """The stream sends it after the list had it."""
    daemon = await start_daemon(models={"smol": 0})
    await ask(daemon, "smol")
    async with daemon.tcp.get("/engines/requests") as answer:
        (ended,) = await answer.json()
    page = await open_page(daemon, "#/chat")

    async def feed(route: Route) -> None:
        await page.locator(".request").wait_for()
        later = {
            **ended,
            "time": ended["time"].replace("20", "21", 1),
            "route": "later",
        }  # clients may give two requests one ID
        news = json.dumps({"ended": 2, "newest": [ended, later]})
        await route.fulfill(body=f"event: requests\ndata: {news}\n\n", content_type="text/event-stream")

    await page.route("**/engines/now", feed)
    await page.goto("about:blank")
    await page.goto(f"http://127.0.0.1:{daemon.port}/#/requests")
    await expect(page.locator(".request")).to_have_count(2)
    await page.locator(".request").first.click()
    words = page.get_by_label("Route, caller, ID or error")
    await words.fill(ended["route"])  # the other one, which is not open
    await expect(page.locator(".request")).to_have_count(1)
    await expect(page.locator(".details")).to_have_count(0)
