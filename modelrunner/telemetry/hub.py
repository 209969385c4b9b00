"""The observer that hands each request to the counters, the recent requests and the usage."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from modelrunner.gateway.interfaces import UnderWay
from modelrunner.gateway.observers import RequestRecord
from modelrunner.scheduler import Scheduler
from modelrunner.telemetry.counters import EventCounters, Labels, RequestCounters
from modelrunner.telemetry.exposition import Exposition
from modelrunner.telemetry.history import History
from modelrunner.telemetry.recent import RecentRequests
from modelrunner.telemetry.usage import Usage


class Telemetry:
    """An `Observer`. `under_way` gives the requests that have not ended; `state` is the folder of the usage file.
    `flush` is called before a look at what was counted."""

    def __init__(
        self,
        scheduler: Scheduler,
        under_way: Callable[[], Collection[UnderWay]],
        state: Path,
        flush: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._counters = RequestCounters()
        self._events = EventCounters()
        self.recent = RecentRequests(under_way)
        self.history = History()
        self.usage = Usage(state / "usage.sqlite")
        self.exposition = Exposition(scheduler, self._counters, self._events, lambda: len(under_way()))
        self.flush = flush

    def finished(self, records: Sequence[RequestRecord]) -> None:
        groups: dict[Labels, list[RequestRecord]] = {}
        for one in records:
            labels = one.family, one.model_name, one.backend, one.status, one.error, one.key, one.caller
            if labels in groups:
                groups[labels].append(one)
            else:
                groups[labels] = [one]
        for labels, alike in groups.items():
            self._counters.add(labels, alike)
            if alike[0].model_name:
                self.usage.add(alike[0].caller, alike[0].model_name, alike)
        self.recent.extend(records)
        self.history.take(records)

    async def count_events(self) -> None:
        """Counts the scheduler's events until it closes. A burst that is too long for the feed costs its events."""
        events = self._scheduler.events
        while not events.closed:
            async for event in events.subscribe():
                if event is not None:
                    self._events.add(event)
