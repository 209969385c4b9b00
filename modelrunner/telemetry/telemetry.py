"""The observer that passes each request to the counters, the recent requests and the usage, and reads them."""

import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path

from modelrunner import wire
from modelrunner.errors import RequestCancelled, RequestNotFound
from modelrunner.gateway.request.observers import CONTROL, RequestRecord
from modelrunner.gateway.request.work import UnderWay
from modelrunner.scheduler import Scheduler
from modelrunner.telemetry.counters import EventCounters, RequestCounters
from modelrunner.telemetry.exposition import Exposition
from modelrunner.telemetry.history import History
from modelrunner.telemetry.recent import RecentRequests, RequestFilter
from modelrunner.telemetry.usage import Grouping, Usage


class Telemetry:
    """An `Observer`. `under_way` returns the requests that have not ended; `state` is the folder of the usage file;
    `wall` is the time of day in Unix seconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        under_way: Callable[[], Collection[UnderWay]],
        state: Path,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._scheduler = scheduler
        self._counters = RequestCounters()
        self._events = EventCounters()
        self._recent = RecentRequests(under_way)
        self._history = History(wall)
        self._usage = Usage(state / "usage.sqlite", wall)
        self.exposition = Exposition(scheduler, self._counters, self._events, lambda: len(under_way()))

    def finished(self, record: RequestRecord) -> None:
        self._counters.add(record)
        if record.labels.family != CONTROL:
            self._usage.add(record)
            self._history.add(record)
            self._recent.add(record)

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """Returns the counts for Prometheus and their content type, as `Exposition.render`."""
        return await self.exposition.render(accept)

    def running(self) -> list[RequestRecord]:
        """Returns the requests under way, the oldest first, with the status 0."""
        return self._recent.running()

    def requests(self, wanted: RequestFilter, limit: int | None = None) -> list[RequestRecord]:
        """Returns the requests under way, then the last ones, the newest first."""
        records = (*self._recent.running(), *reversed(list(self._recent)))
        return [record for record in records if wanted.admits(record)][:limit]

    def follow(self, wanted: RequestFilter, idle: float) -> AsyncGenerator[RequestRecord | None, None]:
        """Yields the requests that end from now on, and None after `idle` seconds without one."""
        return _chosen(self._recent.subscribe(idle=idle), wanted)

    def ended_after(self, number: int) -> tuple[int, list[RequestRecord]]:
        """Returns how many requests have ended, and the kept ones after the first `number`, the oldest first."""
        return self._recent.last, self._recent.after(number)

    def history(self) -> list[wire.HistoryStep]:
        """Returns the complete steps of the last hour, the oldest first."""
        return list(self._history)

    def latest_step(self) -> wire.HistoryStep | None:
        """Returns the last complete step with requests."""
        return self._history.latest()

    async def usage(self, by: Grouping, since: timedelta) -> list[wire.UsageTotals]:
        """Returns the sums since the day that is `since` ago. Raises as `Usage.sums`."""
        return await self._usage.sums(by, since)

    def cancel(self, request_id: str) -> None:
        """Ends a request under way; its client gets a `RequestCancelled`. Raises `RequestNotFound`."""
        exchange = self._recent.find(request_id)
        if exchange is None:
            raise RequestNotFound("no request with this ID is under way: `modelrunner requests` lists the requests")
        exchange.stop(RequestCancelled("the request was cancelled by `modelrunner requests cancel`"))

    async def write_usage(self) -> None:
        """Writes usage to the disk regularly until it is cancelled."""
        await self._usage.run()

    async def close(self) -> None:
        """Writes the usage of the last requests."""
        await self._usage.flush()

    async def count_events(self) -> None:
        """Counts the scheduler's events until it closes. The events of a burst that is too long for the feed are
        lost."""
        events = self._scheduler.events
        while not events.closed:
            async for event in events.subscribe():
                if event is not None:
                    self._events.add(event)


async def _chosen(
    records: AsyncGenerator[RequestRecord | None, None], wanted: RequestFilter
) -> AsyncGenerator[RequestRecord | None, None]:
    async with aclosing(records):
        async for record in records:
            if record is None or wanted.admits(record):
                yield record
