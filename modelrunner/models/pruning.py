"""Frees disk space: removes leftovers, or the least recently used models."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from modelrunner import wire
from modelrunner.errors import Conflict, ModelNotFound
from modelrunner.models.lastused import LastUsed
from modelrunner.models.library import Library
from modelrunner.models.resolve import Resolver
from modelrunner.scheduler import Scheduler
from modelrunner.store import Store, StoredModel


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
    """Keeps models that are pinned, to be preloaded, or in memory. `wall` is the time of day in Unix seconds."""

    def __init__(
        self,
        store: Store,
        library: Library,
        scheduler: Scheduler,
        resolver: Resolver,
        last_used: LastUsed,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._library = library
        self._scheduler = scheduler
        self._resolver = resolver
        self._last_used = last_used
        self._wall = wall

    async def prune(self, rule: PruneRule, *, dry_run: bool = False) -> list[wire.PrunedItem]:
        """Removes leftovers, or models, by the rule, and returns them; with `dry_run` only returns them. Pulls go on
        meanwhile. Raises `StorageFailed`."""
        if rule.is_for_models:
            self._last_used.look()
            return await self._pruned(await asyncio.to_thread(self._chosen, rule), dry_run=dry_run)
        models = await self._pruned(await asyncio.to_thread(self._forgotten), dry_run=dry_run)
        found = await (self._library.leftovers() if dry_run else self._library.prune())
        return [
            *models,
            *(wire.PrunedItem(str(leftover.kind), leftover.path.name, leftover.size) for leftover in found),
        ]

    async def _pruned(self, chosen: Iterable[tuple[StoredModel, int]], *, dry_run: bool) -> list[wire.PrunedItem]:
        return [
            wire.PrunedItem("model", model.name, size) for model, size in chosen if dry_run or await self._remove(model)
        ]

    def _forgotten(self) -> list[tuple[StoredModel, int]]:
        """Returns the models without a name that nobody wants, with the bytes that each removal frees."""
        loaded = {model_id for runner in self._scheduler.runners() for model_id in (runner.model_id, *runner.models)}
        found = [m for m in self._store.list() if m.id not in loaded and self._library.is_forgotten(m)]
        return list(zip(found, self._store.freed([model.id for model in found]), strict=True))

    def _chosen(self, rule: PruneRule) -> list[tuple[StoredModel, int]]:
        """Returns the models to remove, with the bytes that each removal frees."""
        loaded = {model_id for runner in self._scheduler.runners() for model_id in (runner.model_id, *runner.models)}
        free = [model for model in self._store.list() if model.id not in loaded]
        idle = sorted((m for m in free if not self._resolver.is_needed(m.id)), key=self._last_used.of)
        left = self._store.used()
        chosen: list[tuple[StoredModel, int]] = []
        for model, size in zip(idle, self._store.freed([model.id for model in idle]), strict=True):
            is_old = rule.unused is not None and self._wall() - self._last_used.of(model) >= rule.unused
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
