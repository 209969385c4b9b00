"""Usage is added up, survives, and stays small."""

import asyncio
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path

from modelrunner import wire
from modelrunner.gateway.calls import labels
from modelrunner.gateway.request.observers import RequestRecord
from modelrunner.gateway.request.tokens import NONE, Tokens
from modelrunner.telemetry.usage import Grouping, Usage
from modelrunner.types import Served

DAY = 86400.0
NOON = 1_750_000_000.0


class Wall:
    now = NOON

    def __call__(self) -> float:
        return self.now


def request(caller: str, model: str, tokens: Tokens = NONE) -> RequestRecord:
    """One request, alone."""
    shared = labels("openai", "/v1/chat/completions", caller)
    return RequestRecord("id", shared, 200, "", model, Served(model), duration=2.0, queued=0.5, tokens=tokens)


async def test_sums_by_model_caller_and_day(tmp_path: Path) -> None:
    wall = Wall()
    usage = Usage(tmp_path / "usage.sqlite", wall)
    usage.add(request("kim", "a", Tokens(10, 5)))
    wall.now += DAY
    usage.add(request("lee", "a", Tokens(20, 7)))
    usage.add(request("lee", "b", Tokens(1, 1)))
    month = timedelta(days=30)
    assert await usage.sums(Grouping.MODEL, month) == [
        wire.UsageTotals("a", 2, 30, 12, 3.0),
        wire.UsageTotals("b", 1, 1, 1, 1.5),
    ]
    assert await usage.sums(Grouping.KEY, month) == [
        wire.UsageTotals("lee", 2, 21, 8, 3.0),
        wire.UsageTotals("kim", 1, 10, 5, 1.5),
    ]
    assert [each.requests for each in await usage.sums(Grouping.DAY, month)] == [2, 1]
    assert [each.requests for each in await usage.sums(Grouping.DAY, timedelta(0))] == [2]


async def test_sums_wait_for_what_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    usage = Usage(path, Wall())
    month = timedelta(days=30)
    assert await usage.sums(Grouping.MODEL, month) == []
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin immediate")  # until it ends, what is written waits and what is read does not
        usage.add(request("", "ai/m", Tokens(10, 5)))
        writing = asyncio.create_task(usage.flush())
        reading = asyncio.create_task(usage.sums(Grouping.MODEL, month))
        assert await Usage(path, Wall()).sums(Grouping.MODEL, month) == []
        other.execute("rollback")
    assert [each.requests for each in await reading] == [1]
    await writing


async def test_a_write_that_nobody_waits_for_goes_on(tmp_path: Path) -> None:
    usage = Usage(tmp_path / "usage.sqlite", Wall())
    loop, free = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = asyncio.create_task(asyncio.to_thread(free.wait))  # the only thread
    usage.add(request("", "ai/m", Tokens(10, 5)))
    leaving = asyncio.create_task(usage.flush())
    await asyncio.wait([leaving], timeout=0.0)
    leaving.cancel()
    await asyncio.wait([leaving])
    assert leaving.cancelled()
    usage.add(request("", "ai/m", Tokens(1, 1)))
    reading = asyncio.create_task(usage.sums(Grouping.MODEL, timedelta(days=1)))
    free.set()
    assert await reading == [wire.UsageTotals("ai/m", 2, 11, 6, 3.0)]
    await busy


async def test_it_writes_once_a_second(tmp_path: Path) -> None:
    """So a kill loses what was answered within a second, and during the write before it."""
    path = tmp_path / "usage.sqlite"
    pauses, bell = asyncio.Queue[float](), asyncio.Queue[None]()

    async def pause(seconds: float) -> None:
        pauses.put_nowait(seconds)
        await bell.get()

    usage = Usage(path, Wall(), pause=pause)
    running = asyncio.create_task(usage.run())
    assert await pauses.get() == 1.0
    for number in range(1, 4):
        usage.add(request("", "ai/m"))
        bell.put_nowait(None)
        assert await pauses.get() == 1.0
        assert [each.requests for each in await Usage(path, Wall()).sums(Grouping.DAY, timedelta(days=1))] == [number]
    running.cancel()
    await asyncio.wait([running])


async def test_it_survives_a_new_daemon(tmp_path: Path) -> None:
    first = Usage(tmp_path / "usage.sqlite", Wall())
    first.add(request("", "ai/m", Tokens(10, 5)))
    await first.flush()
    second = Usage(tmp_path / "usage.sqlite", Wall())
    second.add(request("", "ai/m", Tokens(1, 1)))
    assert await second.sums(Grouping.MODEL, timedelta(days=1)) == [wire.UsageTotals("ai/m", 2, 11, 6, 3.0)]


async def test_a_damaged_file_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    path.write_bytes(b"not a database, and longer than its header would be" * 40)
    usage = Usage(path, Wall())
    usage.add(request("", "ai/m", Tokens(1, 1)))
    assert len(await usage.sums(Grouping.MODEL, timedelta(days=1))) == 1
    [aside] = tmp_path.glob("usage.sqlite.corrupt-*")
    assert aside.read_bytes().startswith(b"not a database")


async def test_a_disk_that_refuses_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    usage = Usage(folder / "usage.sqlite", Wall())
    usage.add(request("", "ai/m", Tokens(1, 1)))
    await usage.flush()
    usage.add(request("", "ai/m", Tokens(2, 2)))
    await usage.flush()
    folder.mkdir()
    assert await usage.sums(Grouping.MODEL, timedelta(days=1)) == [wire.UsageTotals("ai/m", 2, 3, 3, 3.0)]


async def test_the_oldest_days_go_when_it_is_full(tmp_path: Path) -> None:
    wall, largest = Wall(), 128 << 10
    usage = Usage(tmp_path / "usage.sqlite", wall, largest)
    for day in range(40):
        for number in range(50):
            usage.add(request("", f"ai/model-{number:040}", Tokens(1, 1)))
        await usage.flush()
        wall.now = NOON + (day + 1) * DAY
    wall.now -= DAY
    days = await usage.sums(Grouping.DAY, timedelta(days=100))
    assert (tmp_path / "usage.sqlite").stat().st_size <= largest
    assert 1 < len(days) < 40
    assert {each.requests for each in days} == {50}
    assert days[0].name == (await usage.sums(Grouping.DAY, timedelta(0)))[0].name


async def test_damage_behind_the_first_page_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    usage = Usage(path, Wall())
    for number in range(500):
        usage.add(request("", f"model-{number}", Tokens(1, 1)))
    await usage.flush()
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    usage.add(request("", "ai/m", Tokens(1, 1)))
    await usage.flush()
    assert [each.requests for each in await usage.sums(Grouping.DAY, timedelta(days=1))] == [1]
    [aside] = tmp_path.glob("usage.sqlite.corrupt-*")
    assert aside.read_bytes()[:4096] == whole[:4096]


async def test_callers_without_end_are_added_up_together(tmp_path: Path) -> None:
    """While the disk takes nothing, memory is bounded, and no request is lost."""
    usage = Usage(tmp_path / "usage.sqlite", Wall())
    for number in range(10_500):
        usage.add(request(str(number), "ai/m"))
    sums = await usage.sums(Grouping.KEY, timedelta(days=1))
    assert len(sums) == 10_001
    assert sums[0] == wire.UsageTotals("(others)", 500, 0, 0, 750.0)
