"""The record of a finished request for observers: metrics, recording, usage, and the access log."""

import logging
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import msgspec

from modelrunner.errors import ModelRunnerError
from modelrunner.gateway.interfaces import Inference

if TYPE_CHECKING:
    from modelrunner.scheduler import Lease

log = logging.getLogger("modelrunner.access")


class RequestRecord(msgspec.Struct, frozen=True, gc=False):
    """One request. Times are in seconds since it arrived: `queued` and `loading` are how long it waited and how much of
    that was a load, `first_byte` when the first byte of the engine's answer came (None without one), `duration` the
    whole. Sizes are in bytes of the bodies; `bytes_out` counts what came from the engine.

    `route` is the client's path with `{backend}` or `{runner}` for a name, `family` the API's. `status` is 499 for a
    client that left; `error` is the code of the error, "" without one. `model` is the name that the client wrote,
    `model_name` that of the model that the runner serves, "" without a runner; `key` is the name
    of the API key, "" without one. `tail` is the end of the
    engine's answer, as long as the observers asked for. A request that was refused before its body was read has no
    `model` and no `caller`."""

    request_id: str
    family: str
    route: str
    status: int
    error: str = ""
    model: str = ""
    model_name: str = ""
    backend: str = ""
    runner: str = ""
    caller: str = ""
    key: str = ""
    queued: float = 0.0
    loading: float = 0.0
    first_byte: float | None = None
    duration: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    tail: bytes = b""


class Observer(Protocol):
    """An observer gets the record of every request. It is called from the event loop, so it must not wait. Exceptions
    are logged."""

    tail: int
    """How many bytes of the end of each answer the observer gets: 0 for none."""

    def finished(self, record: RequestRecord) -> None: ...


class Meter:
    """Measures an answer on its way from the engine, and keeps its last `limit` bytes. There is one only if there is an
    observer."""

    def __init__(self, tail: int) -> None:
        self.first_byte: float | None = None
        self.size = 0
        self.limit = tail
        self._tail = bytearray()

    @property
    def tail(self) -> bytes:
        return bytes(self._tail)

    def add(self, data: bytes) -> None:
        if self.first_byte is None and data:
            self.first_byte = perf_counter()
        self.size += len(data)
        if self.limit:
            self._tail += data[-self.limit :]
            del self._tail[: -self.limit]


def record_of(
    ask: Inference, lease: "Lease | None", meter: Meter, status: int, error: ModelRunnerError | None
) -> RequestRecord:
    """Makes the record of a finished exchange. `lease` is the last lease of the exchange."""
    route, key = ask.terms.route, lease.runner.key if lease is not None else None
    return RequestRecord(
        request_id=ask.request_id,
        family=route.dialect.name,
        route=route.pattern,
        status=status,
        error=error.code if error is not None else "",
        model=ask.fields.model,
        model_name=lease.runner.spec.bundle.name if lease is not None else "",
        backend=key.backend if key is not None else route.backend or "",
        runner=lease.runner.id if lease is not None else "",
        caller=ask.terms.caller,
        key=ask.terms.key_name,
        queued=lease.waited - lease.loaded if lease is not None else 0.0,
        loading=lease.loaded if lease is not None else 0.0,
        first_byte=meter.first_byte - ask.arrived if meter.first_byte is not None else None,
        duration=perf_counter() - ask.arrived,
        bytes_in=len(ask.body),
        bytes_out=meter.size,
        tail=meter.tail,
    )


class AccessLog:
    """Logs a line for each request, at the level debug."""

    tail = 0

    def finished(self, record: RequestRecord) -> None:
        model, error = ascii(record.model), f" {record.error}" if record.error else ""
        log.debug("%s %s %s %d %.3fs%s", record.request_id, record.route, model, record.status, record.duration, error)
