"""How much of a batch is under way at once, and when it waits for clients."""

import asyncio
import time
from collections.abc import Callable

MOST = 32
"""Embeddings that go to the engine together."""
_FIRST = 8  # of them, before it is known how long they take
_SHORT, _LONG = 0.005, 0.25  # seconds of work that go to the engine together: beside clients, and without any
_RECENT = 10.0  # seconds after which a client that was seen is no longer expected
_SHARE = 4.0  # times the last group's work that a batch waits for clients, so that it has a fifth of a busy machine
_LONGEST = 2.0  # seconds of such a wait
_STEP = 0.002  # seconds between two looks


class Pace:
    """`awaited` says whether a client waits for an answer of another model than the one given. `clock` is in
    seconds."""

    def __init__(self, awaited: Callable[[str], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._awaited = awaited
        self._clock = clock
        self._seen = float("-inf")
        self._line = 0.0  # seconds that the engine works for one line, a moving mean
        self._last = 0.0  # seconds of work of the last group

    def group(self) -> int:
        """How many embeddings are to go to the engine together."""
        if not self._line:
            return _FIRST
        wanted = _SHORT if self._clock() < self._seen + _RECENT else _LONG
        return max(1, min(MOST, int(wanted / self._line)))

    def note(self, seconds: float, lines: int) -> None:
        """Says how long the engine worked for a group."""
        each = seconds / lines
        self._line = 0.8 * self._line + 0.2 * each if self._line else each
        self._last = seconds

    async def turn(self, model_id: str) -> None:
        """Waits while a client waits for another model: engines share processors and devices, whatever the priority
        of their requests. Not for ever, or a busy machine would never work on a batch."""
        until = self._clock() + min(_LONGEST, _SHARE * self._last)
        while self._awaited(model_id):
            self._seen = self._clock()
            if self._seen >= until:
                return
            await asyncio.sleep(_STEP)
