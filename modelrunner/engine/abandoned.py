"""Requests whose clients have left, for as long as the engine is busy with them.

An engine notices late that a client has left: with its next token, or once the batch of a long prompt is computed; or
never, where it looks for that only in a stream. Until then the request takes one of the engine's places.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from modelrunner.engine.connections import UpstreamConnection
from modelrunner.errors import ModelRunnerError

log = logging.getLogger(__name__)

_TRIES = 10
_PAUSE = 1.0  # seconds between two tries

Free = Callable[[], None]


class Abandoned:
    """The abandoned requests of one engine. `settled` asks the engine (`EngineApi.settled`)."""

    def __init__(self, settled: Callable[[], Awaitable[None]]) -> None:
        self._settled = settled
        self._closed: list[Free] = []  # each for a request whose connection the engine has closed
        self._task: asyncio.Task[None] | None = None
        self._ended = False

    def add(self, connection: UpstreamConnection, free: Free) -> None:
        """Leaves the exchange of `connection`. It calls `free` once: when the engine's place is free, or the engine is
        gone."""
        if not connection.leave(lambda: self._connection_closed(free)):
            free()

    def _connection_closed(self, free: Free) -> None:
        if self._ended:
            free()
            return
        self._closed.append(free)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._settle())

    async def _settle(self) -> None:
        """Asks the engine once for all requests whose connections are closed, and again for those that came
        meanwhile."""
        try:
            while self._closed:
                closed, self._closed = self._closed, []
                try:
                    await self._let_settle()
                finally:
                    for free in closed:
                        free()
        finally:
            self._task = None

    async def _let_settle(self) -> None:
        """Asks until the engine answers. An engine that computes may not answer for a while; the watchdog ends one that
        hangs."""
        for _ in range(_TRIES):
            try:
                await self._settled()
                return
            except (OSError, ModelRunnerError) as error:
                failure = error
            await asyncio.sleep(_PAUSE)
        log.warning("an engine does not say whether it is done with requests that were given up: %s", failure)

    def end(self) -> None:
        """Frees all places, because the engine is gone."""
        self._ended = True
        if self._task is not None:
            self._task.cancel()
        closed, self._closed = self._closed, []
        for free in closed:
            free()
