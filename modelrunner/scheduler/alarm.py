"""A call in the event loop's next turn, or at a time of a clock."""

import asyncio
import math
from collections.abc import Callable


class Alarm:
    """Calls `ring` once, however often it was asked to. `clock` is in seconds."""

    def __init__(self, ring: Callable[[], None], clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """In the next turn."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._now)

    def at(self, time: float) -> None:
        """At that time of the clock; at an earlier one that was set before it instead."""
        if time == math.inf:
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + max(0.0, time - self._clock())
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = loop.call_at(when, self._due)

    def cancel(self) -> None:
        """The one at a time."""
        if self._timer is not None:
            self._timer.cancel()

    def _now(self) -> None:
        self._soon = None
        self._ring()

    def _due(self) -> None:
        self._timer = None
        self.soon()
