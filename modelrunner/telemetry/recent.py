"""The last requests, and those under way."""

import time
from collections.abc import Callable, Collection

import msgspec

from modelrunner.concurrency.feed import Feed
from modelrunner.gateway.exchange import Exchange
from modelrunner.gateway.observers import RequestRecord
from modelrunner.telemetry.tokens import NONE, Tokens

_KEPT = 1000


class RequestEntry(msgspec.Struct, frozen=True, gc=False):
    """A request that ended at `time` (Unix seconds) or, with the status 0, one under way since `time - duration`. The
    other fields are those of `RequestRecord`; bodies are not kept."""

    id: int
    time: float
    request_id: str
    family: str
    route: str
    status: int
    error: str
    model: str
    model_name: str
    backend: str
    runner: str
    caller: str
    queued: float
    loading: float
    first_byte: float | None
    duration: float
    bytes_in: int
    bytes_out: int
    tokens: Tokens


class RecentRequests(Feed[RequestEntry]):
    """The last 1,000 requests. `under_way` gives those that have not ended."""

    def __init__(
        self, under_way: Callable[[], Collection[Exchange]], kept: int = _KEPT, wall: Callable[[], float] = time.time
    ) -> None:
        super().__init__(1, kept)
        self._under_way = under_way
        self._wall = wall

    def take(self, record: RequestRecord, tokens: Tokens) -> None:
        self.add(self._entry(record, tokens, self.last + 1))

    def running(self) -> list[RequestEntry]:
        """The requests under way, the oldest first."""
        records = [msgspec.structs.replace(exchange.record(), status=0) for exchange in self._under_way()]
        entries = [self._entry(record, NONE, 0) for record in records]
        return sorted(entries, key=lambda entry: -entry.duration)

    def find(self, request_id: str) -> Exchange | None:
        """The request under way with this ID; the oldest one where clients gave the same ID to several."""
        found = [exchange for exchange in self._under_way() if exchange.ask.request_id == request_id]
        return min(found, key=lambda exchange: exchange.ask.arrived, default=None)

    def _entry(self, record: RequestRecord, tokens: Tokens, id: int) -> RequestEntry:
        return RequestEntry(
            id,
            self._wall(),
            record.request_id,
            record.family,
            record.route,
            record.status,
            record.error,
            record.model,
            record.model_name,
            record.backend,
            record.runner,
            record.caller,
            record.queued,
            record.loading,
            record.first_byte,
            record.duration,
            record.bytes_in,
            record.bytes_out,
            tokens,
        )
