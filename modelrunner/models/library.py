"""The models on this machine: listing, pulling, packaging, naming and removing them."""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from modelrunner.errors import BadRequest, Conflict, InsufficientDisk, ModelRunnerError, StorageFailed
from modelrunner.models.configurations import Configurations
from modelrunner.models.resolve import Resolver
from modelrunner.pull import Pulled, Puller
from modelrunner.registry import BackendRegistry
from modelrunner.scheduler import Scheduler
from modelrunner.store import Leftover, Removed, Store, StoredModel
from modelrunner.types import ProgressReport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PullOrder:
    """What to pull: `source` is a reference, or `file:///path` of a file or folder to package. `name` is the name that
    the model gets, by default its reference. `token` goes to the source and nowhere else. `trust` takes a model that
    carries code, code that its engine will run. `verify` reads every byte of a model that is here."""

    source: str
    name: str | None = None
    token: str | None = None
    trust: bool = False
    verify: bool = False

    @property
    def is_local(self) -> bool:
        """True for a file or folder of this machine."""
        return self.source.strip().lower().startswith("file:")


class Library:
    """The models in the store, and what has to happen around a change of them. Methods that take a `reference` for a
    change want a whole name or an ID, others take a unique part of a name too."""

    def __init__(
        self,
        store: Store,
        puller: Puller,
        scheduler: Scheduler,
        registry: BackendRegistry,
        configurations: Configurations,
        resolver: Resolver,
    ) -> None:
        self._store = store
        self._puller = puller
        self._scheduler = scheduler
        self._registry = registry
        self._configurations = configurations
        self._resolver = resolver

    def __iter__(self) -> Iterator[StoredModel]:
        """The usable models, oldest first."""
        return iter(self._store.list())

    def damaged(self) -> tuple[StoredModel, ...]:
        """The models that cannot be used: `damage` says why."""
        return self._store.damaged()

    def get(self, reference: str) -> StoredModel:
        """Raises `ModelNotFound`, `InvalidReference`, `InvalidModel` for a damaged model."""
        return self._store.get(reference)

    async def pull(self, order: PullOrder, report: ProgressReport) -> Pulled:
        """Downloads or packages a model; `report` is called from the event loop's thread. Raises what `Puller.pull`
        raises."""
        if not order.source.strip():
            raise BadRequest("from names no model", param="from")
        events = self._scheduler.events
        try:
            pulled = await self._puller.pull(
                order.source, report, token=order.token, name=order.name, trust=order.trust, verify=order.verify
            )
        except ModelRunnerError as error:
            events.emit("pull", model=order.name or order.source, reason=f"failed: {error}")
            raise
        events.emit("pull", model=pulled.name, reason=f"pulled from {order.source}")
        return pulled

    async def prune(self) -> tuple[Leftover, ...]:
        """Removes what `Store.prune` removes, and returns it. Pulls go on meanwhile. Raises `StorageFailed`."""
        return await self._puller.prune()

    async def tag(self, reference: str, name: str) -> None:
        """Gives the model one more name, which another model that has it loses. Raises as `Store.whole`, and
        `InsufficientDisk`, `StorageFailed`."""
        await asyncio.to_thread(self._store.tag, reference, name)

    async def remove(self, reference: str, *, force: bool = False) -> Removed:
        """Takes the name away, and the model with its last name. A removal that has begun is ended even if the caller
        is cancelled. `force` removes all names of an ID, waits for the model's requests as long as a drain may take,
        and cuts those that have not ended by then. Raises as `Store.whole`, and `Conflict` while it is in use."""
        return await asyncio.shield(asyncio.ensure_future(self._remove(reference, force=force)))

    async def _remove(self, reference: str, *, force: bool) -> Removed:
        model, name = self._store.whole(reference)
        if name is None or len(model.tags) <= 1:
            if not force and self._scheduler.uses(model.id):
                raise Conflict(f"{reference} is answering a request: wait, or remove it with force", param="model")
            await self._scheduler.unload(model_ids=[model.id])  # drains
            if force:
                await self._scheduler.unload(model_ids=[model.id], force=True)
        removed = await asyncio.to_thread(self._store.remove, reference, force=force)
        if removed.deleted:
            await self._forget(model)
            self._scheduler.resume(model.id)
            await self._scheduler.unload(model_ids=[model.id], force=force)  # one may have come up in between
            await asyncio.to_thread(self._registry.forget, model.id)
            for backend in self._registry:
                try:
                    await backend.forget(model.id)
                except ModelRunnerError as error:  # the model is gone all the same
                    log.warning("what %s kept of %s may still be there: %s", backend.name, model.name, error)
        return removed

    async def _forget(self, model: StoredModel) -> None:
        """A disk that is full does not undo the removal; the same files would find their configuration again."""
        try:
            await self._configurations.forget(model.id)
        except (InsufficientDisk, StorageFailed) as error:
            log.warning("%s was removed, and its configuration is still there: %s", model.name, error)

    def serves(self, backend: str, model: StoredModel) -> bool:
        """Whether the backend reads the model's format. Raises `BackendNotFound`, `BackendUnavailable`."""
        return model.format in self._registry.get(backend).formats

    async def backends(self, models: Iterable[StoredModel]) -> list[str | None]:
        """For each model the backend that a request goes to when it names none; None if none can run the model."""
        return await asyncio.to_thread(lambda: [self._backend_of(model) for model in models])

    async def windows(self, models: Iterable[StoredModel]) -> list[int | None]:
        """For each model the tokens that one request may have, prompt and answer together: of its runner, or as the
        model is configured now. None if nothing here can run the model."""
        loaded = {runner.model_id: runner.context_size for runner in self._scheduler.runners()}

        def windows() -> list[int | None]:
            return [loaded.get(model.id) or self._resolver.window(model.id) for model in models]

        return await asyncio.to_thread(windows)

    def _backend_of(self, model: StoredModel) -> str | None:
        try:
            return self._resolver.backend_of(None, self._store.bundle(model.id)).name
        except (ModelRunnerError, OSError):
            return None
