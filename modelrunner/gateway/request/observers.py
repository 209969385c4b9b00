"""The record of a finished request for observers: metrics, recording, usage, and the access log."""

import logging
from time import perf_counter, time
from typing import Any, Protocol

import msgspec

from modelrunner.gateway.calls import Inference, Labels
from modelrunner.gateway.request.tokens import NONE, Tokens
from modelrunner.gateway.request.trace_context import Trace
from modelrunner.scheduler import Lease
from modelrunner.types import Served

log = logging.getLogger(__name__)

CONTROL = "control"
"""The family of requests that ask no model."""
_LONGEST = 640  # characters: no model has a longer name, and no route a longer path


_NOBODY = Served()
LEFT = 499
"""The status of a request whose client left."""


class RequestRecord(msgspec.Struct, frozen=True, gc=False):
    """One request, which ended at `time` in Unix seconds. Other times are in seconds since it arrived: `queued` and
    `loading` are how long it waited and how much of that was a load, `first_byte` when the first byte of the engine's
    answer came (None without one), `duration` the whole. Sizes are in bytes of the bodies; `bytes_out` counts what came
    from the engine, with the framing of chunks that passed unchanged.

    `status` is `LEFT` for a client that left; `error` is the code of the error, "" without one. `model` is the name
    that the client wrote; a request that gets no exchange has none. `served` is the runner's, `peer` the client's
    address, "" on the Unix socket. What clients write is `shortened`: records are kept, and written to logs."""

    request_id: str
    labels: Labels
    status: int
    error: str = ""
    model: str = ""
    served: Served = _NOBODY
    queued: float = 0.0
    loading: float = 0.0
    first_byte: float | None = None
    duration: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    tokens: Tokens = NONE
    time: float = 0.0
    peer: str = ""
    trace: Trace | None = None

    def flat(self) -> dict[str, Any]:
        """Returns the fields by their names, with those of `labels` and `served` in their place."""
        fields = msgspec.structs.asdict(self)
        del fields["labels"], fields["served"]
        served = {"model_name": self.served.model, "backend": self.served.backend, "runner": self.served.runner}
        return {**fields, **msgspec.structs.asdict(self.labels), **served}


class Observer(Protocol):
    """An observer gets the record of every request. It is called from the event loop, so it must not wait. Exceptions
    are logged."""

    def finished(self, record: RequestRecord) -> None:
        """Called once for each request, when it has ended."""


class Observers:
    """Tells the observers of each request that has ended. `active` is true with an observer."""

    def __init__(self) -> None:
        self.active = False
        self._observers: tuple[Observer, ...] = ()

    def __contains__(self, observer: Observer) -> bool:
        return observer in self._observers

    def add(self, observer: Observer) -> None:
        """Adds an observer, which gets the record of every later request. Safe to call again."""
        if observer not in self._observers:
            self._observers = (*self._observers, observer)
        self.active = True

    def remove(self, observer: Observer) -> None:
        self._observers = tuple(other for other in self._observers if other is not observer)
        self.active = bool(self._observers)

    def tell(self, record: RequestRecord) -> None:
        for observer in self._observers:
            try:
                observer.finished(record)
            except Exception:  # an observer's fault is not the requests'
                log.exception("%s failed", type(observer).__name__)


def shortened(text: str) -> str:
    """What a record keeps of a text from a client, which may have megabytes."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def record_of(
    ask: Inference,
    lease: Lease | None,
    status: int,
    error: str,
    first_byte: float,
    bytes_out: int,
    tokens: Tokens,
    trace: Trace | None = None,
) -> RequestRecord:
    """Makes the record of an exchange. `lease` is the last lease of the exchange; `first_byte` is in seconds of
    `perf_counter`, 0 without one."""
    head, model, queued, loading = ask.head, ask.fields.model, 0.0, 0.0
    if lease is not None:
        served = lease.served
        if lease.waited:  # else it shares its zeros with all others: a float for each is one more to free when cold
            queued, loading = lease.waited - lease.loaded, lease.loaded
    else:
        model, backend = shortened(model), head.route.backend
        served = Served("", backend) if backend else _NOBODY
    arrived = ask.arrived
    return RequestRecord(
        ask.request_id,
        head.labels,
        status,
        error,
        model,
        served,
        queued,
        loading,
        first_byte - arrived if first_byte else None,
        perf_counter() - arrived,
        ask.size,
        bytes_out,
        tokens,
        time(),
        ask.peer,
        trace,
    )
