"""What the page costs: the memory of its tab, bytes on the wire, and the time to its first paint."""

import asyncio
import contextlib

import pytest
from playwright.async_api import Error, Route, expect

from tests.api.conftest import StartDaemon
from tests.ui.conftest import TALKS, VIEWS, OpenPage, show
from tests.waiting import HUNG

pytestmark = pytest.mark.engine

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
    devices: [{name: "card", total: 2e11, others: 0, utilization: n % 100, temperature: 60, fault: ""}],
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
