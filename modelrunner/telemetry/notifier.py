"""Sends notices of engines that keep crashing, models that cannot be loaded and disks that are nearly full: to a
program that it runs, and with a POST to a webhook."""

import asyncio
import logging
import os
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from modelrunner.concurrency.tasks import stopped
from modelrunner.concurrency.threads import Pool
from modelrunner.errors import SourceFailed
from modelrunner.scheduler import EventRecord
from modelrunner.scheduler.events import Events
from modelrunner.units import format_bytes
from modelrunner.web.session import ask, new_client

log = logging.getLogger(__name__)

_CRASHES, _WITHIN = 3, 600.0  # so many crashes in so many seconds are a crash loop
_LOOK = 60.0  # seconds between two checks of the disks
_LIMIT = 30.0  # seconds for the program, and for the webhook
_MOST_KEPT = 1000  # subjects whose last notice is remembered
_THREADS = Pool("watching disks", 1, prompt=False)


class NoticeKind(StrEnum):
    CRASH_LOOP = "crash_loop"
    REFUSED_LOAD = "refused_load"
    DISK_NEARLY_FULL = "disk_nearly_full"


class Notice(msgspec.Struct, frozen=True):
    """`message` is a sentence without any part of a request, an engine's log or a key. `time` is in Unix seconds;
    `withheld` counts the notices of this kind about the same model or disk that were not sent since the last one."""

    event: NoticeKind
    model: str
    message: str
    time: float
    withheld: int = 0


@dataclass(frozen=True, slots=True)
class NoticeRules:
    """`command` runs with the notice as JSON on its standard input; `webhook` is a URL. A notice is repeated after
    `every` seconds at the earliest. A disk with less than `disk_free` free bytes is nearly full."""

    command: Sequence[str]
    webhook: str
    every: float
    disk_free: int


def _disk(folder: Path) -> tuple[int, int]:
    return os.stat(folder).st_dev, shutil.disk_usage(folder).free


class Notifier:
    """`places` returns the folders whose disks are watched, `clock` is in Unix seconds, `disk` returns the number of a
    folder's disk and its free bytes."""

    def __init__(
        self,
        rules: NoticeRules,
        events: Events,
        places: Callable[[], Iterable[Path]],
        clock: Callable[[], float] = time.time,
        disk: Callable[[Path], tuple[int, int]] = _disk,
    ) -> None:
        self._rules = rules
        self._events = events
        self._places = places
        self._clock = clock
        self._disk = disk
        self._crashes: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_CRASHES))
        self._told: dict[tuple[NoticeKind, str], tuple[float, int]] = {}

    async def run(self) -> None:
        """Sends notices until the events end. The events of a burst that is too long for the feed are lost."""
        watching = asyncio.create_task(self._watch_disks(), name="watch disks")
        try:
            while not self._events.closed:
                async for event in self._events.subscribe():
                    if event is not None:
                        await self._hear(event)
        finally:
            await stopped(watching)

    async def _hear(self, event: EventRecord) -> None:
        model = event.model
        if event.event == "refuse":
            why = f"{model} cannot be loaded: `modelrunner why {model}` tells the reason"
            await self._tell(NoticeKind.REFUSED_LOAD, model, why, model)
        elif event.event == "crash":
            crashes = self._crashes[model]
            crashes.append(event.time)
            if len(crashes) == _CRASHES and event.time - crashes[0] <= _WITHIN:
                why = f"the engine of {model} ended {_CRASHES} times in ten minutes: see `modelrunner logs {model}`"
                await self._tell(NoticeKind.CRASH_LOOP, model, why, model)

    async def _watch_disks(self) -> None:
        """Checks the disks. One that never answers occupies a thread, and ends the checks of the others."""
        loop = asyncio.get_running_loop()
        while True:
            for folder, free in await loop.run_in_executor(_THREADS, self._nearly_full):
                why = f"the disk of {folder} has {format_bytes(free)} left: `modelrunner df` shows what uses it"
                await self._tell(NoticeKind.DISK_NEARLY_FULL, str(folder), why)
            await asyncio.sleep(_LOOK)

    def _nearly_full(self) -> list[tuple[Path, int]]:
        """Returns a folder on each nearly full disk, with the free bytes."""
        disks: dict[int, tuple[Path, int]] = {}
        for folder in self._places():
            with suppress(OSError):  # the disk of the folder may be absent
                number, free = self._disk(folder)
                disks.setdefault(number, (folder, free))
        return [(folder, free) for folder, free in disks.values() if free < self._rules.disk_free]

    async def _tell(self, kind: NoticeKind, subject: str, message: str, model: str = "") -> None:
        now = self._clock()
        last, withheld = self._told.get((kind, subject), (-self._rules.every, 0))
        if now - last < self._rules.every:
            self._told[kind, subject] = last, withheld + 1
            return
        self._told.pop((kind, subject), None)
        self._told[kind, subject] = now, 0  # moved to the end: the first one is the oldest
        if len(self._told) > _MOST_KEPT:
            del self._told[next(iter(self._told))]
        body = msgspec.json.encode(Notice(kind, model, message, now, withheld))
        if self._rules.command:
            await self._run(body)
        if self._rules.webhook:
            await self._post(body)

    async def _run(self, body: bytes) -> None:
        program = self._rules.command[0]
        try:
            process = await asyncio.create_subprocess_exec(
                *self._rules.command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )
        except OSError as error:
            log.warning("notify: %s cannot be run: %s", program, error.strerror)
            return
        try:
            async with asyncio.timeout(_LIMIT):
                await process.communicate(body)
        except TimeoutError:
            log.warning("notify: %s did not end within %.0f seconds", program, _LIMIT)
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode:
            log.warning("notify: %s ended with %d", program, process.returncode)

    async def _post(self, body: bytes) -> None:
        """Posts a notice. The URL may hold a secret, so only its host is logged."""
        url, headers = self._rules.webhook, {"Content-Type": "application/json"}
        try:
            async with new_client(url) as client:
                answer = await ask(
                    client, url, headers, limit=1 << 20, method="POST", redirects=False, seconds=_LIMIT, content=body
                )
            if answer.status >= 300:
                log.warning("notify: the webhook answered %d", answer.status)
        except SourceFailed as error:
            log.warning("notify: the webhook failed: %s", error)
