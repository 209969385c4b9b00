"""A small answer of an engine, taken into a future."""

import asyncio

from modelrunner.errors import EngineProtocolError

FETCH_LIMIT = 16 << 20
"""Bytes of a body."""


class Collector:
    """A `modelrunner.engine.connections.Receiver`: `done` is the status and the body, or the failure."""

    def __init__(self) -> None:
        self.done: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._body = bytearray()

    def splices(self, status: int) -> bool:
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
