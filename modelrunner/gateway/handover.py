"""One request in aiohttp's hands: a transport in memory between a client's connection and one aiohttp protocol.

The connection feeds it exactly this request; what aiohttp writes goes to the client. Both ways, a side that takes no
more stops the other. When aiohttp has answered, the connection goes on without it.
"""

import asyncio
from typing import Protocol

from modelrunner.gateway.admission import AdmittedHead


class ClientSide(Protocol):
    """The client's connection."""

    keep_alive: bool
    """Does it take another request after this one?"""

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None:
        """The answer is complete."""

    def cut(self) -> None:
        """The answer ends here, and the client must notice."""

    def hold(self, held: bool) -> None:
        """Reads no more of the request's body while `held`."""

    def is_closing(self) -> bool: ...


class HandoverTransport(asyncio.Transport):
    """`admitted` is the request's head as the fast lane found it, `local` True for one that came on the Unix socket.
    `answered` is set once the whole answer was written; without it, `close` cuts the client's connection."""

    def __init__(self, client: ClientSide, admitted: AdmittedHead, protocol: asyncio.Protocol, *, local: bool) -> None:
        super().__init__()
        self.admitted = admitted
        self.local = local
        self.answered = False
        self.began = False
        self._client = client
        self._protocol = protocol
        self._whole = False
        self._paused = False
        self._closed = False

    @property
    def keep_alive(self) -> bool:
        """Does the client's connection stay open after this answer? Not while a part of the request is missing."""
        return self._client.keep_alive and self._whole

    def close_after(self) -> None:
        """The client's connection is to close after this answer."""
        self._client.keep_alive = False

    # the client's side

    def start(self, head: bytes) -> None:
        self._protocol.connection_made(self)
        self.feed(head)

    def feed(self, data: bytes) -> None:
        """A part of the request, framed as its head says."""
        if data and not self._closed:
            self._protocol.data_received(data)

    def feed_body(self, piece: bytes, *, last: bool) -> None:
        """A piece of the body; its chunks are made anew."""
        if self.admitted.chunked:
            piece = (b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b"") + (b"0\r\n\r\n" if last else b"")
        self._whole = last
        self.feed(piece)

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._protocol.resume_writing()

    def cancel(self) -> None:
        """The client is gone: aiohttp cancels the handler."""
        if not self._closed:
            self._closed = True
            self._protocol.connection_lost(None)

    # asyncio.Transport: aiohttp's side

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closed:
            self.began = True
            self._client.write(bytes(data))

    def is_closing(self) -> bool:
        return self._closed or self._client.is_closing()

    def pause_reading(self) -> None:
        if not self._closed:
            self._client.hold(True)

    def resume_reading(self) -> None:
        if not self._closed:
            self._client.hold(False)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)
        if self.answered:
            self._client.finish()
        else:
            self._client.cut()

    def abort(self) -> None:
        self.close()
