"""Receivers take an engine's answer: their protocol, and one that keeps a small answer in a future."""

import asyncio
from typing import Protocol

from modelrunner.errors import EngineProtocolError

FETCH_LIMIT = 16 << 20
"""The most bytes of a body."""


class Receiver(Protocol):
    """Takes an answer. The calls come in the order of the methods; `on_failure` may replace any of them and is the
    last. All calls come from the event loop, none from inside `UpstreamPool.send`."""

    def splices(self, status: int, kind: bytes) -> bool:
        """Returns True to take a body of unknown length with its chunk framing. The call comes once the status and the
        media type (`kind`) are known."""

    def on_head(self, status: int, headers: tuple[tuple[bytes, bytes], ...], length: int | None, data: bytes) -> None:
        """Takes the head and the first `data` of the body, which is empty only if the whole body is. `length` is None
        for a body of unknown length that is not empty: then `data` is in chunks if `splices` said so. `headers` have
        names in lower case, and no Content-Length."""

    def on_data(self, data: bytes) -> object: ...

    def on_end(self) -> None: ...

    def on_failure(self, error: OSError | EngineProtocolError) -> None: ...


class Collector:
    """A `Receiver`. `done` gets the status and the body, or the failure."""

    def __init__(self) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._body = bytearray()

    def splices(self, status: int, kind: bytes) -> bool:
        return False

    def on_head(self, status: int, headers: tuple[tuple[bytes, bytes], ...], length: int | None, data: bytes) -> None:
        self._status = status
        self.on_data(data)

    def on_data(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > FETCH_LIMIT:
            raise EngineProtocolError("the engine's answer to a control request is too large")

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result((self._status, bytes(self._body)))

    def on_failure(self, error: OSError | EngineProtocolError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
