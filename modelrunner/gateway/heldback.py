"""Delayed refusals: a client over its limit that asks again before the time in its Retry-After waits for the next
refusal. Without the delay it would ask again at once, and a crowd of such clients would slow all others."""

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
    """The delayed refusals, at most `most` of them. `clock` is in seconds; `later` sets a timer; `spread` returns
    random numbers from 0 to 1, so that clients that came together do not return together."""

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
        """Calls `then` after so many seconds, or `gone` if the client leaves before."""
        self._count += 1
        return Held(self, seconds, then, gone)

    def let_go(self) -> None:
        """Called when a delayed refusal ends."""
        self._count -= 1


class Patience:
    """The Retry-After times that the API keys on one connection got. A client that keeps to them is never delayed, nor
    is one key for another. The first refusal of a key that asks too early is delayed by a half to the whole of
    `_FIRST`, each further one by twice as much as the one before, up to `_LONGEST`."""

    __slots__ = ("_all", "_told")

    def __init__(self, held_back: HeldBack) -> None:
        self._all = held_back
        self._told: dict[
            str, tuple[float, float]
        ] = {}  # by the key's name: the last delay, the time of its Retry-After

    def delay(self, error: RateLimited, key: str) -> float:
        """Returns the delay of this refusal in seconds, which ends at its Retry-After at the latest."""
        now, wait = self._all.clock(), error.retry_after or 0.0
        delay, until = self._told.get(key, (0.0, 0.0))
        delay = min(max(2 * delay, _FIRST), _LONGEST) if now < until else 0.0
        self._told[key] = delay, now + wait
        return min(delay * (0.5 + self._all.spread() / 2), wait)


class Held:
    """One delayed refusal, which is the `Work` of its connection."""

    __slots__ = ("_all", "_gone", "_then", "_timer")

    def __init__(self, held_back: HeldBack, seconds: float, then: Callable[[], None], gone: Callable[[], None]) -> None:
        self._all, self._then, self._gone = held_back, then, gone
        self._timer = held_back.later(seconds, self._go_on)

    def pause(self) -> None:
        """Does nothing: no byte is written yet."""

    resume = pause

    def cancel(self) -> None:
        self._timer.cancel()
        self._all.let_go()
        self._gone()

    def release(self) -> None:
        """Ends the delay now."""
        self._timer.cancel()
        self._go_on()

    def _go_on(self) -> None:
        self._all.let_go()
        self._then()
