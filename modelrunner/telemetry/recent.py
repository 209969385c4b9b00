"""The last requests, and the requests under way."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from modelrunner.concurrency.feed import Feed
from modelrunner.gateway.request.observers import RequestRecord
from modelrunner.gateway.request.work import UnderWay

_KEPT = 1000


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """The requests for one `model`, by the name that the client wrote or by the model's own, and with one `status`.
    None stands for all."""

    model: str | None = None
    status: int | None = None

    def admits(self, record: RequestRecord) -> bool:
        return self.model in (None, record.model, record.served.model) and self.status in (None, record.status)


class RecentRequests(Feed[RequestRecord]):
    """The last 1,000 requests. `under_way` returns the requests that have not ended."""

    def __init__(self, under_way: Callable[[], Collection[UnderWay]]) -> None:
        super().__init__(1, _KEPT)
        self._under_way = under_way

    def running(self) -> list[RequestRecord]:
        """Returns the requests under way, the oldest first, with the status 0."""
        records = [msgspec.structs.replace(exchange.record(), status=0) for exchange in self._under_way()]
        return sorted(records, key=lambda record: -record.duration)

    def find(self, request_id: str) -> UnderWay | None:
        """Returns the request under way with this ID; the oldest one if clients gave several the same ID."""
        exchanges = [exchange for exchange in self._under_way() if exchange.ask.request_id == request_id]
        return min(exchanges, key=lambda exchange: exchange.ask.arrived, default=None)
