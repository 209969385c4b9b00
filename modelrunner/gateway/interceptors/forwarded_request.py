"""A client's request that another request answers, or a kept answer."""

from time import perf_counter
from typing import Protocol

import msgspec

from modelrunner.errors import ModelRunnerError
from modelrunner.gateway.calls import Inference, Sink
from modelrunner.gateway.headers import chunk, id_line, server_timing
from modelrunner.gateway.request.exchange import Exchange, Exchanges
from modelrunner.gateway.request.observers import LEFT, RequestRecord, record_of
from modelrunner.gateway.request.tokens import NONE, Tokens
from modelrunner.http.answers import Header
from modelrunner.scheduler import Lease
from modelrunner.types import Served


def served_by(lease: Lease) -> Served:
    """Returns the names of the model and of its backend, for a request that shares the answer of another request."""
    return Served(lease.served.model, lease.served.backend)


class AnswerSource(Protocol):
    """Gives requests their answers. A request that was left or has ended gets nothing more."""

    def begin(self, request: "ForwardedRequest") -> None: ...

    def pause(self, request: "ForwardedRequest") -> None:
        """Called when the client reads no more for now. Safe to call again."""

    def resume(self, request: "ForwardedRequest") -> None: ...

    def leave(self, request: "ForwardedRequest") -> None:
        """Called when the client is gone."""

    def is_between_events(self) -> bool:
        """As `Exchange.is_between_events`, for what the requests have."""


class ForwardedRequest:
    """Works like an `Exchange`, with an answer from `source`. `headers` are added to the answer's. The request counts
    and records the request, unless the exchange `counted_by`, which the source makes for it, does. `lease` and `tokens`
    go into the record; `served` names the model and the backend of a request without a lease."""

    def __init__(
        self,
        exchanges: Exchanges,
        ask: Inference,
        sink: Sink,
        source: AnswerSource,
        *,
        headers: tuple[Header, ...] = (),
        counted_by: Exchange | None = None,
    ) -> None:
        self._exchanges = exchanges
        self.ask = ask
        self._sink = sink
        self._source = source
        self._headers = headers
        self._counted_by = counted_by
        self._alone: Exchange | None = None
        self._error: ModelRunnerError | None = None
        self._status = 0
        self._framing = self._over = False
        self.lease: Lease | None = None
        self.served = Served()
        self.tokens: Tokens = NONE

    def start(self) -> None:
        """Begins the work. Called once."""
        if self._counted_by is None:
            self._exchanges.in_flight.running.add(self)
        self._source.begin(self)

    def pause(self) -> None:
        if self._alone is not None:
            self._alone.pause()
        elif not self._over:
            self._source.pause(self)

    def resume(self) -> None:
        if self._alone is not None:
            self._alone.resume()
        elif not self._over:
            self._source.resume(self)

    def cancel(self) -> None:
        """Called when the client is gone."""
        if self._alone is not None:
            self._alone.cancel()
        elif not self._over:
            self._status, self._over = LEFT, True
            self._source.leave(self)
            self._close()

    def stop(self, error: ModelRunnerError) -> None:
        """Ends the request with an error, whatever it is doing."""
        if self._alone is not None:
            self._alone.stop(error)
        elif not self._over:
            between = self._source.is_between_events()
            self._source.leave(self)
            self._refuse(error, between_events=between)

    def record(self) -> RequestRecord:
        if self._alone is not None:
            return self._alone.record()
        if self._counted_by is not None:  # it goes on where this client has left
            return msgspec.structs.replace(self._counted_by.record(), status=self._status)
        error = self._error.code if self._error is not None else ""
        record = record_of(self.ask, self.lease, self._status, error, 0.0, 0, self.tokens)
        if self.lease is None and self.served.model:
            return msgspec.structs.replace(record, served=self.served)
        return record

    def go_alone(self) -> None:
        """Called when the source has no answer: the request gets an exchange of its own."""
        self._exchanges.in_flight.running.discard(self)
        self._alone = Exchange(self._exchanges, self.ask, self._sink)
        self._alone.start()

    # for the source

    def respond(
        self, status: int, headers: tuple[Header, ...], length: int | None, data: bytes, own: bytes = b""
    ) -> None:
        """As `Sink.respond`, for a body without framing. The lines `own` are made here unless they are given."""
        self._status = status
        self._framing = length is None and self._sink.takes_chunks
        waited = perf_counter() - self.ask.arrived
        own = own or id_line(self.ask.request_id) + server_timing(waited, 0.0, 0.0)
        self._sink.respond(status, (*headers, *self._headers), own, length, self._framed(data))

    def write(self, data: bytes) -> None:
        self._sink.write(self._framed(data))

    def finish(self, *, failed: bool = False) -> None:
        """As `Sink.finish`."""
        if self._framing:
            self._sink.write(b"0\r\n\r\n")
        self._close()
        self._sink.finish(failed=failed)

    def cut(self) -> None:
        self._close()
        self._sink.cut()

    def _refuse(self, error: ModelRunnerError, *, between_events: bool) -> None:
        """Ends with an error: as its status or, if the head of a stream is out, as its last event where one can
        stand."""
        dialect, request_id = self.ask.head.route.dialect, self.ask.request_id
        self._error = error
        if self._status:
            if between_events:
                self.write(dialect.error_event(error, request_id))
                self.finish(failed=True)
            else:
                self.cut()
            return
        headers, body = dialect.error(error, request_id)
        self.respond(error.status, headers, len(body), body)
        self.finish()

    def _framed(self, data: bytes) -> bytes:
        return chunk(data) if self._framing and data else data

    def _close(self) -> None:
        self._over = True
        if self._counted_by is None:
            self._exchanges.in_flight.end(self, is_told=True)
