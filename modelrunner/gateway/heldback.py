"""Refusals that are held back: a client over its limit that asks again before the time it was told waits for its next
refusal. Without that, each refusal is answered with the next request, and a crowd of such clients slows all others."""

import asyncio
from collections.abc import Callable
from random import random
from time import monotonic

from modelrunner.errors import RateLimited

_FIRST = 0.1  # seconds; a client whose clock is a little fast notices nothing
_LONGEST = 1.0  # seconds: a thousand refusals of one client take a quarter of an hour
_MOST = 256  # connections that wait; each is a descriptor that no other client gets meanwhile


def _later(seconds: float, then: Callable[[], None]) -> asyncio.Handle:
    return asyncio.get_running_loop().call_later(seconds, then)


class HeldBack:
    """The refusals that wait, at most `most` of them. `clock` is in seconds; `later` sets a timer; `spread` gives
    numbers from 0 to 1, so that clients that came together do not all come again together."""

    def __init__(
        self,
        most: int = _MOST,
        clock: Callable[[], float] = monotonic,
        later: Callable[[float, Callable[[], None]], asyncio.Handle] = _later,
        spread: Callable[[], float] = random,
    ) -> None:
        self._most = most
        self.clock, self.later, self.spread = clock, later, spread
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        return self._count >= self._most

    def hold(self, seconds: float, then: Callable[[], None]) -> "Held":
        self._count += 1
        return Held(self, seconds, then)

    def let_go(self) -> None:
        self._count -= 1


class Patience:
    """What one connection was told: when to come again. One that obeys is never held back. The first refusal of one
    that does not waits up to `_FIRST`, and half of it at least; each further one twice as long as the one before, none
    longer than `_LONGEST`."""

    __slots__ = ("_all", "_delay", "_until")

    def __init__(self, held_back: HeldBack) -> None:
        self._all = held_back
        self._delay = 0.0
        self._until = 0.0

    def delay(self, error: RateLimited) -> float:
        """Returns the seconds to hold this refusal back, at most until the time that it names."""
        now, wait = self._all.clock(), error.retry_after or 0.0
        self._delay = min(max(2 * self._delay, _FIRST), _LONGEST) if now < self._until else 0.0
        self._until = now + wait
        return min(self._delay * (0.5 + self._all.spread() / 2), wait)


class Held:
    """One refusal that waits; the work of its connection meanwhile."""

    __slots__ = ("_all", "_then", "_timer")

    def __init__(self, held_back: HeldBack, seconds: float, then: Callable[[], None]) -> None:
        self._all, self._then = held_back, then
        self._timer = held_back.later(seconds, self._go_on)

    def pause(self) -> None:
        """It writes nothing yet."""

    resume = pause

    def cancel(self) -> None:
        self._timer.cancel()
        self._all.let_go()

    def _go_on(self) -> None:
        self._all.let_go()
        self._then()
