"""The writing half of a client's connection: answers in order, at the pace of the client."""

import asyncio
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol

from modelrunner.http.answers import Header, cors
from modelrunner.http.listener import Listener, unsent

_STATUS_LINES = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}


class Work(Protocol):
    """The work on one request: an exchange with an engine, a request in aiohttp, or the decoding of a large body."""

    def pause(self) -> None:
        """Called when the client reads no more for now. Safe to call again."""

    def resume(self) -> None: ...

    def cancel(self) -> None:
        """Called when the client is gone."""


class Answers(asyncio.Protocol):
    """The base of a client's connection. It writes the answers of exchanges and of aiohttp; a subclass ends them.
    `keep_alive` is true if the connection takes another request, `takes_chunks` if its client knows HTTP/1.1."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._limits = listener.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made, before all else
        self.keep_alive = True
        self.takes_chunks = True
        self._cors = cors(None)
        self._work: Work | None = None
        self._full = False  # True while the client reads no more
        self._unsent = 0  # bytes, at the last count
        self._taken_at = 0.0

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

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_writing(self) -> None:
        self._full = True
        if self._work is not None:
            self._work.pause()

    def resume_writing(self) -> None:
        self._full = False
        if self._work is not None:
            self._work.resume()

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
