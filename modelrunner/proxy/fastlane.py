"""The fast lane: a client's connection as an `asyncio.Protocol`. Inference requests are read, sent on and answered in
callbacks; at the first request of any other kind the connection is handed to aiohttp for the rest of its life.
"""

import asyncio
from collections.abc import Callable

from modelrunner.errors import (
    BadRequest,
    HeadersTooLarge,
    MethodNotAllowed,
    ModelRunnerError,
    Unavailable,
)
from modelrunner.proxy.exchange import Exchange
from modelrunner.proxy.handover import HandedOver
from modelrunner.proxy.inference import Terms
from modelrunner.proxy.judge import Judge
from modelrunner.proxy.listener import Listener, hung_up, peer_of
from modelrunner.proxy.pipeline import Pipeline
from modelrunner.proxy.reading import IncomingBody
from modelrunner.proxy.render import Header, id_line, new_request_id
from modelrunner.proxy.routes import path_of
from modelrunner.proxy.severing import sever
from modelrunner.proxy.wire import cors, response_head

_LINGER = 5.0  # seconds for a refused client to stop sending, so that it gets to read why
_NEVER = float("inf")


class FastLane:
    """The protocol factory of a listening socket. `fallback` makes aiohttp's protocol for everything but inference."""

    def __init__(self, pipeline: Pipeline, fallback: Callable[[], asyncio.Protocol], *, local: bool) -> None:
        self.pipeline = pipeline
        self.fallback = fallback
        self.listener = Listener(pipeline.limits, local=local)
        self.judge = Judge(pipeline, local=local)

    def __call__(self) -> asyncio.Protocol:
        return ClientConnection(self)

    def drain(self) -> None:
        """Connections close as soon as they have nothing under way."""
        self.listener.drain()


def protocol_factory(pipeline: Pipeline, fallback: Callable[[], asyncio.Protocol], *, local: bool) -> FastLane:
    """`local` is True for the Unix socket."""
    return FastLane(pipeline, fallback, local=local)


class ClientConnection(asyncio.Protocol):
    """One client. At any moment it reads a head, reads a body, waits for its exchange, or lingers after a refusal; it
    is the sink of its exchange. Requests that come early wait in `_data`."""

    def __init__(self, lane: FastLane) -> None:
        self._lane = lane
        self._pipeline = lane.pipeline
        self._limits = lane.pipeline.limits
        self._local = lane.listener.local
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made, before all else
        self.peer = ""
        self._data = b""
        self._body: IncomingBody | None = None
        self._exchange: Exchange | None = None
        self._cors = cors(None)
        self._keep_alive = True
        self._deadline = _NEVER
        self._reading = True
        self._half_closed = False
        self._lingering = False
        self.takes_chunks = True

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports derive from nothing of asyncio's
        self.peer = peer_of(transport)
        self._deadline = self._loop.time() + self._limits.header_timeout
        if not self._lane.listener.enter(self) or self._lane.listener.draining:
            self._refuse(Unavailable("there are too many connections"), new_request_id())

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        if self._body is not None:
            self._read_body(self._body, data)
            return
        self._data = self._data + data if self._data else data
        if self._exchange is None:
            self._advance()
        elif len(self._data) > self._limits.pipelined:
            self._reading = False
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """On TCP a client that stops sending is taken to be gone; on the Unix socket it may wait for its answer."""
        if self._local:
            self._half_closed = True
            self._advance()
            return self._exchange is not None
        self._leave()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._lane.listener.leave(self)
        self._leave()

    def pause_writing(self) -> None:
        self._deadline = self._loop.time() + self._limits.write_stall
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self._deadline = _NEVER if self._exchange is not None else self._loop.time() + self._limits.idle
        if self._exchange is not None:
            self._exchange.resume()

    # Listener's side

    def check(self, now: float) -> None:
        if now > self._deadline or (
            (self._half_closed or not self._reading) and hung_up(self._transport, half=not self._local)
        ):
            self.abort()

    def due(self) -> float:
        return self._deadline if self._exchange is None else _NEVER

    def abort(self) -> None:
        self._leave()
        self._transport.abort()

    def drain(self) -> None:
        self._keep_alive = False
        if self._exchange is None and self._body is None and not self._data:
            self._transport.close()

    def _leave(self) -> None:
        """The client is gone, or is given up; so is what it sent ahead."""
        self._data = b""
        if self._exchange is not None:
            self._exchange.cancel()
            self._exchange = None
        if self._body is not None:
            self._pipeline.unbuffer(self._body.size)
            self._body = None

    # reading

    def _advance(self) -> None:
        """Takes requests from what was read, until one is under way or one is incomplete."""
        while self._data and self._exchange is None and self._body is None and not self._lingering:
            data = self._data
            if data[:2] == b"\r\n":  # RFC 9112, 2.2: one empty line before a request is forgiven
                data = data[2:]
            end = data.find(b"\r\n\r\n") + 4
            if end < 4 or end > self._limits.head:
                self._await_head(data)
                break
            self._read_head(data, end)
        if self._half_closed and self._exchange is None:  # what is missing will not come
            self._leave()
            self._transport.close()

    def _await_head(self, data: bytes) -> None:
        self._cors = cors(None)
        if len(data) > self._limits.head:
            self._refuse(HeadersTooLarge(f"the head is larger than {self._limits.head} bytes"), new_request_id())
        elif data.count(b"\n") != data.count(b"\r\n"):
            self._refuse(BadRequest("lines must end in CR LF"), new_request_id())
        else:
            self._deadline = min(self._deadline, self._loop.time() + self._limits.header_timeout)

    def _read_head(self, data: bytes, end: int) -> None:
        self._deadline = _NEVER
        self._keep_alive = False
        try:
            found = self._lane.judge.read(data[:end])
            if found is None:
                self._hand_over(data)
                return
            judged, length = found
            body = data[end : end + length]
            self._pipeline.buffer(len(body), length)
        except ModelRunnerError as error:
            ask_id, origin = self._lane.judge.who(data[:end])
            self._cors = cors(origin)
            self._refuse(error, ask_id, path_of(data))
            return
        self._cors = judged.cors
        self._keep_alive = judged.keep_alive and not self._lane.listener.draining
        self.takes_chunks = not judged.http_1_0
        if len(body) == length:
            self._data = data[end + length :]
            self._ask(judged.terms, body)
            return
        self._data = b""
        self._body = IncomingBody(judged.terms, length)
        if judged.expects:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._add_to_body(self._body, body)

    def _read_body(self, body: IncomingBody, data: bytes) -> None:
        missing = body.length - body.size
        self._data, data = data[missing:], data[:missing]
        try:
            self._pipeline.buffer(len(data), body.length)
        except ModelRunnerError as error:
            self._leave()
            self._refuse(error, body.terms.request_id or new_request_id(), body.terms.route.pattern)
            return
        self._add_to_body(body, data)

    def _add_to_body(self, body: IncomingBody, data: bytes) -> None:
        if not body.add(data):
            self._deadline = body.deadline(self._loop.time(), self._limits.body_idle)
            return
        self._deadline = _NEVER
        self._body = None
        self._ask(body.terms, body.whole())

    def _ask(self, terms: Terms, body: bytes) -> None:
        ask_id = terms.request_id or new_request_id()
        try:
            self._exchange = self._pipeline.exchange(terms, body, ask_id, self)
        except ModelRunnerError as error:
            self._pipeline.unbuffer(len(body))
            self._answer_error(error, ask_id, terms.route.pattern)
        else:
            self._exchange.start()

    def _hand_over(self, data: bytes) -> None:
        inner = HandedOver(self._lane.listener, self._transport, self._lane.fallback())
        self._lane.listener.replace(self, inner)
        self._data = b""
        self._lingering = True  # nothing comes here any more
        inner.take_over(data)

    # answering: the sink of the exchange

    def respond(self, status: int, headers: tuple[Header, ...], own: bytes, length: int | None, data: bytes) -> None:
        http_1_0 = not self.takes_chunks
        if length is None and http_1_0:
            self._keep_alive = False
        headers += self._cors
        head = response_head(status, headers, own, length, http_1_0, self._keep_alive)
        if not self._transport.is_closing():  # uvloop raises on one that broke and has not said so yet
            self._transport.write(head + data)

    def write(self, data: bytes) -> None:
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def finish(self) -> None:
        self._exchange = None
        now = self._loop.time()
        if not self._keep_alive or (self._half_closed and not self._data):
            self._deadline = now + self._limits.write_stall
            self._transport.close()
            return
        self._deadline = now + self._limits.idle
        if not self._reading and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()
        if self._data:
            self._loop.call_soon(self._advance)

    def cut(self) -> None:
        self._exchange = None
        self._deadline = self._loop.time() + self._limits.write_stall
        sever(self._transport)

    def _answer_error(self, error: ModelRunnerError, ask_id: str, path: str) -> None:
        headers, body = self._pipeline.refusal(error, ask_id, path)
        self.respond(error.status, headers, id_line(ask_id), len(body), body)
        self.finish()

    def _refuse(self, error: ModelRunnerError, ask_id: str, path: str = "") -> None:
        """Answers, and closes: where the next request would begin cannot be known, or is not worth the reading."""
        headers, body = self._pipeline.refusal(error, ask_id, path)
        if isinstance(error, MethodNotAllowed):
            headers += ((b"Allow", b"GET, HEAD, POST, PUT, DELETE, OPTIONS, PATCH"),)
        self._keep_alive = False
        self._data = b""
        self._lingering = True
        self._deadline = self._loop.time() + _LINGER
        self.respond(error.status, headers, id_line(ask_id), len(body), body)
        if not self._transport.is_closing():
            self._transport.write_eof()
