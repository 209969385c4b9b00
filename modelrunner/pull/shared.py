"""Downloads that pulls share: a file with a known sha256 has one partial file for all models that need it."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from weakref import WeakValueDictionary


class SharedDownloads:
    """The partial files of all pulls. It belongs to one event loop. A thread that stores such files holds `storing`,
    since it takes them away from other pulls."""

    def __init__(self) -> None:
        self.storing = threading.Lock()
        self._locks: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()
        self._users: Counter[Path] = Counter()

    def is_busy(self, path: Path) -> bool:
        """Returns whether a pull uses the partial file. Any thread may call it."""
        return path in self._users

    @asynccontextmanager
    async def alone(self, path: Path) -> AsyncIterator[None]:
        """Holds `path` for one downloader at a time."""
        async with self._locks.setdefault(path, asyncio.Lock()):
            yield

    def use(self, path: Path) -> None:
        """Marks `path` as used by one more pull, until `release`."""
        self._users[path] += 1

    def release(self, paths: Iterable[Path]) -> list[Path]:
        """Ends one pull's use of `paths`. Returns those that no other pull uses."""
        self._users.subtract(paths)
        free = [path for path in paths if self._users[path] <= 0]
        for path in free:
            del self._users[path]
        return free
