"""Metrics outlive what is wrong around them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from modelrunner.concurrency.feed import Feed
from modelrunner.scheduler.state import Phase
from modelrunner.telemetry.engines import EngineMetrics, fetch, merged
from modelrunner.telemetry.hub import Telemetry
from modelrunner.types import Endpoint
from tests.waiting import HUNG


def test_an_engine_with_broken_metrics_hides_no_other() -> None:
    broken = '# HELP a b\n# TYPE a counter\na{x="y", ="\\n"} \\ 2a'
    good = "# TYPE b gauge\nb 1\n"
    assert [family.name for family in merged([], [EngineMetrics({}, broken), EngineMetrics({}, good)])] == ["b"]


async def test_an_engine_that_does_not_answer_is_left_out(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    place = Endpoint(path=tmp_path / "engine.sock")
    async with await asyncio.start_unix_server(silent, str(place.path)), asyncio.timeout(HUNG):
        names = {"model_name": "m", "backend_name": "fake", "id": "r1"}
        runner: Any = SimpleNamespace(state=Phase.READY, endpoint=place, **names)
        assert [answer.text for answer in await fetch([runner], limit=0.01)] == [None]


async def test_a_burst_of_events_does_not_end_the_counting(tmp_path: Path) -> None:
    events = Feed[Any](1, 3)
    scheduler: Any = SimpleNamespace(events=events)
    telemetry = Telemetry(scheduler, lambda: (), tmp_path, lambda: None)
    counting = asyncio.create_task(telemetry.count_events())
    await asyncio.sleep(0)
    for _ in range(10):
        events.add(SimpleNamespace(event="load", model="m", details={}))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not counting.done()
    events.close()
    await counting
