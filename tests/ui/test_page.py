"""The page as a whole: what every view must keep."""

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from playwright.async_api import Error, Page, Route, expect

from modelrunner.config.locations import Locations
from tests.api.conftest import Daemon, StartDaemon
from tests.ui.conftest import DESK, PHONE, TALKS, OpenPage, Watch
from tests.waiting import HUNG

pytestmark = pytest.mark.engine

VIEWS = ("now", "models", "chat", "requests", "usage")
CHAT = {"model": "smol", "messages": [{"role": "user", "content": "x"}]}
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
CLIENTS = Locations.find().cache / "clients"
TEXT = "Mapped files are **shared**: two runners of one model count once.\n\n```python\nbudget - used\n```\n"


async def ask(daemon: Daemon, **fields: object) -> None:
    async with daemon.tcp.post("/v1/chat/completions", json=CHAT | {"stream": True} | fields) as answer:
        await answer.read()


async def show(page: Page, daemon: Daemon, view: str) -> None:
    await page.goto(f"http://127.0.0.1:{daemon.port}/#/{view}")
    await expect(page.get_by_role("heading", level=1, name=view.capitalize())).to_be_attached()
    await expect(page.locator(".skeleton")).to_have_count(0)


@pytest.fixture
async def busy(start_daemon: StartDaemon, tmp_path: Path):
    """A daemon with runners, a model that waits, requests that ended, under way and in the line, and usage."""
    models = {"smol": 0, "ai/gemma3": 1, "hf.co/qwen/Qwen3-4B-GGUF:Q4_K_M": 2, "ai/llama": 3}
    daemon = await start_daemon(models=models, metadata=TALKS, memory_budget=200 << 20)
    daemon.backend.knobs = ("--text", TEXT, "--rate", "200")
    for _ in range(4):
        await ask(daemon)
    await ask(daemon, model="gemma3", messages=[])
    daemon.backend.knobs = ("--gate", str(tmp_path / "gate"))
    waiting = [asyncio.create_task(ask(daemon, model=model)) for model in ("Qwen3-4B-GGUF:Q4_K_M", "llama")]
    yield daemon
    (tmp_path / "gate").touch()
    await asyncio.gather(*waiting)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_view_is_accessible_and_photographed(
    busy: Daemon, open_page: OpenPage, shots: Path, scheme: str
) -> None:
    for folder in sorted(CLIENTS.glob("npm-axe-core-*")):
        axe = (folder / "node_modules/axe-core/axe.min.js").read_text()
        break
    else:
        pytest.skip("axe-core is missing: scripts/install-clients")
    for size, name in ((DESK, scheme), (PHONE, f"{scheme}-phone")):
        page = await open_page(busy, scheme=scheme, size=size)
        for view in VIEWS:
            await show(page, busy, view)
            if view == "chat":
                await page.get_by_label("Model", exact=True).select_option("smol")
                await page.get_by_label("Message", exact=True).fill("Why do two runners of one model need less memory?")
                await page.keyboard.press("Enter")
                await expect(page.get_by_text("first token")).to_be_visible()
            if view == "requests":
                await page.locator(".request").last.click()
            await page.screenshot(path=shots / f"{view}-{name}.png")
            width = await page.evaluate("document.documentElement.scrollWidth")
            assert width <= size["width"], f"{view} is {width} pixels wide"
            await page.evaluate(axe)  # by the debugger, which no policy of the page concerns
            found = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            told = [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found["violations"]]
            assert not told, (view, name, told)


async def test_the_dialogs_are_accessible(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    scripts = sorted(CLIENTS.glob("npm-axe-core-*/node_modules/axe-core/axe.min.js"))
    if not scripts:
        pytest.skip("axe-core is missing: scripts/install-clients")
    daemon = await start_daemon(models={"smol": 0})
    page = await open_page(daemon)
    for view, button in (
        ("models", "Settings of smol"),
        ("models", "Remove smol"),
        ("usage", "New key"),
        ("chat", "Options of this conversation"),
    ):
        await show(page, daemon, view)
        await page.get_by_role("button", name=button).click()
        await expect(page.get_by_role("dialog").get_by_role("button").last).to_be_visible()
        await page.evaluate(scripts[0].read_text())
        found = await page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        assert not [(each["id"], each["nodes"][0]["html"][:200]) for each in found["violations"]], button
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)


async def test_what_clients_call_things_does_nothing(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon(models={"smol": 0}, metadata={"general.name": HOSTILE, **TALKS})
    await ask(daemon)
    headers = {"X-Caller": HOSTILE}
    async with daemon.tcp.post("/v1/chat/completions", json=CHAT | {"model": HOSTILE}, headers=headers) as answer:
        assert answer.status in (400, 404)
    page = await open_page(daemon)
    for view in VIEWS:
        await show(page, daemon, view)
        assert await page.locator("img[src=x]").count() == 0
        assert "modelrunner" in await page.title()
    await show(page, daemon, "requests")
    await expect(page.locator(".request").filter(has_text="<img src=x")).to_be_visible()  # as text


async def test_the_page_goes_on_after_a_restart(start_daemon: StartDaemon, open_page: OpenPage, watch: Watch) -> None:
    watch.allowed = ["ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET", "503"]
    daemon = await start_daemon(models={"smol": 0})
    await ask(daemon)
    page = await open_page(daemon)
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


async def test_login_with_a_key_and_logout(start_daemon: StartDaemon, open_page: OpenPage, watch: Watch) -> None:
    watch.allowed = ["401", "403"]
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    texts = {}
    for name, scopes in (("boss", ["inference", "models", "admin"]), ("guest", ["inference"])):
        async with daemon.unix.post("/keys", json={"name": name, "scopes": scopes}) as answer:
            texts[name] = (await answer.json())["text"]
    page = await open_page(daemon, "#/now")
    field = page.get_by_label("API key")
    await field.fill("wrong")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("alert")).to_contain_text("does not know this key")
    await field.fill(texts["boss"])
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("No model is loaded")).to_be_visible()
    await page.reload()  # the same session
    await expect(page.get_by_text("No model is loaded")).to_be_visible()
    assert texts["boss"] not in json.dumps(await page.evaluate("({...localStorage})"))
    await show(page, daemon, "usage")
    await expect(page.get_by_role("cell", name="guest", exact=True)).to_be_visible()
    await page.get_by_role("button", name="Revoke the key guest").click()
    await page.get_by_role("button", name="Keep it").click()
    await page.get_by_role("button", name="Log out").click()
    await page.get_by_label("API key").fill(texts["guest"])
    await page.keyboard.press("Enter")
    await show(page, daemon, "now")
    await expect(page.get_by_role("alert")).to_contain_text("Log in with a key that has this scope")
    await show(page, daemon, "chat")
    await page.get_by_label("Message", exact=True).fill("Hello")
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()
    await page.keyboard.press("Enter")
    await expect(page.get_by_text("first token")).to_be_visible()


async def test_a_key_is_made_and_revoked(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon()
    page = await open_page(daemon, "#/usage")
    await page.get_by_role("button", name="New key").click()
    await page.get_by_label("Name").fill("kim")
    await page.get_by_role("button", name="Create").click()
    text = await page.locator(".secret").inner_text()
    await page.get_by_role("button", name="Done").click()
    await expect(page.get_by_role("cell", name="kim", exact=True)).to_be_visible()  # this tab is logged in with it
    async with daemon.tcp.get("/keys", headers={"X-API-Key": text}) as answer:
        assert answer.status == 200
    await page.get_by_role("button", name="Revoke the key kim").click()
    await page.get_by_role("button", name="Revoke", exact=True).click()
    await expect(page.get_by_text("There are no keys")).to_be_visible()


async def test_everything_by_keyboard(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    await ask(daemon)
    page = await open_page(daemon)
    await expect(page.get_by_role("article", name="smol")).to_be_visible()

    async def reach(name: str) -> None:
        for _ in range(60):
            await page.keyboard.press("Tab")
            label = await page.evaluate(
                "(document.activeElement.ariaLabel || document.activeElement.textContent).trim()"
            )
            if label == name:
                return
        raise AssertionError(f"Tab never reaches {name}")

    await reach("Skip to the content")
    await page.keyboard.press("Enter")
    await reach("Pin smol")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("button", name="Unpin smol")).to_be_visible()
    await page.reload()
    await reach("Models")
    await page.keyboard.press("Enter")
    await reach("Settings of smol")
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("dialog")).to_be_visible()
    await page.keyboard.press("Escape")
    assert await page.evaluate("document.activeElement.ariaLabel") == "Settings of smol"


FRAMES = """
const real = window.fetch;
const runner = (i) => ({
  id: `runner${i}`, backend_name: "llama.cpp", model_name: `ai/model${i}:latest`, model_id: `sha256:${i}`,
  mode: "completion", state: "ready", stage: "", pid: i, endpoint: "", context_size: 4096, parallel: 4,
  memory: {estimated: {ram: 1e9, vram: [8e9]}, measured: {ram: 9e8, vram: [7e9]}}, leases: window.sent % 5, queued: 0,
  started_at: "2026-01-01T00:00:00Z", last_used: null, expires_at: null, keep_alive: "5m", pinned: false,
  in_use: false, loading: false, variant: "",
});
const request = (id) => ({
  id, time: new Date(Date.now()).toISOString(), request_id: `request-${id}`, family: "openai",
  route: "/v1/chat/completions", status: 200, error: "", model: "m", model_name: `ai/model${id % 20}:latest`,
  backend: "llama.cpp", runner: `runner${id % 20}`, caller: "", queued: 0.01, loading: 0, first_byte: 0.05,
  duration: 0.4, bytes_in: 900, bytes_out: 9000, prompt_tokens: 90, completion_tokens: 80, cached_tokens: 0,
  tokens_per_second: 200,
});
const event = (id) => ({
  id, event: "ready", time: new Date().toISOString(), runner: "", model: "ai/model1", reason: "x", details: {},
});
const step = (n) => ({
  time: 1.7e9 + n * 10, requests: 2000, failed: 1, prompt_tokens: 9, completion_tokens: 9, first_byte_p50: 0.05,
  first_byte_p95: 0.1, duration_p50: 0.4, duration_p95: 0.6,
});
function look(n) {
  const now = {
    status: "ready", budget: {ram: 6e10, vram: [2e11]}, free: {ram: 3e10, vram: [3e10]}, waiting: {}, paused: [],
    runners: Array.from({length: 20}, (_, i) => runner(i)), running: 40, counted: true,
    requests: Array.from({length: 40}, (_, i) => ({...request(n * 100 + i), status: 0})),
  };
  const newest = Array.from({length: 100}, (_, i) => request(n * 100 + i));
  const parts = [["events", [event(n)]], ["requests", {ended: 100, newest}], ["now", now]];
  if (n % 20 === 0) parts.push(["history", step(n / 20)]);
  return parts.map(([name, data]) => `event: ${name}\\ndata: ${JSON.stringify(data)}\\n\\n`).join("");
}
window.sent = 0;
window.fetch = (url, init) => {
  if (!String(url).endsWith("/engines/now")) return real(url, init);
  const encoder = new TextEncoder();
  const body = new ReadableStream({
    async pull(controller) {
      await new Promise((resolve) => setTimeout(resolve, 0));
      if (window.sent >= 7200) return new Promise(() => {});
      for (let i = 0; i < 20; i++) controller.enqueue(encoder.encode(look(++window.sent)));
    },
  });
  return Promise.resolve(new Response(body, {headers: {"Content-Type": "text/event-stream"}}));
};
"""


async def test_an_hour_of_events_leaves_the_memory_bounded(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    """Twenty runners and 200 requests/s, ten seconds for each picture of the screen: 7,200 looks of the daemon, and
    720,000 requests. After a quarter of them the page holds most of what it ever will."""
    daemon = await start_daemon()
    page = await open_page(daemon, "#/requests", script=FRAMES)
    debugger = await page.context.new_cdp_session(page)
    held = {}
    for looks in (1800, 7200):
        await page.wait_for_function(f"() => window.sent >= {looks}", timeout=HUNG * 1000)
        await debugger.send("HeapProfiler.collectGarbage")
        usage = await debugger.send("Runtime.getHeapUsage")
        nodes = await page.evaluate("document.getElementsByTagName('*').length")
        held[looks] = usage["usedSize"], nodes
    print("bytes and elements:", held)
    assert held[7200][0] < 1.3 * held[1800][0]
    assert held[7200][1] < 1.3 * held[1800][1]


async def test_little_comes_over_the_wire(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    """All that the first view fetches, and then all views together; in bytes as they came, with their heads."""
    daemon = await start_daemon(models={"smol": 0}, metadata=TALKS)
    page = await open_page(daemon, "#/now")
    await expect(page.get_by_text("No model is loaded")).to_be_visible()
    sizes = "performance.getEntriesByType('resource').concat(performance.getEntriesByType('navigation'))"
    sizes += ".filter((each) => each.name.includes('/ui/') || each.entryType === 'navigation')"
    first = await page.evaluate(f"{sizes}.reduce((sum, each) => sum + each.transferSize, 0)")
    for view in VIEWS:
        await show(page, daemon, view)
    whole = await page.evaluate(f"{sizes}.reduce((sum, each) => sum + each.transferSize, 0)")
    print(f"first view {first} bytes, all views {whole} bytes")
    assert first < whole < 150_000


async def test_the_first_paint_waits_for_no_data(start_daemon: StartDaemon, open_page: OpenPage) -> None:
    """Prints the times of five paints in milliseconds (`-s`)."""
    daemon = await start_daemon(models={"smol": 0})
    page = await open_page(daemon)
    painted = asyncio.Event()

    async def hold(route: Route) -> None:
        await painted.wait()
        with contextlib.suppress(Error):  # the page has gone
            await route.abort()

    await page.route("**/engines/**", hold)
    paint = """new Promise(found => new PerformanceObserver(list => {
        for (const entry of list.getEntriesByName("first-contentful-paint")) found(entry.startTime);
    }).observe({type: "paint", buffered: true}))"""
    times = []
    for _ in range(5):
        await page.reload(wait_until="commit")
        times.append(await page.evaluate(paint))
    await page.close()
    painted.set()
    print("first contentful paint, ms:", [round(time) for time in times])
