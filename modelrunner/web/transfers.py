"""What all downloads of the daemon share: how many connections there are, and how fast bytes may come."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

_SHORTEST_PAUSE = 0.02


class Transfers:
    """At most `whole` connections, of which `per_host` to one host, and `rate` bytes per second in all (None: without
    a limit). A file gets a further connection every `settle` seconds, while it comes slower than `fast` bytes per
    second: a faster one is held up by this machine. Belongs to one event loop."""

    def __init__(
        self,
        *,
        per_host: int = 6,
        whole: int = 12,
        rate: int | None = None,
        fast: float = 150e6,
        settle: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.rate, self.fast, self.settle = rate, fast, settle
        self._per_host, self._whole = per_host, whole
        self._clock, self._pause = clock, pause
        self._open: Counter[str] = Counter()
        self._freed = asyncio.Condition()
        self._due = 0.0

    def may_open(self, host: str) -> bool:
        return self._open[host] < self._per_host and self._open.total() < self._whole

    @asynccontextmanager
    async def connection(self, host: str) -> AsyncIterator[None]:
        """One more connection to `host`, when there may be."""
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

    async def paced(self, count: int) -> None:
        """Returns when `count` further bytes may be taken."""
        if self.rate is None:
            return
        now = self._clock()
        self._due = max(self._due, now) + count / self.rate
        if self._due - now > _SHORTEST_PAUSE:
            await self._pause(self._due - now)
