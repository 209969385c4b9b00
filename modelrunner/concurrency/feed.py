"""The last items of a sequence, and a feed of new ones that no slow reader can block."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Feed(Generic[T]):
    """The last `kept` items. Their IDs are consecutive from `first` on; `last` is the newest one's. `closed` once no
    more will come. Used from the event loop's thread."""

    def __init__(self, first: int, kept: int) -> None:
        self.last = first - 1
        self.closed = False
        self._ring: deque[T] = deque(maxlen=kept)
        self._news: asyncio.Event | None = None  # only while a reader waits: an item costs little without readers

    def __iter__(self) -> Iterator[T]:
        """Yields the kept items, oldest first."""
        return iter(list(self._ring))

    def after(self, id: int) -> list[T]:
        """Returns the kept items with a greater ID, oldest first."""
        new = min(self.last - id, len(self._ring))
        return list(self._ring)[-new:] if new > 0 else []

    def add(self, item: T) -> None:
        """Adds the item with the ID `last + 1`."""
        self.last += 1
        self._ring.append(item)
        self._tell()

    def extend(self, items: Sequence[T]) -> None:
        """Adds each of the items."""
        self.last += len(items)
        self._ring.extend(items)
        self._tell()

    def subscribe(self, after: int | None = None, idle: float | None = None) -> AsyncGenerator[T | None, None]:
        """Yields the items from now on, or those after the ID `after`, as far as they are kept. With `idle`, yields
        None after so many seconds without an item. Ends when the feed is closed, and for a reader that is too far
        behind: it may come back with the last ID that it saw."""
        if after is None:
            return self._follow(self.last, idle)
        oldest = self.last - len(self._ring)
        return self._follow(after if oldest <= after <= self.last else oldest, idle)

    def close(self) -> None:
        """Ends every subscription after the last item."""
        self.closed = True
        self._tell()

    async def _follow(self, seen: int, idle: float | None) -> AsyncGenerator[T | None, None]:
        while (behind := self.last - seen) <= len(self._ring):
            for item in list(self._ring)[len(self._ring) - behind :]:
                seen += 1
                yield item
            if self.last > seen:
                continue  # more items came while the reader was busy
            if self.closed:
                return
            self._news = self._news or asyncio.Event()
            try:
                async with asyncio.timeout(idle):
                    await self._news.wait()
            except TimeoutError:
                yield None

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None
