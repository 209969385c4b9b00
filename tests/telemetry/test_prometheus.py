"""Prometheus itself (Debian's package): its linter, its rules, and its scrapes of a daemon under load."""

import asyncio
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Daemon, StartDaemon, start_daemon
from tests.telemetry.prometheus import CONTRIB, prometheus, promtool, query, told
from tests.waiting import HUNG

__all__ = ["start_daemon"]
CHAT = {"model": "smol", "messages": [{"role": "user", "content": "x"}]}
SCRAPES = 10
CLIENTS = 4
pytestmark = pytest.mark.skipif(not shutil.which("prometheus"), reason="needs Debian's package prometheus")


async def ask(daemon: Daemon, body: dict[str, Any] = CHAT) -> int:
    async with daemon.unix.post("/v1/chat/completions", json=body) as answer:
        await answer.read()
        return answer.status


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
        requests = 'sum by (model, status) (modelrunner_requests_total{family!="control"})'
        await told(server, requests, lambda found: sum(found.values()) >= sum(expected.values()))
        assert await query(server, requests) == expected
        assert await query(server, 'sum(modelrunner_tokens_total{type="output"})') == {(): tokens}
        async with server.get("/api/v1/rules") as answer:
            [group] = (await answer.json())["data"]["groups"]
        assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
