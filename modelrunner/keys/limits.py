"""Limits over the last minute: of requests, exact, and of tokens.

A refused client is told when to come again. That time is a promise: it is given to this client alone, and a slot is
kept for it for a moment, so a client that obeys Retry-After is admitted, however many others ask meanwhile. A promise
to a connection that was closed goes to the next one that comes: many clients open a connection for each request.
"""

import math
from collections import deque
from collections.abc import Callable
from itertools import islice
from time import monotonic

WINDOW = 60.0
"""Seconds."""
GRACE = 2.0
"""Seconds for which a promised slot is kept: a whole second because Retry-After has no fractions, and one for the
client's way here."""
_MOST_PROMISES = 1000
_TOGETHER = 0.01  # seconds of spending that are kept as one sum


class RequestLimit:
    """At most `limit` requests in any 60 seconds."""

    def __init__(self, limit: int, clock: Callable[[], float] = monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._admitted: deque[float] = deque()
        # Client -> when its slot is free, the earliest first; clients that left have numbers below 0.
        self._promised: dict[int, float] = {}
        self._left = 0

    def admit(self, client: int) -> float | None:
        """Admits a request: returns None, or the seconds after which this client is to come again. `client` is any
        number that distinguishes connections."""
        now = self._clock()
        admitted = self._admitted
        while admitted and admitted[0] <= now - WINDOW:
            admitted.popleft()
        if not self._promised and len(admitted) < self.limit:
            admitted.append(now)
            return None
        while self._promised and (first := next(iter(self._promised.items())))[1] + GRACE < now:
            del self._promised[first[0]]  # nobody came
        free = self.limit - len(self._admitted)
        if client not in self._promised and free <= len(self._promised):
            self._rename(next((other for other in self._promised if other < 0), client), client)
        due = self._promised.get(client)
        if due is not None and due > now:
            return due - now
        if free > 0 and (due is not None or free > len(self._promised)):
            self._promised.pop(client, None)
            self._admitted.append(now)
            return None
        return self._promise(client, now)

    def take_back(self) -> None:
        """Undoes the admission before."""
        self._admitted.pop()

    @property
    def is_idle(self) -> bool:
        """True if nothing of the past counts any more."""
        now = self._clock()
        counts = self._admitted and self._admitted[-1] > now - WINDOW
        return not counts and all(due + GRACE < now for due in self._promised.values())

    def leave(self, client: int) -> None:
        """Frees the promise to a client that is gone for whoever comes next."""
        self._left -= 1
        self._rename(client, self._left)

    def _rename(self, client: int, other: int) -> None:
        if client in self._promised:
            self._promised = {other if each == client else each: due for each, due in self._promised.items()}

    def _promise(self, client: int, now: float) -> float:
        """Returns the seconds until a slot is free that was promised to nobody else."""
        self._promised.pop(client, None)
        over = len(self._admitted) + len(self._promised) - self.limit
        due = now + GRACE
        if 0 <= over < len(self._admitted):
            due = max(due, self._admitted[over] + WINDOW)
        elif over >= 0:
            due = max(due, next(islice(self._promised.values(), over - len(self._admitted), None)) + GRACE + WINDOW)
        if len(self._promised) < _MOST_PROMISES:
            self._promised[client] = due
        return due - now


class TokenLimit:
    """No further request once the last 60 seconds cost `limit` tokens. They are known when a request ends, so the one
    that passes the limit is still answered whole. What is spent within a hundredth of a second counts as spent at its
    end. `spent` is what counts, perhaps with some that is older."""

    def __init__(self, limit: int, clock: Callable[[], float] = monotonic) -> None:
        self.limit = limit
        self._clock = clock
        # When and how much, in two: a pair for each would be an object for the garbage collector.
        self._times: deque[float] = deque()
        self._amounts: deque[int] = deque()
        self.spent = 0
        self._together_until = -math.inf

    def spend(self, tokens: int) -> None:
        if not tokens:
            return
        now = self._clock()
        self.spent += tokens
        if now < self._together_until:
            self._times[-1] = now
            self._amounts[-1] += tokens
        else:
            self._together_until = now + _TOGETHER
            self._times.append(now)
            self._amounts.append(tokens)
            self._forget(now)

    @property
    def is_idle(self) -> bool:
        """True if nothing of the past counts any more."""
        return not self._times or self._times[-1] <= self._clock() - WINDOW

    def wait(self) -> float | None:
        """Returns None while tokens are left, else the seconds until some are."""
        if self.spent < self.limit:
            return None
        now = self._clock()
        self._forget(now)
        left = self.spent
        if left < self.limit:
            return None
        for time, tokens in zip(self._times, self._amounts, strict=True):
            left -= tokens
            if left < self.limit:
                return time + WINDOW - now
        return math.inf

    def _forget(self, now: float) -> None:
        while self._times and self._times[0] <= now - WINDOW:
            self._times.popleft()
            self.spent -= self._amounts.popleft()
