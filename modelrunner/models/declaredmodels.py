"""The models that engines manage themselves, for lists."""

import asyncio
from collections.abc import Sequence

import msgspec

from modelrunner.backend import DeclaredModel
from modelrunner.models.abilities import Abilities
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.store import StoredModel
from modelrunner.types import DECLARED, in_order
from modelrunner.units import format_bytes

_PATIENCE = 0.5
"""Seconds that a list waits for the backends."""


class DeclaredModels:
    """Asks each backend for its models, one call at a time. A list has what a slow backend declared the last time, so
    that one which blocks delays no list of the other models."""

    def __init__(self, registry: BackendRegistry) -> None:
        self._registry = registry
        self._known: dict[str, Sequence[DeclaredModel]] = {}
        """What each backend declared the last time, by its name."""
        self._asking: dict[str, asyncio.Task[None]] = {}
        """The calls under way, by the name of the backend."""
        self._late: set[str] = set()
        """The names of backends that were waited for in vain; no list waits for them until they have answered."""

    async def listed(self, backend: str | None = None) -> list[tuple[StoredModel, Abilities]]:
        """Returns the models of one backend or of all, each as one of the store is shown."""
        names = [
            one.name for one in self._registry if one.uses_external_model_management and backend in (None, one.name)
        ]
        if not names:
            return []
        calls = {name: self._asking.get(name) or self._ask(name) for name in names if name not in self._late}
        if calls:
            await asyncio.wait(calls.values(), timeout=_PATIENCE)
        self._late |= {name for name, call in calls.items() if not call.done()}
        return [shown(model, name) for name in names for model in self._known.get(name, ())]

    def _ask(self, name: str) -> asyncio.Task[None]:
        task = self._asking[name] = asyncio.create_task(self._learn(name), name=f"models of {name}")
        return task

    async def _learn(self, name: str) -> None:
        try:
            found = await asyncio.to_thread(self._registry.declared, name)
            self._known[name] = [model for _, model in found]
        finally:
            del self._asking[name]
            self._late.discard(name)


def shown(model: DeclaredModel, backend: str) -> tuple[StoredModel, Abilities]:
    """Returns the model as one of the store is shown."""
    config: dict[str, object] = {"format": str(DECLARED)}
    config |= {"size": format_bytes(model.size)} if model.size else {}
    config |= {"context_size": model.context_length} if model.context_length else {}
    stored = StoredModel(model.bundle(backend).model_id, [model.name], 0, msgspec.json.encode(config), model.size)
    return stored, Abilities(backend, model.context_length, in_order(model.capabilities))
