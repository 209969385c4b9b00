"""An operator's control of the models in memory: pin, pause, resume and unload."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from modelrunner.errors import BadRequest, InvalidReference, ModelNotFound
from modelrunner.models.configurator import Configurator
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.scheduler import Phase, Scheduler, UnloadResult
from modelrunner.store import Store, StoredModel


@dataclass(frozen=True, slots=True)
class ModelResidency:
    """`state` is that of the model's runner, None without one."""

    model: StoredModel
    state: Phase | None


class Residency:
    """A `reference` is a whole name or an ID of a model. The methods raise `ModelNotFound`, `InvalidReference`."""

    def __init__(
        self, store: Store, scheduler: Scheduler, registry: BackendRegistry, configurator: Configurator
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._registry = registry
        self._configurator = configurator

    async def pin(self, reference: str, *, pin: bool) -> ModelResidency:
        """Pins the model, so that it is never evicted for another model, or unpins it: at once, and in its
        configuration. Raises as `Configurator.change`."""
        model = self._whole(reference)
        await self._configurator.change(model.id, {"pin": pin})
        return self._of(model)

    async def pause(self, reference: str) -> ModelResidency:
        """Unloads the model and the presets of it, and lets their requests wait until `resume`. Returns when the
        runners are gone, or after the time limit of a drain."""
        model = self._whole(reference)
        pause = self._scheduler.pause(model.id, self._store.files_id(model.id))
        await asyncio.shield(asyncio.ensure_future(pause))
        return self._of(model)

    def resume(self, reference: str) -> ModelResidency:
        """Lets a paused model answer again, and the presets of it."""
        model = self._whole(reference)
        self._scheduler.resume(self._store.files_id(model.id))
        return self._of(model)

    async def unload(
        self, *, all: bool = False, backend: str | None = None, models: Sequence[str] = (), force: bool = False
    ) -> UnloadResult:
        """Ends runners: all runners, the runners of a backend, or the runners of models (a unique part of a name is
        enough, since the next request loads the model again). It waits for running requests, at most for the time of a
        drain; `force` cuts them. Raises `BadRequest` if nothing is named, `BackendNotFound`."""
        if not (all or backend or models):
            raise BadRequest("say what to unload: all, a backend, or models", param="models")
        if backend:
            self._registry.get(backend)
        ids = [self._id(model) for model in models]
        return await self._scheduler.unload(all=all, backend=backend, model_ids=ids, force=force)

    def _id(self, reference: str) -> str:
        """Returns the ID of a model of the store, or of one that its engine has itself, if that is loaded."""
        try:
            return self._store.get(reference).id
        except (ModelNotFound, InvalidReference):
            for runner in self._scheduler.runners():
                for model_id, name in runner.models.items():
                    if reference in (name, model_id):
                        return model_id
            raise

    def _whole(self, reference: str) -> StoredModel:
        return self._store.whole(reference)[0]

    def _of(self, model: StoredModel) -> ModelResidency:
        states = (runner.state for runner in self._scheduler.runners() if model.id in runner.models)
        return ModelResidency(model, next(states, None))
