"""The scheduler's timer and its background tasks."""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Alarm:
    """Calls `ring` once for all settings before that. `clock` is in seconds; `rings_at` is the time for which the alarm
    is set, infinity if it is not."""

    def __init__(self, ring: Callable[[], None], clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.rings_at = math.inf

    def soon(self) -> None:
        """Rings in the loop's next turn."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._now)

    def at(self, time: float) -> None:
        """Rings at `time` of the clock, or at an earlier time that was set before."""
        if time >= self.rings_at:
            return
        self.cancel()
        self.rings_at = time
        self._timer = asyncio.get_running_loop().call_later(max(0.0, time - self._clock()), self._due)

    def cancel(self) -> None:
        """Cancels the timer set by `at`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self.rings_at = None, math.inf

    def _now(self) -> None:
        self._soon = None
        self._ring()

    def _due(self) -> None:
        self._timer, self.rings_at = None, math.inf
        self.soon()


class Background:
    """Keeps background tasks until they are done. If a task raises, the error is logged, and nothing else happens."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def cancel(self) -> None:
        """Returns when no task is left."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the scheduler failed", exc_info=error)
