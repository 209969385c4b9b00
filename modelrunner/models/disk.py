"""The disk use of models and engines, and clearing saved conversations."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelrunner.backend import SavesState, Versioned
from modelrunner.errors import ModelRunnerError
from modelrunner.models.lastused import LastUsed
from modelrunner.plugins.isolation import interface_of
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.store import Store, StoreUsage
from modelrunner.store.files import size_of
from modelrunner.store.union import AbsentFolder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSize:
    """Bytes of an installed engine. `state` is the size of the conversations that its backend saved."""

    name: str
    version: str
    engine: int
    state: int


@dataclass(frozen=True, slots=True)
class DiskReport:
    """`last_used` is by model ID, in Unix seconds."""

    store: StoreUsage
    engines: tuple[EngineSize, ...]
    last_used: Mapping[str, float]
    absent: Sequence[AbsentFolder] = ()


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
        for model in (*self._store.list(), *self._store.damaged()):
            for backend in self._registry:
                if (saves := interface_of(backend, SavesState)) is not None:
                    await saves.forget(model.id)
        return max(0, before - await self._saved())

    async def _saved(self) -> int:
        folders = [self._state / backend.name for backend in self._registry]
        return await asyncio.to_thread(lambda: sum(map(size_of, folders)))

    async def usage(self) -> DiskReport:
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
            engines.append(EngineSize(backend.name, version, size, state))
        self._last_used.look()
        used = {each.model.id: self._last_used.of(each.model) for each in store.models}
        return DiskReport(store, tuple(engines), used, self._store.absent())
