"""The feed of events: what is kept, who hears it, and who is dropped."""

import asyncio
from collections.abc import AsyncIterator

from modelrunner.scheduler.events import EventRecord, Events


def clock() -> float:
    return 1_000.0


async def reasons(feed: AsyncIterator[EventRecord | None]) -> list[str]:
    return [event.reason async for event in feed if event is not None]


async def test_an_event_is_kept_with_its_time_and_details() -> None:
    events = Events(clock)
    events.emit("load", model="a", runner="r1", reason="a request came", memory=7)
    events.emit("stop", model="b")
    (first,) = events.recent("a")
    assert (first.event, first.runner, first.reason, first.details) == ("load", "r1", "a request came", {"memory": 7})
    assert first.time == 1_000.0
    assert [event.model for event in events.recent()] == ["a", "b"]


async def test_only_the_newest_are_kept() -> None:
    events = Events(kept=3)
    for number in range(10):
        events.emit("load", reason=str(number))
    assert [event.reason for event in events.recent()] == ["7", "8", "9"]


def test_what_a_client_wrote_is_kept_in_part() -> None:
    events = Events()
    events.emit("pull", model="m" * 1_000_000, reason="failed: " + "x" * 1_000_000)
    [event] = events
    assert (event.model[:2], event.reason[:9]) == ("mm", "failed: x")
    assert len(event.model) + len(event.reason) < 10_000


async def test_a_feed_begins_where_it_was_asked_for() -> None:
    events = Events()
    events.emit("load", reason="before")
    feed = events.subscribe()
    events.emit("load", reason="after")
    events.close()
    assert await reasons(feed) == ["after"]


async def test_a_reader_comes_back_with_the_last_id_it_saw() -> None:
    events = Events()
    for reason in "abc":
        events.emit("load", reason=reason)
    seen = events.recent()[0].id
    events.close()
    assert await reasons(events.subscribe(seen)) == ["b", "c"]
    assert await reasons(events.subscribe(0)) == ["a", "b", "c"]
    assert await reasons(events.subscribe(seen + 10**9)) == ["a", "b", "c"]


async def test_ids_go_on_growing_when_the_daemon_starts_anew() -> None:
    before, after = Events(lambda: 1_000.0), Events(lambda: 1_001.0)
    before.emit("load")
    after.emit("load")
    assert after.recent()[0].id > before.recent()[0].id


async def test_every_reader_hears_what_comes_while_it_waits() -> None:
    events = Events()
    waiting = [asyncio.create_task(reasons(events.subscribe())) for _ in range(3)]
    await asyncio.sleep(0)
    events.emit("load", reason="one")
    await asyncio.sleep(0)
    events.emit("ready", reason="two")
    events.close()
    assert await asyncio.gather(*waiting) == [["one", "two"]] * 3


async def test_a_reader_that_falls_behind_is_dropped_and_nobody_waits_for_it() -> None:
    events = Events(kept=3)
    slow = events.subscribe()
    events.emit("load", reason="0")
    first = await anext(slow)
    assert first is not None
    for number in range(1, 9):
        events.emit("load", reason=str(number))
    assert await reasons(slow) == []
    events.close()
    assert await reasons(events.subscribe(first.id)) == ["6", "7", "8"]


async def test_an_idle_feed_says_so() -> None:
    feed = Events().subscribe(idle=0.0)
    assert await anext(feed) is None
    assert await anext(feed) is None
