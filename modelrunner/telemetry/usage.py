"""Usage by day, caller and model, in an SQLite file that survives a kill."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from modelrunner import wire
from modelrunner.concurrency.beat import beat
from modelrunner.database import Database
from modelrunner.gateway.request.observers import RequestRecord

log = logging.getLogger(__name__)

EVERY = 1.0
"""Seconds between two writes. A kill loses at most this time and that of a write."""
_LARGEST = 64 << 20  # bytes of the file above which the oldest days are removed
_MOST_KEPT = 10_000  # sums that wait for the disk: callers choose their names, and a disk may be full for days
_OTHERS = "(others)"
_TABLE = """create table usage (
    day text, caller text, model text, requests integer, prompt integer, answer integer, seconds real,
    primary key (day, caller, model));"""
_ADD = """insert into usage (day, caller, model, requests, prompt, answer, seconds) values (?, ?, ?, ?, ?, ?, ?)
    on conflict do update set
    requests = requests + excluded.requests, prompt = prompt + excluded.prompt,
    answer = answer + excluded.answer, seconds = seconds + excluded.seconds"""


class Grouping(StrEnum):
    """The columns by which usage can be summed."""

    KEY = "caller"
    MODEL = "model"
    DAY = "day"


class Usage:
    """Sums requests in memory, and writes the sums once a second in a thread: no request waits for the disk. `wall` is
    the time of day in Unix seconds; `pause` waits for at most so many seconds."""

    def __init__(
        self,
        path: Path,
        wall: Callable[[], float] = time.time,
        largest: int = _LARGEST,
        pause: Callable[[float], Awaitable[None]] = beat,
    ) -> None:
        self._database = Database(path, _TABLE, largest=largest)
        self._wall, self._pause = wall, pause
        self._new: dict[tuple[str, str, str], list[float]] = {}
        self._failing = False
        self._writing = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()

    def add(self, record: RequestRecord) -> None:
        """Adds a request. One that no model answered does not count."""
        model = record.served.model
        if not model:
            return
        day = _date(int(self._wall()) // 86400)
        key = day, record.labels.caller, model
        if len(self._new) >= _MOST_KEPT and key not in self._new:
            key = day, _OTHERS, model
        sums = self._new.setdefault(key, [0, 0, 0, 0.0])
        sums[0] += 1
        sums[1] += record.tokens.prompt
        sums[2] += record.tokens.answer
        sums[3] += max(0.0, record.duration - record.queued - record.loading)

    async def run(self) -> None:
        """Writes until it is cancelled."""
        while True:
            await self._pause(EVERY)
            await self.flush()

    async def flush(self) -> None:
        """Writes the new sums, after a write under way. If the disk refuses them, the next call tries again; if the
        call is cancelled, its write continues, and the next call waits for it. So no sum is lost."""
        self._writes.add(write := asyncio.create_task(self._write_new(), name="write usage"))
        write.add_done_callback(self._writes.discard)
        await asyncio.shield(write)

    async def _write_new(self) -> None:
        async with self._writing:
            new, self._new = self._new, {}
            if new:
                await self._write_in_thread(new)

    async def _write_in_thread(self, new: dict[tuple[str, str, str], list[float]]) -> None:
        try:
            await asyncio.to_thread(self._write, new)
            self._failing = False
        except (sqlite3.Error, OSError) as error:
            if not self._failing:  # logged once, not every second
                log.warning("usage stays in memory: %s cannot be written: %s", self._database.path, error)
            self._failing = True
            for key, sums in new.items():
                later = self._new.setdefault(key, [0, 0, 0, 0.0])
                later[:] = [a + b for a, b in zip(sums, later, strict=True)]

    async def sums(self, by: Grouping, since: timedelta) -> list[wire.UsageTotals]:
        """Returns sums of the requests that reached an engine, by day, model or caller, since the day that is `since`
        ago; the newest day or the largest number of requests first. Raises `OSError`, `sqlite3.Error`."""
        await self.flush()
        first = (datetime.fromtimestamp(self._wall(), UTC) - since).date().isoformat()
        return await asyncio.to_thread(self._read, by, first)

    def _write(self, new: dict[tuple[str, str, str], list[float]]) -> None:
        rows = [(*key, *sums) for key, sums in new.items()]
        while True:
            try:
                with self._database.transaction() as database:
                    database.executemany(_ADD, rows)
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL or not self._drop_oldest_day():
                    raise

    def _drop_oldest_day(self) -> bool:
        with self._database.transaction() as database:
            return database.execute("delete from usage where day = (select min(day) from usage)").rowcount > 0

    def _read(self, column: Grouping, first: str) -> list[wire.UsageTotals]:
        order = "day desc" if column is Grouping.DAY else "sum(requests) desc"
        query = (
            f"select {column}, sum(requests), sum(prompt), sum(answer), sum(seconds) from usage"
            f" where day >= ? group by {column} order by {order}"
        )
        with self._database.transaction() as database:
            rows = database.execute(query, (first,)).fetchall()
        return [
            wire.UsageTotals(name, requests, prompt, answer, round(seconds, 3))
            for name, requests, prompt, answer, seconds in rows
        ]


@lru_cache(maxsize=2)
def _date(day: int) -> str:
    """Returns the date of a day since 1970."""
    return time.strftime("%Y-%m-%d", time.gmtime(day * 86400))
