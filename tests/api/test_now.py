"""`/engines/now` and `/engines/history`: what the page shows."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from modelrunner import wire
from modelrunner.gateway.calls import labels
from modelrunner.gateway.request.observers import RequestRecord
from modelrunner.gateway.request.tokens import Tokens
from modelrunner.scheduler.devices import Device
from modelrunner.telemetry.history import STEP, History
from modelrunner.telemetry.machine import MachineHistory
from tests.api.conftest import Daemon, StartDaemon
from tests.fakes import FakeClock
from tests.waiting import HUNG

record = partial(RequestRecord, "id", labels("openai", "/v1/chat/completions"))
CHAT = {"model": "smol", "messages": [{"role": "user", "content": "x"}]}


@asynccontextmanager
async def watching(daemon: Daemon) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """Yields the events that a page gets."""
    async with daemon.tcp.get("/engines/now", headers={"Accept": "text/event-stream"}) as answer:

        async def events() -> AsyncIterator[tuple[str, Any]]:
            name = ""
            async for line in answer.content:
                kind, _, value = line.decode().strip().partition(": ")
                if kind == "event":
                    name = value
                elif kind == "data":
                    yield name, json.loads(value)

        yield events()


async def test_every_watcher_sees_a_load_and_its_request(start_daemon: StartDaemon):
    daemon = await start_daemon(models={"smol": 0})
    async with watching(daemon) as first, watching(daemon) as second, asyncio.timeout(HUNG):
        assert [(await anext(first))[0] for _ in range(2)] == ["events", "now"]
        async with daemon.tcp.post("/v1/chat/completions", json=CHAT) as answer:
            assert answer.status == 200
        for watcher in (first, second):
            seen: dict[str, Any] = {}
            async for name, data in watcher:
                if name in ("events", "requests") and data:
                    seen[name] = data
                if name == "now" and (runners := data["runners"]) and runners[0]["state"] == "ready":
                    seen["ready"] = runners[0]["model_name"]
                if len(seen) == 3:
                    break
            assert seen["requests"]["ended"] == 1
            assert seen["ready"] == "smol"


async def test_a_snapshot_has_memory_and_paused_models(start_daemon: StartDaemon):
    daemon = await start_daemon(models={"smol": 0}, telemetry=False, memory_budget=1 << 30)
    async with daemon.tcp.post("/engines/pause", json={"model": "smol"}) as answer:
        assert answer.status == 200
    async with daemon.tcp.get("/engines/now") as answer:
        now = await answer.json()
    assert now["budget"]["ram"] == now["free"]["ram"] == 1 << 30
    assert len(now["paused"]) == 1
    assert now["counted"] is False


def test_an_hour_in_steps_of_ten_seconds():
    clock = FakeClock(1000.0)
    history = History(clock)
    for duration in (1.0, 2.123456, 9.0):
        history.add(record(200, duration=duration, first_byte=0.5, tokens=Tokens(3, 8)))
    history.add(record(503))
    history.add(record(200, duration=99.0, error="engine_crashed"))
    assert list(history) == []  # the step goes on
    clock.advance(STEP)
    (step,) = history
    assert step == wire.HistoryStep(1000, 5, 2, 9, 24, 0.5, 0.5, 2.1235, 2.1235)
    clock.advance(3600 + STEP)
    assert list(history) == []


def test_what_is_kept_of_requests_is_bounded():
    clock = FakeClock(0.0)
    history = History(clock)
    for _ in range(3 * 3600 // STEP):
        clock.advance(STEP)
        history.add(record(200, tokens=Tokens(0, 1)))
    assert len(list(history)) <= 3600 // STEP + 1


def test_the_hour_of_the_machine_is_bounded():
    clock = FakeClock(1000.0)
    card = Device(name="A card", total=100, free=30, utilization=7)
    machine = MachineHistory(lambda: (card,), clock)
    for _ in range(2 * 3600 // STEP):
        clock.advance(STEP)
        machine.look()
    told = machine()
    assert (told.devices, told.totals[1]) == (["A card"], 100)
    assert len(told.steps) == 3600 // STEP
    last = told.steps[-1]
    assert (last.time, last.memory[1], last.busy) == (int(clock()), 70, [7])
    assert 0 < last.memory[0] < told.totals[0]
    assert 0 <= last.processor <= 100


async def test_the_machine_is_told(start_daemon: StartDaemon):
    daemon = await start_daemon()
    async with daemon.tcp.get("/engines/machine") as answer:
        told = await answer.json()
    assert len(told["totals"]) == len(told["devices"]) + 1
    assert told["steps"] == []
