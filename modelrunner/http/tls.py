"""TLS between a client's connection and its socket. It works on bytes in memory, so the connection behaves as without
TLS: half-closes, resets, waiting bytes and time limits are those of its socket."""

import asyncio
import logging
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from modelrunner.http.listener import peer_of

log = logging.getLogger(__name__)

_RECORD = 1 << 16  # bytes that one read asks for
_HELLO = 1 << 16  # the most bytes of an unfinished handshake, as of a head
_REPLIES = 1 << 16  # the most bytes of alerts and handshakes for a client that reads nothing
_HANDSHAKE = b"\x16"  # the type of a client's first record: RFC 8446, 5.1
_NO_TLS = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: 38\r\n\r\n"
    b"this port speaks TLS: ask for https://"
)
ContextOf = Callable[[], ssl.SSLContext]


class TlsConnection(asyncio.Transport, asyncio.Protocol):
    """The protocol of the socket, and the transport of the connection `inner`, whose time limits include the handshake.
    `context` returns the current TLS context."""

    def __init__(self, context: ContextOf, inner: asyncio.Protocol) -> None:
        super().__init__()
        self._inner = inner
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context().wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._socket: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made
        self._begun = self._shaken = self._ends = self._ended = self._closed = False
        self._received = 0  # bytes before the end of the handshake
        self._full = False  # True while the client reads no more
        self._replies = 0  # bytes of alerts and handshakes meanwhile
        self._early: list[bytes] = []  # written before the end of the handshake

    # asyncio.Protocol: the socket's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = transport  # type: ignore[assignment]  # uvloop's transports derive from nothing of asyncio's
        self._inner.connection_made(self)

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        if not self._begun and data[:1] != _HANDSHAKE:
            self._refuse()
            return
        self._begun = True
        self._incoming.write(data)
        try:
            if not self._shaken:
                self._shake()
            self._read()
        except ssl.SSLWantReadError:
            self._received += 0 if self._shaken else len(data)
            if self._received > _HELLO:
                self._fail("the handshake is too large")
        except ssl.SSLError as error:
            self._fail(error)
        if self._full:
            self._replies += self._outgoing.pending
            if self._replies > _REPLIES:
                self.abort()
        self._flush()

    def eof_received(self) -> bool:
        return bool(self._inner.eof_received())

    def connection_lost(self, exc: Exception | None) -> None:
        # Without a reference cycle, OpenSSL's buffers are freed now, and not by the garbage collector.
        inner, self._inner = self._inner, asyncio.Protocol()
        inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._full, self._replies = True, 0
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._full = False
        self._inner.resume_writing()

    def _fail(self, error: object) -> None:
        log.debug("TLS with %s failed: %s", peer_of(self._socket), error)
        self._inner.eof_received()  # no later byte can be decrypted
        self._flush()  # an alert tells the client why
        self._closed = True
        self._socket.close()

    def _refuse(self) -> None:
        log.warning("%s used the TLS port without TLS", peer_of(self._socket))
        self._closed = True
        self._socket.write(_NO_TLS)
        self._socket.close()

    def _shake(self) -> None:
        self._tls.do_handshake()
        self._shaken = True
        early, self._early = self._early, []
        for data in early:
            self._encrypt(data)
        if self._ends:
            self.write_eof()

    def _read(self) -> None:
        """Decrypts the received bytes and passes them on. Raises `SSLWantReadError` in the middle of a record."""
        pieces = []
        ended = False
        try:
            while self._incoming.pending or self._tls.pending():
                if piece := self._tls.read(_RECORD):
                    pieces.append(piece)
                else:
                    ended = True
                    break
        except ssl.SSLZeroReturnError:
            ended = True
        finally:
            if pieces:
                self._inner.data_received(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if ended and not self._inner.eof_received():
            self.close()

    def _encrypt(self, data: bytes) -> None:
        written = self._tls.write(data)
        while written < len(data):
            written += self._tls.write(memoryview(data)[written:])

    def _flush(self) -> None:
        if self._outgoing.pending and not self._ended and not self._socket.is_closing():
            self._socket.write(self._outgoing.read())

    def _say_goodbye(self) -> None:
        """Tells the client that no data follows (RFC 8446, 6.1)."""
        if self._shaken and not self._ended:
            with suppress(ssl.SSLError):  # raised while the client's own close_notify is missing
                self._tls.unwrap()
            self._flush()
        self._ended = True

    # asyncio.Transport: the connection's side

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._shaken:
            self._early.append(bytes(data))
            return
        self._encrypt(bytes(data))
        self._flush()

    def write_eof(self) -> None:
        if not self._shaken:  # no alert can be sent yet
            self._ends = True
            return
        self._say_goodbye()
        self._socket.write_eof()

    def close(self) -> None:
        self._say_goodbye()
        self._closed = True
        self._socket.close()

    def abort(self) -> None:
        self._closed = True
        self._socket.abort()

    def is_closing(self) -> bool:
        return self._closed or self._socket.is_closing()

    def pause_reading(self) -> None:
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        self._socket.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._socket.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Adds `bare`: the transport of the socket, which closes without a close_notify."""
        return self._socket if name == "bare" else self._socket.get_extra_info(name, default)
