"""Connections to one engine: HTTP/1.1 over its Unix socket or TCP port, also over TLS, one exchange at a time on each.

An answer is handed on as it arrives, through the callbacks of a `Receiver`; nothing here waits, so that a warm request
costs no task. The answer's head is parsed by llhttp and held back until the first byte of the body, so that an engine
that dies before its first token has answered nothing. A chunked body is checked by llhttp and handed on byte for byte
with its framing (or without it, for a receiver that wants the bare body).
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import lru_cache

import httptools

from modelrunner.engine.receivers import Collector, Receiver
from modelrunner.errors import EngineProtocolError
from modelrunner.http.responsebodies import Body, CloseDelimitedBody, is_empty, is_last_event
from modelrunner.http.responses import ResponseHead, ResponseHeads
from modelrunner.processes import peers
from modelrunner.types import Endpoint

_MOST_INTERIM = 16  # interim answers (1xx) before an answer
_DIALING = 30.0  # seconds for a connection, with its TLS
_PROBES = {
    getattr(socket, option): value
    for option, value in {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}.items()
    if hasattr(socket, option)
}
"""When a silent peer is asked for a sign of life: seconds, and how often."""
_MOST_IDLE = 64
_HEARS_NOTHING = 0.5  # seconds after which an engine that goes on sending to nobody is hung up on
_PIECES_AT_ONCE = 4  # of a body that is sent in pieces, before other work has its turn


class UpstreamPool:
    """The connections to `endpoint`. At most `_MOST_IDLE` are kept open without an exchange. `begun` counts exchanges,
    `waiting` is how many are under way."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.move(endpoint)
        self.begun = 0
        self._answered = 0  # of heads, and of bodies that are over
        self._idle: list[UpstreamConnection] = []
        self._open: set[UpstreamConnection] = set()
        self._closed = False
        self._heads = ResponseHeads()

    def __repr__(self) -> str:
        return f"<UpstreamPool {self.endpoint}, {len(self._open)} open, {len(self._idle)} idle>"

    @property
    def waiting(self) -> int:
        return len(self._open) - len(self._idle)

    @property
    def answered(self) -> int:
        """A number that grows with every byte of a body, and every head, that comes with a status below 500."""
        return self._answered + sum([connection.good_bytes for connection in self._open])

    def move(self, endpoint: Endpoint) -> None:
        """Opens the next connections to `endpoint`."""
        self.endpoint = endpoint
        self._preamble = endpoint.preamble.encode("ascii")

    def request(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: bytes = b"",
        *,
        content_type: str = "application/json",
        size: int | None = None,
    ) -> bytes:
        """Returns a request for `send`, in the form that every engine accepts. `headers` are whole lines, each ended by
        CRLF. `size` is that of the whole body in bytes, for one that is sent in pieces after `body`."""
        start = _request_start(method, path, content_type, self._preamble, self.endpoint.base)
        return b"%bContent-Length: %d\r\n%b\r\n%b" % (start, len(body) if size is None else size, headers, body)

    def send(
        self, request: bytes, receiver: Receiver, *, fresh: bool = False, rest: Iterator[bytes] | None = None
    ) -> "UpstreamConnection":
        """Sends a request on an idle connection, or on a new one (always with `fresh`). `rest` has the bytes of its
        body that `request` lacks: each piece is taken as soon as the engine takes more, so that few are in memory. It
        may raise `OSError`. Never raises: a failure goes to the receiver."""
        self.begun += 1
        while self._idle and not fresh:
            connection = self._idle.pop()
            transport = connection._transport
            if transport is not None and not transport.is_closing():  # uvloop's raise once they are closing
                connection.reused = True
                connection.start(request, receiver, rest)
                return connection
        connection = UpstreamConnection(self)
        self._open.add(connection)
        connection.dial(self.endpoint)
        connection.start(request, receiver, rest)
        return connection

    async def fetch(self, method: str, path: str, body: bytes = b"", *, timeout: float) -> tuple[int, bytes]:
        """One small control exchange on a connection of its own: status and body. `timeout` in seconds is for all of
        it. Raises `OSError`, `TimeoutError` or `EngineProtocolError`."""
        receiver = Collector()
        connection = self.send(self.request(method, path, body), receiver, fresh=True)
        connection.once = True  # else another request could have it before the `abort` below
        try:
            async with asyncio.timeout(timeout):
                return await receiver.done
        finally:
            connection.abort()

    def close(self) -> None:
        """Closes every connection; an exchange under way fails with `ConnectionAbortedError`."""
        self._closed = True
        for connection in list(self._open):
            connection.fail(ConnectionAbortedError("the connections to the engine were closed"))

    def _forget(self, connection: "UpstreamConnection") -> None:
        if connection in self._open:
            self._open.remove(connection)
            self._answered += connection.good_bytes
        if connection in self._idle:
            self._idle.remove(connection)


@lru_cache(maxsize=64)
def _request_start(method: str, path: str, content_type: str, preamble: bytes, base: str) -> bytes:
    if path.startswith("/v1/"):
        path = base + path.removeprefix("/v1")
    return b"%b%bContent-Type: %b\r\n" % (
        f"{method} {path} HTTP/1.1\r\n".encode("latin-1"),
        preamble,
        content_type.encode("latin-1"),
    )


def unreachable(endpoint: Endpoint, error: OSError) -> ConnectionError:
    """Returns the error of a connection that was not made, in a sentence."""
    match error:
        case TimeoutError():
            why = f"it did not answer within {_DIALING:g} seconds"
        case ssl.SSLCertVerificationError():
            why = f"its certificate is not trusted ({error.verify_message})"
        case ssl.SSLError():
            why = f"TLS failed ({error.reason})"
        case _:
            why = error.strerror or str(error)
    return ConnectionError(f"{endpoint} cannot be reached: {why}")


def _notice_death(connection: socket.socket) -> None:
    """Lets the connection fail within a minute if the peer's machine, or the way to it, is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class UpstreamConnection(asyncio.Protocol):
    """One connection, and the exchange on it. `reused` says that it had served before this exchange; `answered` that a
    byte of the answer was seen; `begun` that the answer's head was handed on; `once` that it serves no
    other exchange."""

    # Of the exchange; `start` sets them.
    _receiver: Receiver | None
    _held_back: tuple[ResponseHead, int | None, bytes] | None
    _interim: int
    answered: bool
    begun: bool

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._dialing: asyncio.Task[None] | None = None
        self._request = b""
        self._rest: Iterator[bytes] | None = None  # what is still to be sent
        self._full = False  # the engine takes no more for now
        self._sends_soon = False  # `_send_rest` will be called
        self._head = b""  # what came of an unfinished head
        self._body: Body | None = None
        self._flowing: Body | None = None  # the body, while it goes to the receiver as it comes
        self._events = False  # the answer is an event stream
        self._paused = self._keep = False
        self._fault = False  # the answer is an error of the engine's own
        self._done: Callable[[], None] | None = None  # waits for the end of an exchange that was left
        self._left_at = 0.0
        self.reused = self.once = False

    def dial(self, endpoint: Endpoint) -> None:
        self._dialing = asyncio.get_running_loop().create_task(self._dial(endpoint))

    async def _dial(self, endpoint: Endpoint) -> None:
        loop = asyncio.get_running_loop()
        tls, name = endpoint.tls, endpoint.tls_name
        try:
            async with asyncio.timeout(_DIALING):
                if endpoint.path is not None:
                    await loop.create_unix_connection(lambda: self, str(endpoint.path), ssl=tls, server_hostname=name)
                elif endpoint.host is not None and endpoint.port is not None:
                    host, port = endpoint.host, endpoint.port
                    await loop.create_connection(lambda: self, host, port, ssl=tls, server_hostname=name)
        except OSError as error:
            self._dialing = None
            self.fail(error if endpoint.path is not None else unreachable(endpoint, error))
        self._dialing = None

    def start(self, request: bytes, receiver: Receiver, rest: Iterator[bytes] | None = None) -> None:
        """Begins an exchange. The connection must have none."""
        self._receiver = receiver
        self._rest = rest
        if self._body is not None:
            self._pool._answered += self.good_bytes
            self._body = None
        self._held_back = None
        self._interim = 0
        self.answered = self.begun = False
        if self._transport is None:
            self._request = request
        else:
            self._transport.write(request)
            if rest is not None:
                self._send_rest_soon()  # a failure comes after `UpstreamPool.send`

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._rest is not None:
            self._send_rest_soon()

    def _send_rest_soon(self) -> None:
        if not self._sends_soon:
            self._sends_soon = True
            asyncio.get_running_loop().call_soon(self._send_rest)

    def _send_rest(self) -> None:
        """Sends few pieces at a time: uvloop keeps what it wrote until the loop goes on, and does not count it."""
        self._sends_soon = False
        try:
            for _ in range(_PIECES_AT_ONCE):
                if self._rest is None or self._full or self._transport is None:
                    return
                if (piece := next(self._rest, None)) is None:
                    self._rest = None
                else:
                    self._transport.write(piece)
        except OSError as error:
            self.fail(error)
        else:
            self._send_rest_soon()

    def pause(self) -> None:
        """Takes no more of the answer until `resume`. Safe to call again, and before the connection is open."""
        if not self._paused:
            self._paused = True
            if self._transport is not None and not self._transport.is_closing():
                self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()

    def abort(self) -> None:
        """Closes the connection at once. The receiver hears nothing more."""
        self._receiver = self._flowing = self._rest = None
        self._pool._forget(self)
        if self._dialing is not None:
            self._dialing.cancel()
        if self._transport is not None:
            self._transport.abort()
        if self._done is not None:
            done, self._done = self._done, None
            done()

    def leave(self, done: Callable[[], None]) -> bool:
        """Half-closes the connection, which engines take for a client that left, drops what still comes, and calls
        `done` once the engine has closed its end: it is through with the request then. The receiver hears nothing more.
        A connection over TLS cannot be half-closed: it is closed, and `done` called at once. Returns False, and closes
        at once, if the engine has not got the whole request."""
        transport, self._receiver, self._flowing = self._transport, None, None
        if transport is None or transport.is_closing() or transport.get_write_buffer_size() or self._rest is not None:
            self.abort()
            return False
        self._done, self._left_at = done, asyncio.get_running_loop().time()
        if not transport.can_write_eof():
            self.abort()
            return True
        self.resume()
        transport.write_eof()
        return True

    def at_event_boundary(self) -> bool:
        """For `on_failure`: True if another server-sent event could follow what was handed on: an event stream, up to
        the end of an event and of a chunk."""
        return self._body is not None and self._events and self._body.at_event_boundary()

    def has_last_event(self) -> bool:
        """True if the last event of an event stream was handed on."""
        return self._body is not None and self._events and is_last_event(self._body.tail)

    @property
    def received(self) -> tuple[int, bytes]:
        """The bytes of the body so far and the last of them (`Body.tail`), with the framing of chunks where the
        receiver gets it; 0 and b"" for a body that came in one piece with its head."""
        return (self._body.size, self._body.tail) if self._body is not None else (0, b"")

    @property
    def good_bytes(self) -> int:
        """The bytes of the body so far; 0 for an error of the engine's own."""
        return self._body.size if self._body is not None and not self._fault else 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are not asyncio.Transport
        endpoint, connected = self._pool.endpoint, transport.get_extra_info("socket")
        if endpoint.path is None:
            _notice_death(connected)
        if self._receiver is None:
            self._transport.abort()  # type: ignore[union-attr]
        elif endpoint.path is not None and peers.is_another(connected, endpoint.path):
            self.fail(EngineProtocolError("another program listens on the engine's socket, and got nothing"))
        elif endpoint.refuses is not None and (why := endpoint.refuses(transport.get_extra_info("peername")[0])):
            self.fail(EngineProtocolError(why))
        else:
            self._transport.write(self._request)  # type: ignore[union-attr]
            self._send_rest()
            if self._paused:
                self._transport.pause_reading()  # type: ignore[union-attr]
        self._request = b""

    def data_received(self, data: bytes) -> None:
        try:
            if (body := self._flowing) is not None:  # a chunk of a stream costs just this
                self._receiver.on_data(body.take(data))  # type: ignore[union-attr]  # there is one while it flows
                if body.done:
                    self._finish()
            elif (receiver := self._receiver) is None:
                self._drop()
            elif self._body is None:
                self.answered = True
                self._read_head(receiver, data)
            else:
                self._hand_on(receiver, self._body, self._body.take(data))
        except httptools.HttpParserError as error:
            self.fail(EngineProtocolError(f"the engine's answer is not HTTP: {error}"))
        except EngineProtocolError as error:
            self.fail(error)

    def _drop(self) -> None:
        """Takes bytes that nobody asked for, or waits for any more."""
        if self._done is None or asyncio.get_running_loop().time() > self._left_at + _HEARS_NOTHING:
            self.abort()

    def eof_received(self) -> None:
        receiver, body = self._receiver, self._body
        if receiver is not None and isinstance(body, CloseDelimitedBody):
            try:
                self._hand_on(receiver, body, body.end())
            except EngineProtocolError as error:
                self.fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._receiver is None and self._done is None:  # nobody would hear of an error
            self._pool._forget(self)
            return
        when = "in the middle of its answer" if self.answered else "without an answer"
        self.fail(ConnectionResetError(f"the engine closed the connection {when}"))

    def fail(self, error: OSError | EngineProtocolError) -> None:
        """Closes the connection and tells the receiver."""
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.on_failure(error)

    def _read_head(self, receiver: Receiver, data: bytes) -> None:
        data = self._head + data if self._head else data
        while True:
            head, length, end = self._pool._heads.read(data)
            if head is None:
                self._head = data
                return
            data = data[end:]
            if head.status >= 200:
                break
            self._interim += 1
            if self._interim > _MOST_INTERIM:
                raise EngineProtocolError("the engine sent interim answers without end")
        self._head = b""
        self._keep = head.keep_alive
        self._fault = head.status >= 500
        if not self._fault:
            self._pool._answered += 1
        if length == len(data):  # all of it in one piece, as short answers come
            self.begun = True
            receiver.on_head(head.status, head.fields, length, data)
            self._finish()
            return
        self._events = head.kind == b"text/event-stream"
        self._body = body = head.body(length, splice=receiver.splices(head.status, head.kind))
        self._held_back = (head, length, b"")
        self._hand_on(receiver, body, body.take(data))

    def _hand_on(self, receiver: Receiver, body: Body, data: bytes) -> None:
        if self._held_back is None:
            receiver.on_data(data)
        else:
            head, length, before = self._held_back
            data, empty = before + data, is_empty(body)
            if empty and not body.done:
                self._held_back = head, length, data
                return
            self._held_back = None
            self.begun = True
            self._flowing = body
            if empty:
                length, data = 0, b""
            receiver.on_head(head.status, head.fields, length, data)
        if body.done:
            self._finish()

    def _finish(self) -> None:
        """Ends the exchange after its last byte. The connection is used again. llama-server closes it after a stream,
        although its head promises to keep it: a request that is sent before this is seen gets lost at once."""
        receiver, self._receiver, self._flowing = self._receiver, None, None
        if receiver is None:  # it left while it took the last bytes
            return
        idle = self._pool._idle
        if self._paused:  # the receiver paused it for its own client, and has all it wanted
            self.resume()
        if self._rest is not None:  # the engine answered before it had the whole request
            self._keep = False
        if self._keep and not self.once and len(idle) < _MOST_IDLE and not self._pool._closed:
            idle.append(self)
        else:
            self.abort()
        receiver.on_end()
