"""The observer that hands each request to the counters, the recent requests, the usage and the keys' token limits."""

from collections.abc import Callable, Collection
from pathlib import Path

from modelrunner.gateway.exchange import Exchange
from modelrunner.gateway.observers import RequestRecord
from modelrunner.keys.ring import KeyRing
from modelrunner.scheduler import Scheduler
from modelrunner.telemetry.counters import EventCounters, RequestCounters
from modelrunner.telemetry.exposition import Exposition
from modelrunner.telemetry.history import History
from modelrunner.telemetry.recent import RecentRequests
from modelrunner.telemetry.tokens import NONE, tokens_of
from modelrunner.telemetry.usage import Usage


class Telemetry:
    """An `Observer`. `under_way` gives the requests that have not ended; `state` is the folder of the usage file."""

    tail = 1536  # bytes: the counts stand in the last event of a stream, or at the end of a plain answer

    def __init__(
        self, scheduler: Scheduler, under_way: Callable[[], Collection[Exchange]], state: Path, keys: KeyRing
    ) -> None:
        self._scheduler = scheduler
        self._keys = keys
        self._counters = RequestCounters()
        self._events = EventCounters()
        self.recent = RecentRequests(under_way)
        self.history = History()
        self.usage = Usage(state / "usage.sqlite")
        self.exposition = Exposition(scheduler, self._counters, self._events, lambda: len(under_way()))

    def finished(self, record: RequestRecord) -> None:
        tokens = tokens_of(record.tail) if record.tail and record.status == 200 else NONE
        self._counters.add(record, tokens)
        self.recent.take(record, tokens)
        self.history.take(record, tokens)
        self.usage.take(record, tokens)
        if record.key and (holder := self._keys.holder(record.key)) is not None:
            holder.spend(tokens.prompt + tokens.answer)

    async def count_events(self) -> None:
        """Counts the scheduler's events until it closes. A burst that is too long for the feed costs its events."""
        events = self._scheduler.events
        while not events.closed:
            async for event in events.subscribe():
                if event is not None:
                    self._events.add(event)
