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
        self._at = math.inf  # when the timer rings

    def soon(self) -> None:
        """In the next turn."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._now)

    def at(self, time: float) -> None:
        """At that time of the clock; at an earlier one that was set before it instead."""
        if time >= self._at:
            return
        self.cancel()
        self._at = time
        self._timer = asyncio.get_running_loop().call_later(max(0.0, time - self._clock()), self._due)

    def cancel(self) -> None:
        """The one at a time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._at = None, math.inf

    def _now(self) -> None:
        self._soon = None
        self._ring()

    def _due(self) -> None:
        self._timer, self._at = None, math.inf
        self.soon()
