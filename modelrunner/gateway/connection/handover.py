"""Hands one request to aiohttp. A transport in memory joins the client's connection and one aiohttp protocol: the
connection feeds it exactly this request, and aiohttp's answer goes to the client. Flow control works in both
directions. After the answer the connection goes on without aiohttp."""

import asyncio
import re
from typing import Protocol

from modelrunner.gateway.connection.admission import AdmittedHead
from modelrunner.gateway.headers import new_request_id
from modelrunner.gateway.request.in_flight import InFlight

_OF_THE_CONNECTION = re.compile(
    rb"\r\n(?:connection|expect|http2-settings|keep-alive|proxy-connection|te|trailer|upgrade):[^\r]*", re.IGNORECASE
)


class ClientSide(Protocol):
    """The client's connection."""

    keep_alive: bool
    """True if the connection takes another request after this one."""
    peer: str

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None:
        """Called when the answer is complete."""

    def cut(self) -> None:
        """Called when the answer breaks off; the client must notice."""

    def hold(self, held: bool) -> None:
        """Pauses the reading of the request's body while `held`."""


class HandoverTransport(asyncio.Transport):
    """`admitted` is the request's head, `request_id` the client's own ID or a new one, `local` True for a request on
    the Unix socket, `of_owner` for one of the daemon's owner. `answered` is set once the whole answer was written;
    without it, `close` cuts the client's connection. `peer` is the client's address; `refused` is set where the gateway
    refuses the rest of the request. What a handler keeps of the body counts in `in_flight` for `counted_for`
    (`client_of`) until the request ends."""

    def __init__(
        self,
        client: ClientSide,
        admitted: AdmittedHead,
        protocol: asyncio.Protocol,
        in_flight: InFlight,
        counted_for: str,
        *,
        local: bool,
    ) -> None:
        super().__init__()
        self.admitted = admitted
        self.request_id = admitted.request_id or new_request_id()
        self.local = local
        self.of_owner = local and admitted.key is None
        self.answered = False
        self.began = False
        self.refused = False
        self.peer = client.peer
        self._client = client
        self._protocol = protocol
        self._in_flight, self._counted_for, self._kept = in_flight, counted_for, 0
        self._is_head = admitted.line.method == "HEAD"
        self._whole = False
        self._paused = False
        self._closed = False

    @property
    def keep_alive(self) -> bool:
        """True if the client's connection stays open after this answer. It does not while a part of the request is
        missing."""
        return self._client.keep_alive and self._whole

    def keep(self, size: int) -> None:
        """Counts `size` more bytes of the body that are kept in memory. Raises as `InFlight.buffer`."""
        if not self._closed:
            self._in_flight.buffer(self._counted_for, size, self._kept + size)
            self._kept += size

    def close_after(self) -> None:
        """Closes the client's connection after this answer."""
        self._client.keep_alive = False

    # the client's side

    def start(self, head: bytes, body: bytes | None) -> None:
        """Passes on the head as one of a connection for this request alone, and the body, None if it still comes."""
        line = self.admitted.line
        first = f"{line.method} {line.target} HTTP/1.{0 if line.http_1_0 else 1}".encode("ascii")
        fields = _OF_THE_CONNECTION.sub(b"", head[head.find(b"\r\n") :])
        self._whole = body is not None
        self._protocol.connection_made(self)
        self._protocol.data_received(first + fields + (body or b""))

    def feed(self, piece: bytes, *, last: bool) -> None:
        """Passes on a piece of the body, with new chunk framing where the head announces chunks."""
        if self.admitted.chunked:
            piece = (b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b"") + (b"0\r\n\r\n" if last else b"")
        self._whole = last
        if piece and not self._closed:
            self._protocol.data_received(piece)

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._protocol.resume_writing()

    def cancel(self) -> None:
        """Called when the client is gone: aiohttp cancels the handler."""
        if not self._closed:
            self._end()
            self._protocol.connection_lost(None)

    def _end(self) -> None:
        self._closed = True
        if self._kept:
            self._in_flight.unbuffer(self._counted_for, self._kept)

    # asyncio.Transport: aiohttp's side

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closed:
            return
        if not self._is_head:
            self._client.write(bytes(data))
        elif not self.began:  # aiohttp writes the body of a stream too, which the client would take for its next answer
            head, end, _ = bytes(data).partition(b"\r\n\r\n")
            self._client.write(head + end)
        self.began = True

    def is_closing(self) -> bool:
        return self._closed

    def pause_reading(self) -> None:
        if not self._whole and not self._closed:
            self._client.hold(True)

    def resume_reading(self) -> None:
        if not self._whole and not self._closed:
            self._client.hold(False)

    def close(self) -> None:
        if self._closed:
            return
        self._end()
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)
        if self.answered:
            self._client.finish()
        else:
            self._client.cut()

    def abort(self) -> None:
        self.close()
