"""Reads the files of models again from time to time, slowly, and says which have become damaged."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from modelrunner.concurrency.threads import Pool, in_thread
from modelrunner.durable import JsonFile
from modelrunner.errors import StorageFailed
from modelrunner.scheduler.events import Events
from modelrunner.store import Digest, Store
from modelrunner.store.records import Stamp

RATE = 32 << 20
"""Bytes that are read in a second, at most: a few hundredths of a processor, and of a disk less than a pull takes."""
_PAUSE = 600.0  # seconds between two looks for files whose time has come
_WRITE = 60.0  # seconds after which what was read is written down
_READING = Pool("verifying", 1, prompt=False)
log = logging.getLogger(__name__)


class _Read(msgspec.Struct, frozen=True):
    """When a file was read last, in Unix seconds, and what was found; it counts while the file has this stamp."""

    time: float
    stamp: Stamp
    sound: bool = True


class Verifier:
    """`every` is in seconds: a file is read when its last reading, or its arrival, is that long ago, and at once when
    it has changed since its last reading. None: never. What was found is kept in `file`: a file that was found
    damaged counts as missing after a restart too. `wall` is the time of day in Unix seconds."""

    def __init__(
        self,
        store: Store,
        events: Events,
        file: Path,
        every: float | None,
        *,
        rate: float = RATE,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._events = events
        self._file = JsonFile(file, dict[str, _Read], cache=True)
        self._every = every
        self._rate = rate
        self._wall = wall
        self._read = self._file.load() or {} if every is not None else {}
        self._written = wall()

    async def run(self) -> None:
        """Reads until it is cancelled, or returns at once where nothing is to be read."""
        try:
            while self._every is not None:
                try:
                    await self.look()
                except StorageFailed as error:
                    log.warning("the files of models cannot be verified now: %s", error)
                await asyncio.sleep(_PAUSE)
        finally:
            if self._every is not None:
                self._file.save(self._read)

    async def look(self) -> None:
        """Reads every file whose time has come, the one that waits longest first. Raises `StorageFailed`."""
        stamps = await asyncio.to_thread(self._store.stamps)
        self._read = {digest: read for digest, read in self._read.items() if Digest(digest) in stamps}
        for digest, stamp in stamps.items():
            read = self._read.get(digest.hex)
            if read is not None and not read.sound and read.stamp == stamp:
                self._store.mark_damaged(digest)
        for _, digest in sorted(self._due(stamps)):
            await self._check(digest, stamps[digest])

    def _due(self, stamps: dict[Digest, Stamp]) -> Iterator[tuple[float, Digest]]:
        assert self._every is not None
        for digest, stamp in stamps.items():
            read = self._read.get(digest.hex)
            if read is not None and read.stamp != stamp:
                yield 0.0, digest
            else:
                last = read.time if read is not None else stamp[1] / 1e9
                if self._wall() - last >= self._every:
                    yield last, digest

    async def _check(self, digest: Digest, stamp: Stamp) -> None:
        names = self._store.names_with(digest)
        if not names:  # removed meanwhile
            return

        def work(stop: threading.Event) -> bool:
            def gently(size: int) -> None:
                if stop.wait(size / self._rate):
                    raise asyncio.CancelledError

            return self._store.check(digest, gently)

        sound = await in_thread(work, _READING)
        before = self._read.get(digest.hex)
        self._read[digest.hex] = _Read(self._wall(), stamp, sound)
        if not sound and (before is None or before.sound or before.stamp != stamp):
            for name in self._store.names_with(digest):
                log.error("the file %s of %s is damaged: pull or package the model again", digest, name)
                self._events.emit("damage", model=name, reason=f"a file of {name} is damaged: pull or package it again")
        if self._wall() - self._written >= _WRITE:
            self._written = self._wall()
            await asyncio.to_thread(self._file.save, self._read)
