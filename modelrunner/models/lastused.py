"""Keeps the time at which each model was last used, at no cost for requests: the scheduler's events report loads, and
runners report their last request. The file is written at most once a minute, so a kill loses the last minute."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from modelrunner.errors import ModelRunnerError
from modelrunner.jsonfile import JsonFile
from modelrunner.scheduler import Scheduler
from modelrunner.store import Store, StoredModel

EVERY = 60.0  # seconds
_LOADS = ("load", "ready", "evict", "stop")
log = logging.getLogger(__name__)


class LastUsed:
    """`wall` is the time of day in Unix seconds. Used from the event loop's thread."""

    def __init__(
        self, path: Path, store: Store, scheduler: Scheduler, *, wall: Callable[[], float] = time.time
    ) -> None:
        self._file = JsonFile(path, dict[str, float], cache=True)
        self._store = store
        self._scheduler = scheduler
        self._wall = wall
        self._times = self._file.load() or {}
        self._written = dict(self._times)

    def of(self, model: StoredModel) -> float:
        """Returns the time in Unix seconds. A model that was never used has the time at which it came here."""
        return max(self._times.get(model.id, 0.0), float(model.created))

    async def run(self) -> None:
        """Records uses until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_loads())
            tasks.create_task(self._write_now_and_then())

    async def _watch_loads(self) -> None:
        while True:  # a feed ends if its reader is too slow
            async with aclosing(self._scheduler.events.subscribe()) as feed:
                async for event in feed:
                    if event is not None and event.event in _LOADS and event.model:
                        self._note(event.model)
            if self._scheduler.events.closed:
                return

    def _note(self, reference: str) -> None:
        try:
            self._times[self._store.whole(reference)[0].id] = self._wall()
        except ModelRunnerError as error:  # removed meanwhile
            log.debug("%s is not here any more: %s", reference, error)

    async def _write_now_and_then(self) -> None:
        try:
            while True:
                await asyncio.sleep(EVERY)
                self.look()
                await asyncio.to_thread(self.write)
        finally:
            self.look()
            self.write()

    def look(self) -> None:
        """Asks the runners when they were last used."""
        for runner in self._scheduler.runners():
            if runner.last_used is not None:
                used = self._wall() if runner.leases else runner.last_used
                for model_id in runner.models:
                    self._times[model_id] = max(used, self._times.get(model_id, 0.0))

    def write(self) -> None:
        """Writes the changed times, without the models that are gone, and logs a failure. Blocks."""
        here = {model.id for model in (*self._store.list(), *self._store.damaged())}
        times = {id: when for id, when in self._times.copy().items() if id in here}
        if times != self._written:
            self._file.save(times)
            self._written = times
