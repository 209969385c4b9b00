"""Prometheus itself (Debian's package): its linter, its rules, and its scrapes of a daemon under load."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.api.conftest import Daemon, StartDaemon, start_daemon
from tests.waiting import HUNG

__all__ = ["start_daemon"]
CONTRIB = Path(__file__).parents[2] / "contrib"
CHAT = {"model": "smol", "messages": [{"role": "user", "content": "x"}]}
SCRAPES = 10
CLIENTS = 4
pytestmark = pytest.mark.skipif(not shutil.which("prometheus"), reason="needs Debian's package prometheus")


async def ask(daemon: Daemon, body: dict[str, Any] = CHAT) -> int:
    async with daemon.unix.post("/v1/chat/completions", json=body) as answer:
        await answer.read()
        return answer.status


def promtool(*words: str, told: str = "") -> tuple[int, str]:
    """The exit code and the output of `promtool check`."""
    done = subprocess.run(["promtool", "check", *words], input=told, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


async def used(daemon: Daemon) -> str:
    """The metrics of a daemon on which everything happened that is counted."""
    assert await ask(daemon) == 200
    assert await ask(daemon, {**CHAT, "model": "none"}) == 404
    daemon.backend.knobs = ("--crash", "as you wished")
    assert await ask(daemon, {**CHAT, "model": "other"}) >= 500
    async with daemon.unix.get("/metrics") as answer:
        return await answer.text()


async def test_its_linter_finds_nothing(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1})
    told = await used(daemon)
    assert promtool("metrics", told=told) == (0, "")


async def test_rules_and_dashboard_name_metrics_that_exist(start_daemon: StartDaemon) -> None:
    rules = CONTRIB / "prometheus-rules.yml"
    assert promtool("rules", "--lint-fatal", str(rules))[0] == 0
    dashboard = json.loads((CONTRIB / "grafana-dashboard.json").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = set(re.findall(r"\b(?:modelrunner|gen_ai|process)_\w+", "\n".join([*shown, rules.read_text()])))
    told = await used(await start_daemon(models={"smol": 0, "other": 1}))
    assert named - set(re.findall(r"^# TYPE (\w+)", told, re.MULTILINE)) - set(re.findall(r"^\w+", told, re.M)) == set()
    assert len(named) > 10


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def prometheus(folder: Path, target: int) -> AsyncIterator[aiohttp.ClientSession]:
    """A Prometheus that scrapes the daemon at that port, and a client for its API."""
    port, config = free_port(), folder / "prometheus.yml"
    jobs = [{"job_name": "modelrunner", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}]
    rules = [str(CONTRIB / "prometheus-rules.yml")]
    config.write_text(json.dumps({"global": {"scrape_interval": "250ms"}, "scrape_configs": jobs, "rule_files": rules}))
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec("prometheus", *options, stdout=log, stderr=log)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        process.terminate()
        await process.wait()


async def query(client: aiohttp.ClientSession, expression: str) -> dict[tuple[str, ...], float]:
    """The value for each combination of labels, without those of the scrape; nothing while it starts."""
    try:
        async with client.get("/api/v1/query", params={"query": expression}) as answer:
            found = (await answer.json())["data"]["result"] if answer.status == 200 else []
    except aiohttp.ClientConnectionError:
        return {}
    return {tuple(value for _, value in sorted(each["metric"].items())): float(each["value"][1]) for each in found}


async def told(client: aiohttp.ClientSession, expression: str, enough: Callable[[dict[Any, float]], bool]) -> None:
    """Returns once what Prometheus has scraped is enough."""
    while not enough(await query(client, expression)):  # noqa: ASYNC110 - Prometheus tells no one
        await asyncio.sleep(0.1)


async def test_its_counts_are_those_of_the_clients(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"smol": 0, "other": 1})
    counted: Counter[tuple[str, str]] = Counter()
    tokens = 0
    ended = asyncio.Event()

    async def client(number: int) -> None:
        nonlocal tokens
        model = ("smol", "other", "none")[number % 3]
        while not ended.is_set():
            status = await ask(daemon, {**CHAT, "model": model, "max_tokens": 5})
            counted["unknown" if status == 404 else model, str(status)] += 1
            tokens += 5 * (status == 200)

    (tmp_path / "prometheus").mkdir()
    async with prometheus(tmp_path / "prometheus", daemon.port) as server, asyncio.timeout(3 * HUNG):
        clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
        await told(server, "sum(count_over_time(up[1h]))", lambda found: found.get((), 0) >= SCRAPES)
        ended.set()
        await asyncio.gather(*clients)
        expected = {pair: float(count) for pair, count in counted.items()}
        requests = "sum by (model, status) (modelrunner_requests_total)"
        await told(server, requests, lambda found: sum(found.values()) >= sum(expected.values()))
        assert await query(server, requests) == expected
        assert await query(server, 'sum(modelrunner_tokens_total{type="output"})') == {(): tokens}
        assert await query(server, "min_over_time(up[1h])") == {("127.0.0.1:" + str(daemon.port), "modelrunner"): 1.0}
        async with server.get("/api/v1/rules") as answer:
            [group] = (await answer.json())["data"]["groups"]
        assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
