"""Limits over the last minute: of requests, exact, and of tokens.

A refused client is told when to come again. That time is a promise: it is given to this client alone, and a slot is
kept for it for a moment, so a client that obeys Retry-After is admitted, however many others ask meanwhile. A promise
to a connection that was closed goes to the next one that comes: many clients open a connection for each request.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from time import perf_counter

WINDOW = 60.0
"""Seconds."""
GRACE = 2.0
"""Seconds for which a promised slot is kept: a whole second because Retry-After has no fractions, and one for the
client's way here."""
BYTES_PER_TOKEN = 4
"""Of a request's body, for an estimate of its prompt: about that of English text."""
_MOST_PROMISES = 1000
_TOGETHER = 0.01  # seconds of spending that are kept as one sum


class RequestLimit:
    """At most `limit` requests in any 60 seconds. `client` is any number that distinguishes connections. Where several
    limits hold, `is_open` and then `take` or `promise` ask all of them; `now` is the time by `clock`, in seconds.

    An admitted request takes a slot for 60 seconds, a promised one from the promised time to 60 seconds after the last
    moment at which its client may come. No more than `limit` of these spans overlap anywhere, so each promise is kept,
    and one that lies far ahead leaves the time before it to others."""

    def __init__(self, limit: int, clock: Callable[[], float] = perf_counter) -> None:
        self.limit = limit
        self._clock = clock
        self._admitted: deque[float] = deque()
        # Client -> when its slot is free, the earliest first; clients that left have numbers below 0.
        self._promised: dict[int, float] = {}
        self._left = 0
        self._full = (0.0, 0.0)  # between these times no slot can be promised

    def admit(self, client: int, now: float) -> float | None:
        """Admits a request: returns None, or the seconds after which this client is to come again."""
        admitted = self._admitted
        if not self._promised:
            while admitted and admitted[0] <= now - WINDOW:
                admitted.popleft()
            if len(admitted) < self.limit:
                admitted.append(now)
                return None
        if self.is_open(client, now):
            self.take(client, now)
            return None
        return self.promise(client, now, now) - now

    def is_open(self, client: int, now: float) -> bool:
        """True if a request of this client may begin now. It may get the promise to a client that is gone."""
        while self._admitted and self._admitted[0] <= now - WINDOW:
            self._admitted.popleft()
        while self._promised and (first := next(iter(self._promised.items())))[1] + GRACE < now:
            self._drop(first[0])  # nobody came
        due = self._promised.get(client)
        if due is None:
            if len(self._admitted) < self.limit and self._next(list(self._promised.values()), now, WINDOW) == now:
                return True
            self._rename(next((other for other in self._promised if other < 0), client), client)
            due = self._promised.get(client)
        return due is not None and due <= now

    def take(self, client: int, now: float) -> None:
        """Admits a request for which the limit is open."""
        if client in self._promised:
            self._drop(client)
        self._admitted.append(now)

    def promise(self, client: int, now: float, at: float) -> float:
        """Keeps a slot for this client from `at` on, or as soon after it as there is one. Returns when."""
        due = self._promised.get(client)
        if due is not None:
            if due >= at:
                return due
            self._drop(client)
        at = max(at, now + GRACE)
        due = self._full[1] if self._full[0] <= at < self._full[1] else at
        dues = list(self._promised.values())
        while (later := self._next(dues, due, WINDOW + GRACE)) > due:
            due = later
        if due > at:
            begun, ended = self._full
            self._full = min(at, begun) if at <= ended else at, due
        if len(self._promised) < _MOST_PROMISES:
            is_last = not self._promised or next(reversed(self._promised.values())) <= due
            self._promised[client] = due
            if not is_last:
                self._promised = dict(sorted(self._promised.items(), key=itemgetter(1)))
        return due

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

    def _drop(self, client: int) -> None:
        del self._promised[client]
        self._full = (0.0, 0.0)

    def _next(self, dues: list[float], at: float, seconds: float) -> float:
        """Returns `at` if a span of so many seconds from then on makes no overlap too large, else a later time, before
        which none does. `dues` are those of the promises.

        The spans lie in the order of their beginnings, and so of their ends. That at most `limit` overlap then says
        that each begins after the end of the one `limit` places before it. A new one at `place` moves those after it by
        one."""
        limit, begun = self.limit, len(self._admitted)
        count = begun + len(dues)

        def end(place: int) -> float:
            return self._admitted[place] + WINDOW if place < begun else dues[place - begun] + GRACE + WINDOW

        place = begun + bisect_right(dues, at)
        if place >= limit and end(place - limit) > at:
            return end(place - limit)
        for moved in range(min(place + limit - 1, count) - 1, max(place, limit - 1) - 1, -1):
            if dues[moved - begun] < end(moved + 1 - limit):
                return end(moved + 1 - limit)
        last = place + limit - 1
        return end(place) if last < count and dues[last - begun] < at + seconds else at


class TokenLimit:
    """No further request once the last 60 seconds cost `limit` tokens. They are known when a request ends. Tokens that
    are spent within a hundredth of a second count as spent at its end. `spent` is their sum, perhaps with older ones;
    `now` is the time by `clock`, in seconds."""

    def __init__(self, limit: int, clock: Callable[[], float] = perf_counter) -> None:
        self.limit = limit
        self._clock = clock
        # When and how much, in two: a pair for each would be an object for the garbage collector.
        self._times: deque[float] = deque()
        self._amounts: deque[int] = deque()
        self.spent = 0
        self._together_until = -math.inf

    def spend(self, tokens: int, now: float) -> None:
        self.spent += tokens
        if now < self._together_until:
            self._amounts[-1] += tokens
            return
        self._together_until = now + _TOGETHER
        self._times.append(self._together_until)
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
