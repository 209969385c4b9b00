"""A client's connection. It reads and admits every request, which an engine or aiohttp then answers."""

import asyncio
from collections.abc import Callable
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Protocol

from modelrunner.errors import HeadersTooLarge, MethodNotAllowed, ModelRunnerError
from modelrunner.gateway.calls import Fields, InferenceHead, client_of
from modelrunner.gateway.connection.admission import Admission, AdmittedHead
from modelrunner.gateway.connection.decode import LARGE, Decoding
from modelrunner.gateway.connection.handover import HandoverTransport
from modelrunner.gateway.headers import id_line, new_request_id
from modelrunner.gateway.request.pipeline import Pipeline
from modelrunner.gateway.request.waiting import fault
from modelrunner.gateway.uploads import RequestUpload
from modelrunner.http.answers import Header, cors
from modelrunner.http.listener import Listener, hung_up, peer_of, sever, unsent
from modelrunner.http.requests import (
    HTTP2_PREFACE,
    RequestBody,
    check_unfinished,
    http2_refusal,
    path_of,
)
from modelrunner.http.responses import part_length
from modelrunner.keys.allowances import network_of
from modelrunner.keys.ring import Scope

_LINGER = 5.0  # seconds for a refused client to stop sending, so that it can read the reason
_NEVER = float("inf")
_STATUS_LINES = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}


class Work(Protocol):
    """The work on one request: an exchange with an engine, a request in aiohttp, or the decoding of a large body."""

    def pause(self) -> None:
        """Called when the client reads no more for now. Safe to call again."""

    def resume(self) -> None: ...

    def cancel(self) -> None:
        """Called when the client is gone."""


class ClientConnection(asyncio.Protocol):
    """One client. The connection reads a head, then a body, then answers, one request after the other; after a refusal
    it lingers. Early requests wait in `_data`, and begin only when the client has accepted the answers before them: so
    one client's share of memory is bounded."""

    def __init__(
        self, pipeline: Pipeline, listener: Listener, admission: Admission, fallback: Callable[[], asyncio.Protocol]
    ) -> None:
        self._listener = listener
        self._limits = listener.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made, before all else
        self._pipeline, self._admission = pipeline, admission
        self._fallback = fallback
        self.peer = ""
        self._client = ""  # what the bodies count for
        self._data = b""
        self._admitted: AdmittedHead | None = None
        self._body: RequestBody | None = None  # an incomplete one
        self._head = b""  # of the last body that came in pieces
        self._pieces: list[bytes] = []  # of an inference request's body
        self._upload: RequestUpload | None = None  # in their place, for a body that passes
        self._deadline = _NEVER
        self._work: Work | None = None
        self.keep_alive = True  # the connection takes another request
        self.takes_chunks = True  # the client knows HTTP/1.1
        self._cors = cors(None)
        self._full = False  # the client reads no more for now
        self._unsent = 0  # bytes, at the last count
        self._taken_at = 0.0
        self._reading = True
        self._held = False  # aiohttp has paused the body
        self._half_closed = self._lingering = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports derive from nothing of asyncio's
        self.peer = peer_of(transport)
        self._deadline = self._loop.time() + self._limits.header_timeout
        if (refusal := self._listener.enter(self, transport)) is not None:
            self._refuse(refusal, new_request_id())

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            return
        if self._body is not None:
            self._read_body(self._body, data)
        else:
            self._data = self._data + data if self._data else data
            if self._work is None:
                self._advance()
        if self._data:
            self._regulate()

    def eof_received(self) -> bool:
        """On TCP a client that stops sending counts as gone; on the Unix socket it may wait for its answers."""
        if self._listener.local and self._body is None:
            self._half_closed = True
            self._advance()
            return self._work is not None or (bool(self._data) and not self._transport.is_closing())
        self._leave()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._listener.leave(self)
        self._leave()

    def pause_writing(self) -> None:
        self._full = True
        if self._work is not None:
            self._work.pause()
        self._listener.full(self, self._transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._full = False
        self._listener.flowing(self)
        if self._work is not None:
            self._work.resume()
        elif self._data:
            self._loop.call_soon(self._advance)

    # the listener's side

    def check(self, now: float) -> None:
        if (self._half_closed or not self._reading) and hung_up(self._transport, half=not self._listener.local):
            self.abort()
        elif self._waits_for_client():
            self._deadline = max(self._deadline, now + 2 * self._limits.check_every)  # its time begins after that
            if self._is_deaf(now):
                self.abort()
        elif now > self._deadline and not self._held:
            self.abort()

    def _waits_for_client(self) -> bool:
        """True while bytes wait that the client's machine has not accepted."""
        return self._transport.get_write_buffer_size() > 0

    def _is_deaf(self, now: float) -> bool:
        """Called repeatedly for a client with waiting bytes. Returns True once the client has accepted none of them for
        `write_stall` seconds. A slow reader may take as long as it likes."""
        waiting = unsent(self._transport)
        if waiting != self._unsent:
            self._unsent, self._taken_at = waiting, now
        return now > self._taken_at + self._limits.write_stall

    def abort(self) -> None:
        self._leave()
        self._transport.abort()

    def drain(self) -> None:
        self.keep_alive = False
        if self._work is None and self._body is None and not self._data:
            self._transport.close()

    def _leave(self) -> None:
        """Drops the client's work and the requests that it sent ahead: the client is gone, or too slow."""
        self._data = b""
        self._drop_body()
        work, self._work = self._work, None
        if work is not None:
            work.cancel()

    def _drop_body(self) -> None:
        in_flight, upload = self._pipeline.in_flight, self._upload
        in_flight.unbuffer(self._client, sum(map(len, self._pieces)))
        if upload is not None:
            in_flight.drop(self._client, upload)
        self._body, self._upload, self._pieces, self._held = None, None, [], False

    # reading

    def hold(self, held: bool) -> None:
        self._held = held and self._body is not None
        if self._body is not None:  # the client had to wait: its time begins anew
            self._deadline = self._loop.time() + self._limits.body_idle
        self._regulate()

    def _regulate(self) -> None:
        """Pauses reading while enough was read ahead or aiohttp has paused the body; resumes it after that."""
        early = len(self._data) > max(self._limits.pipelined, self._limits.head)
        reading = not early and not self._held
        if reading != self._reading and not self._transport.is_closing():
            self._reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _advance(self) -> None:
        """Takes the next request from the received data. The end of its answer calls this again."""
        if self._work is not None or self._body is not None or self._lingering or self._transport.is_closing():
            return
        data = self._data
        if self._full and data:
            return
        if data[:2] == b"\r\n":  # RFC 9112, 2.2: one empty line before a request is allowed
            data = data[2:]
        end = data.find(b"\r\n\r\n") + 4
        if 4 <= end <= self._limits.head:
            self._read_head(data, end)
        elif self._half_closed:  # the rest will not come
            self._leave()
            self._transport.close()
        elif data:
            self._await_head(data)

    def _await_head(self, data: bytes) -> None:
        self._cors = cors(None)
        try:
            if len(data) > self._limits.head:
                raise HeadersTooLarge(f"the head is larger than {self._limits.head} bytes")
            check_unfinished(data)
        except ModelRunnerError as error:
            self._refuse(error, new_request_id(), path_of(data))
        else:
            self._deadline = min(self._deadline, self._loop.time() + self._limits.header_timeout)

    def _read_head(self, data: bytes, end: int) -> None:
        self._deadline = _NEVER
        self.keep_alive = False
        try:
            admitted, length = self._admit(data[:end])
            inference = admitted.inference
            whole = not admitted.chunked and length <= len(data) - end  # as usual
            body = data[end : end + length] if whole and length > 0 else b""
            if inference is not None:
                if admitted.key is not None and not admitted.key.may_always_ask:
                    admitted.key.check(Scope.INFERENCE)
                self._client = client_of(inference, self.peer)
                if inference.route.uploads:
                    upload = RequestUpload(self._pipeline.spool, self.hold)
                    self._pipeline.in_flight.upload(self._client, 0, 0 if admitted.chunked else length, upload)
                    self._upload = upload
                else:
                    self._pipeline.in_flight.buffer(self._client, len(body), 0 if admitted.chunked else length)
        except ModelRunnerError as error:
            if data.startswith(HTTP2_PREFACE):
                self.write(http2_refusal("this server speaks HTTP/1.1 only"))
                self._linger()
                return
            ask_id, origin = self._admission.identify(data[:end])
            self._cors = cors(origin)
            self._refuse(error, ask_id, path_of(data), bare=data.startswith(b"HEAD "))
            return
        self._cors = admitted.cors
        self.keep_alive = admitted.keep_alive and not self._listener.draining
        self.takes_chunks = not admitted.line.http_1_0
        if whole and (inference is None or not inference.route.uploads):
            self._listener.busy(self)
            self._data = data[end + len(body) :]
            if inference is None:
                self._hand_over(admitted, data[:end], body)
            else:
                self._ask(inference, body)
        else:
            self._begin_body(admitted, None if admitted.chunked else max(length, 0), data[:end], data[end:])

    def _admit(self, head: bytes) -> tuple[AdmittedHead, int]:
        """Returns the admitted head and the length of its body in bytes, -1 for none. Raises `ModelRunnerError`."""
        before, after, length = part_length(head)
        self._admitted = admitted = self._admission.read(before, after, self._pipeline.access.generation)
        return admitted, admitted.length if length is None else length

    def _begin_body(self, admitted: AdmittedHead, length: int | None, head: bytes, data: bytes) -> None:
        self._data, self._head = b"", head
        self._body = body = RequestBody(length)
        if admitted.expects and self.takes_chunks and not body.done and not data:  # RFC 9110, 10.1.1: not for HTTP/1.0
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if admitted.inference is None:
            self._hand_over(admitted, head, None)
        self._read_body(body, data)

    def _read_body(self, body: RequestBody, data: bytes) -> None:
        admitted, work = self._admitted, self._work
        assert admitted is not None
        try:
            piece, rest = body.take(data)
            if admitted.inference is not None:
                whole = body.size if body.length is None else body.length
                if self._upload is not None:
                    self._pipeline.in_flight.upload(self._client, len(piece), whole, self._upload)
                    self._upload.add(piece)
                else:
                    self._pipeline.in_flight.buffer(self._client, len(piece), whole)
                    self._pieces.append(piece)
                if body.done and admitted.generation != self._pipeline.access.generation:
                    admitted, _ = self._admit(self._head)  # its key may have been revoked while the body came
                    upload = self._upload
                    self._count_for(admitted, body.size if upload is None else upload.held(upload.size))
        except ModelRunnerError as error:
            self._refuse_body(error, admitted)
            return
        if body.done:
            self._data, self._body, self._held = rest, None, False
            self._deadline = _NEVER
            self._listener.busy(self)
            if not self._reading:
                self._regulate()
        else:
            longest = self._limits.body_time if admitted.inference is not None else _NEVER
            self._deadline = body.deadline(self._loop.time(), self._limits.body_idle, longest)
            self._listener.idle(self)
        if isinstance(work, HandoverTransport):
            work.feed(piece, last=body.done)
        elif body.done and admitted.inference is not None:
            pieces, upload, self._pieces, self._upload = self._pieces, self._upload, [], None
            self._ask(admitted.inference, upload if upload is not None else b"".join(pieces))

    def _count_for(self, admitted: AdmittedHead, size: int) -> None:
        """Counts `size` bytes of the body for the client as it is now: keys may have been made or removed."""
        assert admitted.inference is not None
        in_flight, before, self._client = (
            self._pipeline.in_flight,
            self._client,
            client_of(admitted.inference, self.peer),
        )
        in_flight.unbuffer(before, size)
        in_flight.count(self._client, size)

    def _refuse_body(self, error: ModelRunnerError, admitted: AdmittedHead) -> None:
        if isinstance(self._work, HandoverTransport):
            if self._work.began:
                self.abort()
                return
            self._work.refused = True
        self._leave()
        self._refuse(error, admitted.request_id or new_request_id(), admitted.line.path)

    # the work

    def _ask(self, head: InferenceHead, body: bytes | RequestUpload, fields: Fields | Exception | None = None) -> None:
        """`fields` are those of a large body that was read, or the error of its reading."""
        pipeline = self._pipeline
        if fields is None and (isinstance(body, RequestUpload) or len(body) > LARGE):
            self._work = Decoding(
                body,
                partial(pipeline.read, head, body),
                lambda fields: self._ask(head, body, fields),
                partial(pipeline.in_flight.drop, self._client, body),
            )
            return
        ask_id = head.request_id or new_request_id()
        try:
            if isinstance(fields, Exception):
                raise fields
            self._work = exchange = pipeline.exchange(head, body, ask_id, self, fields, peer=self.peer)
        except Exception as raised:
            error = raised if isinstance(raised, ModelRunnerError) else fault(ask_id)
            pipeline.in_flight.drop(self._client, body)
            self._say_no(error, ask_id, head)
        else:
            exchange.start()

    def _say_no(self, error: ModelRunnerError, ask_id: str, head: InferenceHead) -> None:
        """Refuses one request. The connection stays open."""
        self._work = None  # the work is over: a client that leaves during this write got its answer
        headers, answer = self._pipeline.refusal(error, ask_id, head.route.pattern, head, self.peer)
        self.respond(error.status, headers, id_line(ask_id), len(answer), answer)
        self.finish()

    def _hand_over(self, admitted: AdmittedHead, head: bytes, body: bytes | None) -> None:
        """`body` is None if it still comes."""
        self.keep_alive = self.keep_alive and not admitted.line.http_1_0  # its answers may have no length
        key, in_flight = admitted.key, self._pipeline.in_flight
        client = key.key.name if key is not None else network_of(self.peer)
        self._work = work = HandoverTransport(
            self, admitted, self._fallback(), in_flight, client, local=self._listener.local
        )
        work.start(head, body)

    # the answer

    def respond(self, status: int, headers: tuple[Header, ...], own: bytes, length: int | None, data: bytes) -> None:
        """Writes a head and `data`. `headers` are fields that many answers share, `own` the lines of this answer alone.
        `length` is the size of the body in bytes; None means chunks, or for HTTP/1.0 a body that ends with the
        connection."""
        if length is not None:
            own += b"Content-Length: %d\r\n" % length
        elif self.takes_chunks:
            own += b"Transfer-Encoding: chunked\r\n"
        else:
            self.keep_alive = False
        start = _start(status, headers, self._cors, not self.takes_chunks, self.keep_alive)
        self.write(b"".join((start, self._listener.date, own, b"\r\n", data)))

    def write(self, data: bytes) -> None:
        # uvloop raises on a broken connection that it has not reported yet.
        if data and not self._transport.is_closing():
            self._transport.write(data)
            if self._full and self._work is not None:  # the client may have begun to read after `pause_writing`
                self._work.pause()

    # the end of an answer

    def finish(self, *, failed: bool = False) -> None:
        self._work = None
        if self._body is not None:  # the answer came before the end of the body, whose rest is not a request
            self._linger()
        elif not self.keep_alive or (self._half_closed and not self._data):
            self._deadline = self._loop.time() + self._limits.write_stall
            self._transport.close()
        else:
            self._deadline = self._listener.looked_at + self._limits.idle
            self._listener.idle(self)
            if self._data:
                self._loop.call_soon(self._advance)
            if not self._reading:
                self._regulate()

    def cut(self) -> None:
        self._work = None
        self._deadline = self._loop.time() + self._limits.write_stall
        sever(self._transport)

    def _refuse(self, error: ModelRunnerError, ask_id: str, path: str = "", *, bare: bool = False) -> None:
        """Answers and closes: the start of the next request is unknown, or the rest is not worth reading. A `bare`
        answer has no body, as HEAD wants it (RFC 9110, 9.3.2)."""
        headers, body = self._pipeline.refusal(error, ask_id, path, peer=self.peer)
        if isinstance(error, MethodNotAllowed):
            headers += ((b"Allow", b"GET, HEAD, POST, PUT, DELETE, OPTIONS, PATCH"),)
        self.keep_alive = False
        self.respond(error.status, headers, id_line(ask_id), len(body), b"" if bare else body)
        self._linger()

    def _linger(self) -> None:
        """Ends the sending side, and discards what still comes: closing at once could cost the client the answer."""
        self._data = b""
        self._drop_body()
        self._lingering = True
        self._listener.idle(self)
        self._deadline = self._loop.time() + _LINGER
        if not self._transport.is_closing():
            self._transport.write_eof()
            self._regulate()


@lru_cache(maxsize=256)
def _start(
    status: int, headers: tuple[Header, ...], more: tuple[Header, ...], http_1_0: bool, keep_alive: bool
) -> bytes:
    lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status]
    lines += [b"%b: %b\r\n" % header for header in headers + more]
    if not keep_alive:
        lines.append(b"Connection: close\r\n")
    elif http_1_0:
        lines.append(b"Connection: keep-alive\r\n")
    return b"".join(lines)
