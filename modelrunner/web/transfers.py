"""Limits that all downloads of the daemon share: on connections and on the rate of bytes."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

# Fewer and longer pauses: most first tokens of a chat then come while no bytes are received and written.
_SHORTEST_PAUSE = 0.1
# Bytes per second. To receive, hash and write a megabyte takes 2.2 ms: 3 % of the processors.
_GENTLY = 12_500_000 * (os.cpu_count() or 1)


class Transfers:
    """The limits of all downloads: at most `whole` connections, of which `per_host` to one host, and `rate` bytes per
    second in all (None: without a limit); at most `beside` while the daemon is `busy` with answers. A file gets a
    further connection every `settle` seconds, while it comes slower than `fast` bytes per second and no limit held
    meanwhile: at a faster rate this machine is the limit. Belongs to one event loop."""

    def __init__(
        self,
        *,
        per_host: int = 6,
        whole: int = 12,
        rate: int | None = None,
        busy: Callable[[], bool] = lambda: False,
        beside: int = _GENTLY,
        fast: float = 150e6,
        settle: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.rate, self.fast, self.settle = rate, fast, settle
        self._busy, self._beside = busy, beside
        self._per_host, self._whole = per_host, whole
        self._clock, self._pause = clock, pause
        self._open: Counter[str] = Counter()
        self._freed = asyncio.Condition()
        self._due = 0.0

    def may_open(self, host: str) -> bool:
        return self._open[host] < self._per_host and self._open.total() < self._whole

    @asynccontextmanager
    async def connection(self, host: str) -> AsyncIterator[None]:
        """Holds one more connection to `host` within the block; waits until the limits allow it."""
        async with self._freed:
            await self._freed.wait_for(lambda: self.may_open(host))
            self._open[host] += 1
        try:
            yield
        finally:
            self._open[host] -= 1
            if not self._open[host]:
                del self._open[host]
            async with self._freed:
                self._freed.notify_all()

    @property
    def limit(self) -> int | None:
        """Returns the present limit in bytes per second of all downloads together."""
        if not self._busy():
            return self.rate
        return self._beside if self.rate is None else min(self.rate, self._beside)

    def free_since(self, moment: float) -> bool:
        """Returns whether no limit has held bytes back since `moment`, which is a time of `now`, and none holds now."""
        return self.limit is None and self._due <= moment

    def now(self) -> float:
        return self._clock()

    async def paced(self, count: int) -> None:
        """Returns when `count` further bytes may be taken."""
        limit = self.limit
        if limit is None:
            return
        now = self._clock()
        self._due = max(self._due, now) + count / limit
        if self._due - now > _SHORTEST_PAUSE:
            await self._pause(self._due - now)
