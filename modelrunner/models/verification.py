"""Reads the files of models again from time to time, slowly, and marks the damaged ones."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from modelrunner.concurrency.threads import Pool, in_thread
from modelrunner.errors import StorageFailed
from modelrunner.jsonfile import JsonFile
from modelrunner.scheduler.events import Events
from modelrunner.store import Digest, Store
from modelrunner.store.records import Stamp
from modelrunner.store.store import PlacedBlob

RATE = 32 << 20
"""The most bytes that are read in a second: this takes a few percent of a CPU, and less of a disk than a pull."""
_PAUSE = 600.0  # seconds between two searches for files that are due
_WRITE = 60.0  # seconds between two writes of the results
_READING = Pool("verifying", 1, prompt=False)
log = logging.getLogger(__name__)


class _Read(msgspec.Struct, frozen=True):
    """The last reading of a file: its time in Unix seconds and its result, which holds while the file has this
    stamp."""

    time: float
    stamp: Stamp
    sound: bool = True


class Verifier:
    """`every` is in seconds: a file is due when its last reading, or its arrival, is that long ago, and at once after a
    change. None turns the readings off. `file` keeps the results: a damaged file counts as missing after a restart,
    too. `wall` is the time of day in Unix seconds; `pause` waits for an event for so many seconds, and returns whether
    it came."""

    def __init__(
        self,
        store: Store,
        events: Events,
        file: Path,
        every: float | None,
        *,
        rate: float = RATE,
        wall: Callable[[], float] = time.time,
        pause: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self._store = store
        self._events = events
        self._file = JsonFile(file, dict[str, dict[str, _Read]], cache=True)
        self._every = every
        self._rate = rate
        self._wall, self._pause = wall, pause
        self._read = dict(self._load()) if every is not None else {}
        self._written = wall()
        self._looks = store.looks
        store.watchers.append(self._store_changed)

    async def run(self) -> None:
        """Reads files until it is cancelled; returns at once if readings are off."""
        try:
            while self._every is not None:
                await self.look()
                await asyncio.sleep(_PAUSE)
        finally:
            if self._every is not None:
                self._save()

    async def look(self) -> None:
        """Reads every file that is due, the longest overdue first, except those of a failing disk."""
        stamps = await asyncio.to_thread(self._store.stamps)
        here = {file.folder for file in stamps}
        self._read = {  # the results of an absent folder are kept
            file: read
            for file, read in self._read.items()
            if file in stamps or (file.folder in self._store.folders and file.folder not in here)
        }
        await asyncio.to_thread(self._mark)
        failing = set()
        for _, file in sorted(self._due(stamps)):
            if file.folder not in failing:
                try:
                    await self._check(file, stamps[file])
                except StorageFailed as error:
                    log.warning("the files of models cannot be verified now: %s", error)
                    failing.add(file.folder)

    def _mark(self) -> None:
        """Marks the files that were found damaged before a restart, or before their folder was absent."""
        self._looks = self._store.looks
        for file, read in list(self._read.items()):
            if not read.sound:
                try:
                    self._store.mark_damaged(file, read.stamp)
                except StorageFailed as error:
                    log.warning("%s", error)

    def _store_changed(self) -> None:
        if self._looks != self._store.looks:
            self._mark()

    def _due(self, stamps: Mapping[PlacedBlob, Stamp]) -> Iterator[tuple[float, PlacedBlob]]:
        assert self._every is not None
        for file, stamp in stamps.items():
            read = self._read.get(file)
            if read is not None and read.stamp != stamp:
                yield 0.0, file
            else:
                last = read.time if read is not None else stamp[1] / 1e9
                if self._wall() - last >= self._every:
                    yield last, file

    async def _check(self, file: PlacedBlob, stamp: Stamp) -> None:
        if not self._store.names_with(file):  # removed meanwhile
            return

        def work(stop: threading.Event) -> bool:
            def gently(size: int) -> None:
                if self._pause(stop, size / self._rate):
                    raise asyncio.CancelledError

            return self._store.check(file, gently)

        sound = await in_thread(work, _READING)
        before = self._read.get(file)
        self._read[file] = _Read(self._wall(), stamp, sound)
        if not sound and (before is None or before.sound or before.stamp != stamp):
            for name in self._store.names_with(file):
                log.error("the file %s of %s is damaged: pull or package the model again", file.digest, name)
                self._events.emit("damage", model=name, reason=f"a file of {name} is damaged: pull or package it again")
        if self._wall() - self._written >= _WRITE:
            self._written = self._wall()
            await asyncio.to_thread(self._save)

    def _load(self) -> Iterator[tuple[PlacedBlob, _Read]]:
        for folder, files in (self._file.load() or {}).items():
            for hex, read in files.items():
                if digest := Digest.named(hex):
                    yield PlacedBlob(Path(folder), digest), read

    def _save(self) -> None:
        kept: dict[str, dict[str, _Read]] = {}
        for file, read in list(self._read.items()):
            kept.setdefault(str(file.folder), {})[file.digest.hex] = read
        self._file.save(kept)
