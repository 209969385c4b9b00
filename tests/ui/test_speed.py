"""How quick the page is with much on it: a key press, a reload and the first view."""

import json
import statistics

import pytest
from playwright.async_api import Route, expect

from tests.api.conftest import StartDaemon
from tests.ui.conftest import TALKS, OpenPage, say

pytestmark = [pytest.mark.engine, pytest.mark.alone]

LINES = "".join(
    f"{n}. point *{n}* of the `answer`\n" if n % 5 else f"\nParagraph {n} with **words** in it.\n\n" for n in range(200)
)
TURNS = 25
PAINTED = """
window.keys = [];
addEventListener("keydown", () => {
    const began = performance.now();
    requestAnimationFrame(() => {
        const {port1, port2} = new MessageChannel();
        port1.onmessage = () => window.keys.push(performance.now() - began);
        port2.postMessage(0);
    });
}, true);
"""
"""Milliseconds from each key to the end of the picture that shows it; the picture itself waits up to 17 ms."""
SHOWN = """([selector, count]) => new Promise((resolve, reject) => {
    const look = () => {
        if (document.querySelectorAll(selector).length >= count) {
            requestAnimationFrame(() => setTimeout(() => resolve(Math.round(performance.now()))));
        } else if (performance.now() > 60000) reject(new Error(`fewer than ${count} of ${selector} came`));
        else setTimeout(look, 2);
    };
    look();
})"""
"""Milliseconds from the beginning of the page to the picture that has so many elements."""


async def test_a_long_conversation_stays_quick(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    daemon.backend.knobs = ("--text", LINES)
    page = await open_page(daemon, "#/chat", script=PAINTED)
    box = page.get_by_label("Message", exact=True)
    for turns in (0, TURNS):
        for turn in range(turns):
            await say(page, f"Question {turn}")
            await expect(page.get_by_text("first token")).to_have_count(turn + 1)
        await page.evaluate("window.keys = []")
        await box.focus()
        for key in "a question of 30 characters...":
            await page.keyboard.press(key)
            await page.wait_for_timeout(20)
        keys = sorted(await page.evaluate("window.keys"))
        print(f"{turns * 200} lines: a key {statistics.median(keys):.1f} ms, at most {keys[-1]:.1f} ms")
    assert statistics.median(keys) < 20
    times = []
    for _ in range(5):
        await page.reload(wait_until="commit")
        times.append([await page.evaluate(SHOWN, [".message", count]) for count in (1, 2 * TURNS)])
    print("reload until the last messages and until all are painted, ms:", times)
    assert min(first for first, _ in times) < 1000


async def test_the_first_view_with_many_models_and_runners(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon(models={f"ai/model{n}": n for n in range(100)}, metadata=TALKS)
    async with daemon.tcp.get("/engines/now") as answer:
        now = await answer.json()
    memory = {"ram": 10**9, "vram": []}
    now["runners"] = [
        {"id": f"runner{n}", "backend_name": "llama.cpp", "model_name": f"ai/model{n}", "model_id": f"sha256:{n}"}
        | {"models": {f"sha256:{n}": f"ai/model{n}"}}
        | {"mode": "completion", "state": "ready", "stage": "", "pid": n, "endpoint": "", "context_size": 4096}
        | {"parallel": 4, "memory": {"estimated": memory, "measured": memory}, "leases": 1, "queued": 0}
        | {"started_at": "2026-01-01T00:00:00Z", "last_used": None, "expires_at": None, "keep_alive": "5m"}
        | {"pinned": False, "in_use": False, "loading": False, "variant": ""}
        for n in range(30)
    ]
    page = await open_page(daemon, "#/chat")

    async def feed(route: Route) -> None:
        text = f"event: events\ndata: []\n\nevent: now\ndata: {json.dumps(now)}\n\n"
        await route.fulfill(body=text, content_type="text/event-stream")

    await page.route("**/engines/now", feed)
    for view, selector, count in (("now", ".runner", 30), ("models", ".model", 100)):
        times = []
        for _ in range(3):
            await page.goto("about:blank")
            await page.goto(f"http://127.0.0.1:{daemon.port}/#/{view}", wait_until="commit")
            times.append(await page.evaluate(SHOWN, [selector, count]))
        print(f"the first look at {view}, ms:", times)
        assert min(times) < 1000
