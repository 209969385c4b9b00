"""The disk: when each model was last used, what models, engines and saved conversations take, and what frees it."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from modelrunner import wire
from modelrunner.backend import SavesState, Versioned
from modelrunner.errors import Conflict, ModelNotFound, ModelRunnerError
from modelrunner.jsonfile import JsonFile
from modelrunner.models.library import Library
from modelrunner.models.resolve import Resolver
from modelrunner.plugins.isolation import interface_of
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.scheduler import Scheduler
from modelrunner.store import Store, StoredModel
from modelrunner.store.files import size_of

EVERY = 60.0  # seconds
_LOADS = ("load", "ready", "evict", "stop")
log = logging.getLogger(__name__)


class LastUsed:
    """Keeps the time at which each model was last used, at no cost for requests: the scheduler's events report loads,
    and runners report their last request. The file is written at most once a minute, so a kill loses the last minute.
    `wall` is the time of day in Unix seconds. Used from the event loop's thread."""

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
                        self.note(event.model)
            if self._scheduler.events.closed:
                return

    def note(self, reference: str) -> None:
        """Records that the model is used now."""
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
        here = {model.id for model in self._store.list(unusable=True)}
        times = {id: when for id, when in self._times.copy().items() if id in here}
        if times != self._written:
            self._file.save(times)
            self._written = times


class DiskMeter:
    """`state` has a folder for each backend that saves conversations, by the backend's name."""

    def __init__(self, store: Store, registry: BackendRegistry, state: Path, last_used: LastUsed) -> None:
        self._store = store
        self._registry = registry
        self._state = state
        self._last_used = last_used

    async def forget_conversations(self) -> int:
        """Deletes the conversations that the backends saved, of every model. Returns the freed bytes."""
        before = await self._saved()
        for model in self._store.list(unusable=True):
            for backend in self._registry:
                if (saves := interface_of(backend, SavesState)) is not None:
                    await saves.forget(model.id)
        return max(0, before - await self._saved())

    async def _saved(self) -> int:
        folders = [self._state / backend.name for backend in self._registry]
        return await asyncio.to_thread(lambda: sum(map(size_of, folders)))

    async def usage(self) -> wire.DiskUsage:
        """Measures the disk use of models and engines. Raises `StorageFailed`."""
        await asyncio.to_thread(self._store.look)
        store = await asyncio.to_thread(self._store.disk_usage)
        engines = []
        for backend in self._registry:
            versioned = interface_of(backend, Versioned)
            version = await asyncio.to_thread(versioned.version) if versioned else ""
            state = await asyncio.to_thread(size_of, self._state / backend.name)
            try:
                size = await backend.disk_usage()
            except ModelRunnerError as error:  # the other engines are shown all the same
                log.warning("the size of the engine of %s is not known: %s", backend.name, error)
                size = 0
            engines.append(wire.BackendUsage(backend.name, version, size, state))
        self._last_used.look()
        models = [
            wire.ModelUsage(
                each.model.id,
                each.model.tags,
                each.size,
                each.shared,
                each.reclaimable,
                int(self._last_used.of(each.model)),
                str(each.folder),
            )
            for each in store.models
        ]
        folders = [wire.FolderUsage(str(each.path), each.total, each.partial, each.free) for each in store.folders]
        folders += [wire.FolderUsage(str(each.path), absent=each.message) for each in self._store.absent()]
        total = sum(engine.size for engine in engines)
        return wire.DiskUsage(models, engines, store.total, total, store.partial, folders)


@dataclass(frozen=True, slots=True)
class PruneRule:
    """Selects the models to remove: all models that were not used for `unused` seconds, and then the least recently
    used models, until the others have at most `size` bytes. Without both, leftovers are removed, and models that have
    lost their last name."""

    unused: float | None = None
    size: int | None = None

    @property
    def is_for_models(self) -> bool:
        return self.unused is not None or self.size is not None


class Pruner:
    """Keeps models that are pinned, to be preloaded, or in memory."""

    def __init__(
        self,
        store: Store,
        library: Library,
        scheduler: Scheduler,
        resolver: Resolver,
        last_used: LastUsed,
    ) -> None:
        self._store = store
        self._library = library
        self._scheduler = scheduler
        self._resolver = resolver
        self._last_used = last_used

    async def prune(self, rule: PruneRule, *, dry_run: bool = False) -> list[wire.PrunedItem]:
        """Removes leftovers, or models, by the rule, and returns them; with `dry_run` only returns them. Pulls go on
        meanwhile. Raises `StorageFailed`."""
        if rule.is_for_models:
            self._last_used.look()
            return await self._pruned(await asyncio.to_thread(self._chosen, rule), dry_run=dry_run)
        models = await self._pruned(await asyncio.to_thread(self._forgotten), dry_run=dry_run)
        leftovers = await (self._library.leftovers() if dry_run else self._library.prune())
        return [
            *models,
            *(wire.PrunedItem(str(leftover.kind), leftover.path.name, leftover.size) for leftover in leftovers),
        ]

    async def _pruned(self, chosen: Iterable[tuple[StoredModel, int]], *, dry_run: bool) -> list[wire.PrunedItem]:
        return [
            wire.PrunedItem("model", model.name, size) for model, size in chosen if dry_run or await self._remove(model)
        ]

    def _forgotten(self) -> list[tuple[StoredModel, int]]:
        """Returns the models without a name that nobody wants, with the bytes that each removal frees."""
        loaded = {model_id for runner in self._scheduler.runners() for model_id in (runner.model_id, *runner.models)}
        models = [m for m in self._store.list() if m.id not in loaded and self._library.is_forgotten(m)]
        return list(zip(models, self._store.freed([model.id for model in models]), strict=True))

    def _chosen(self, rule: PruneRule) -> list[tuple[StoredModel, int]]:
        """Returns the models to remove, with the bytes that each removal frees."""
        loaded = {model_id for runner in self._scheduler.runners() for model_id in (runner.model_id, *runner.models)}
        free = [model for model in self._store.list() if model.id not in loaded]
        idle = sorted((m for m in free if not self._resolver.is_needed(m.id)), key=self._last_used.of)
        left = self._store.used()
        chosen: list[tuple[StoredModel, int]] = []
        for model, size in zip(idle, self._store.freed([model.id for model in idle]), strict=True):
            is_old = rule.unused is not None and time.time() - self._last_used.of(model) >= rule.unused
            is_more = rule.size is not None and left > rule.size
            if not (is_old or is_more):
                break
            chosen.append((model, size))
            left -= size
        return chosen

    async def _remove(self, model: StoredModel) -> bool:
        """Removes the models name by name, since a model that a client begins to use meanwhile stays."""
        try:
            for name in model.tags or [model.id]:
                await self._library.remove(name)
        except (Conflict, ModelNotFound):
            return False
        return True
