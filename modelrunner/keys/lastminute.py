"""Limits over the last minute: an exact one of requests, and one of tokens.

A refused client gets a time to come again. That time is a promise to this client alone: a slot is kept for it for a
moment, so a client that obeys Retry-After is admitted, however many others ask meanwhile. The promise to a closed
connection goes to the next client, since many clients open a connection for each request.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from time import perf_counter

WINDOW = 60.0
"""The length of a limit's minute, in seconds."""
GRACE = 2.0
"""Seconds for which a promised slot is kept: a whole second because Retry-After has no fractions, and one for the
client's way here."""
BYTES_PER_TOKEN = 4
"""Estimates the prompt from the size of a request's body: about right for English text."""
_MOST_PROMISES = 1000
_TOGETHER = 0.01  # seconds of spending that are kept as one sum


class RequestLimit:
    """At most `limit` requests in any 60 seconds. `client` is a number for each connection. With several limits, ask
    `is_open` of all of them, and then `take` or `promise`; `now` is the time of `clock`, in seconds.

    An admitted request takes a slot for 60 seconds; a promised request takes one from the promised time to 60 seconds
    after the last moment at which its client may come. At no time do more than `limit` of these spans overlap, so each
    promise can be kept, and a promise far ahead leaves the time before it to others."""

    def __init__(self, limit: int, clock: Callable[[], float] = perf_counter) -> None:
        self.limit = limit
        self._clock = clock
        self._admitted: deque[float] = deque()
        # Client -> the time of its slot, the earliest first; clients that left have negative numbers.
        self._promised: dict[int, float] = {}
        self._left = 0
        self._full = (0.0, 0.0)  # between these times no slot can be promised

    def admit(self, client: int, now: float) -> float | None:
        """Admits a request and returns None, or returns the seconds after which this client may come again."""
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
        """Returns whether a request of this client may begin now, perhaps with the promise of a client that left."""
        while self._admitted and self._admitted[0] <= now - WINDOW:
            self._admitted.popleft()
        while self._promised and (first := next(iter(self._promised.items())))[1] + GRACE < now:
            self._drop(first[0])  # its client did not come
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
        """Keeps a slot for this client from `at` on, or from the next free time after it. Returns that time."""
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
        """Frees the promise of a client that left, for the next client."""
        self._left -= 1
        self._rename(client, self._left)

    def _rename(self, client: int, other: int) -> None:
        if client in self._promised:
            self._promised = {other if each == client else each: due for each, due in self._promised.items()}

    def _drop(self, client: int) -> None:
        del self._promised[client]
        self._full = (0.0, 0.0)

    def _next(self, dues: list[float], at: float, seconds: float) -> float:
        """Returns `at` if a span of `seconds` from `at` on keeps every overlap within the limit, else a later time: no
        earlier time fits. `dues` are the times of the promises.

        The spans are sorted by their beginnings, and so by their ends. At most `limit` spans overlap if each begins
        after the end of the span `limit` places before it. A new span at `place` moves the later ones by one place."""
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
    """Allows no further request once the last 60 seconds cost `limit` tokens, which are known when a request ends.
    Tokens of the same hundredth of a second count as spent at its end. `spent` is their sum, perhaps with older ones;
    `now` is the time of `clock`, in seconds."""

    def __init__(self, limit: int, clock: Callable[[], float] = perf_counter) -> None:
        self.limit = limit
        self._clock = clock
        # Times and amounts in two deques: pairs would be more objects for the garbage collector.
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
