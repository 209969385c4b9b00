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

    def hold(self, seconds: float, then: Callable[[], None], gone: Callable[[], None]) -> "Held":
        """Calls `then` in so many seconds, or `gone` where the client leaves before."""
        self._count += 1
        return Held(self, seconds, then, gone)

    def let_go(self) -> None:
        self._count -= 1


class Patience:
    """What each API key on one connection was told: when to come again. A client that obeys is never held back, nor is
    one key for another. The first refusal of one that does not obey waits up to `_FIRST`, and half of it at least; each
    further one twice as long as the one before, none longer than `_LONGEST`."""

    __slots__ = ("_all", "_told")

    def __init__(self, held_back: HeldBack) -> None:
        self._all = held_back
        self._told: dict[str, tuple[float, float]] = {}  # by the key's name: the last delay, the time it was told

    def delay(self, error: RateLimited, key: str) -> float:
        """Returns the seconds to hold this refusal of the key back, at most until the time that it names."""
        now, wait = self._all.clock(), error.retry_after or 0.0
        delay, until = self._told.get(key, (0.0, 0.0))
        delay = min(max(2 * delay, _FIRST), _LONGEST) if now < until else 0.0
        self._told[key] = delay, now + wait
        return min(delay * (0.5 + self._all.spread() / 2), wait)


class Held:
    """One refusal that waits; the work of its connection meanwhile."""

    __slots__ = ("_all", "_gone", "_then", "_timer")

    def __init__(self, held_back: HeldBack, seconds: float, then: Callable[[], None], gone: Callable[[], None]) -> None:
        self._all, self._then, self._gone = held_back, then, gone
        self._timer = held_back.later(seconds, self._go_on)

    def pause(self) -> None:
        """It writes nothing yet."""

    resume = pause

    def cancel(self) -> None:
        self._timer.cancel()
        self._all.let_go()
        self._gone()

    def release(self) -> None:
        """Lets it wait no longer."""
        self._timer.cancel()
        self._go_on()

    def _go_on(self) -> None:
        self._all.let_go()
        self._then()
