"""Downloads that pulls have in common: a file with a known sha256 has one partial file, whichever models want it."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from weakref import WeakValueDictionary


class SharedDownloads:
    """Belongs to one event loop. A thread that stores such files holds `storing`, since it takes them away from other
    pulls."""

    def __init__(self) -> None:
        self.storing = threading.Lock()
        self._locks: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()
        self._users: Counter[Path] = Counter()

    def is_busy(self, path: Path) -> bool:
        """Whether a pull uses the partial file. Any thread may ask."""
        return path in self._users

    @asynccontextmanager
    async def alone(self, path: Path) -> AsyncIterator[None]:
        """Nobody else downloads into `path` meanwhile."""
        async with self._locks.setdefault(path, asyncio.Lock()):
            yield

    def use(self, path: Path) -> None:
        """A pull begins to use `path`, and does until `release`."""
        self._users[path] += 1

    def release(self, paths: Iterable[Path]) -> list[Path]:
        """A pull has ended. Returns those that no other pull uses."""
        self._users.subtract(paths)
        free = [path for path in paths if self._users[path] <= 0]
        for path in free:
            del self._users[path]
        return free
