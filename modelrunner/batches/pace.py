"""How much of a batch is under way at once, and when it waits for clients."""

import asyncio
import time
from collections.abc import Callable

MOST = 32
"""Embeddings that go to the engine together."""
_SHORT, _LONG = 0.02, 0.25  # seconds that the engine may work for a group: beside clients, and without any
_FIRST = 8.0  # lines of the first group
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
        self._sizes = {_SHORT: _FIRST, _LONG: _FIRST}
        self._last = 0.0  # seconds that the engine worked for the last group

    @property
    def _wanted(self) -> float:
        return _SHORT if self._clock() < self._seen + _RECENT else _LONG

    def group(self) -> int:
        """How many embeddings are to go to the engine together."""
        return int(self._sizes[self._wanted])

    def groups(self) -> int:
        """How many groups may be under way: with two the engine never waits, with one a client waits less."""
        return 1 if self._wanted == _SHORT else 2

    def note(self, seconds: float, lines: int) -> None:
        """Says how long the engine worked for a group. A part of that is the same for one line and for many, so the
        size is found by trying."""
        self._last, wanted = seconds, self._wanted
        size = self._sizes[wanted]
        if seconds > wanted:
            self._sizes[wanted] = max(1.0, 0.75 * size)
        elif lines >= int(size):
            self._sizes[wanted] = min(float(MOST), size + 1)

    async def turn(self, model_id: str) -> None:
        """Waits while a client waits for another model: engines share processors and devices, whatever the priority
        of their requests. Not for ever, or a busy machine would never work on a batch."""
        until = self._clock() + min(_LONGEST, _SHARE * self._last)
        while self._awaited(model_id):
            self._seen = self._clock()
            if self._seen >= until:
                return
            await asyncio.sleep(_STEP)
