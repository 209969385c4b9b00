"""The models on this machine: listing, pulling, packaging, naming and removing them."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from modelrunner import wire
from modelrunner.backend import SavesState
from modelrunner.concurrency.joint import JointWork
from modelrunner.concurrency.tasks import all_stopped
from modelrunner.concurrency.threads import HASHING, Pool, in_thread
from modelrunner.errors import (
    BadRequest,
    Conflict,
    InsufficientDisk,
    InvalidModel,
    InvalidReference,
    ModelNotFound,
    ModelRunnerError,
    StorageFailed,
)
from modelrunner.models.abilities import Abilities, AbleModel, Checks, DeclaredModels, KnownAbilities, as_they_run
from modelrunner.models.aliases import Aliases
from modelrunner.models.configurations import Configurations
from modelrunner.models.orders import PullOrder
from modelrunner.models.rendering import Renderings
from modelrunner.plugins.isolation import interface_of
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.progress import ProgressReport, RunningPull, WorkProgress
from modelrunner.pull import Puller, PullResult
from modelrunner.pull.file import LocalFiles, StoredFiles, path_of
from modelrunner.pull.loading import LoadOptions
from modelrunner.pull.source import LocalOrigin
from modelrunner.pull.uploads import UploadedFiles
from modelrunner.scheduler import Scheduler
from modelrunner.store import Leftover, Reference, RemoveResult, Store, StoredModel
from modelrunner.store.blobs import ReadProgress
from modelrunner.store.details import ModelDetails, details_of
from modelrunner.store.layout import ModelArchive, archive_of
from modelrunner.store.union import AbsentFolder
from modelrunner.types import DECLARED, ModelFormat

WAIT = 1.0
"""Seconds that a look at the folders may take before its callers continue with the result of the last one."""
_THREADS = Pool("looking at folders", 1, prompt=False)
R = TypeVar("R")
log = logging.getLogger(__name__)


class Library:
    """The models in the store, and the work around a change of them. Methods that change a model take a whole name or
    an ID as `reference`; others also take a unique part of a name."""

    def __init__(
        self,
        store: Store,
        puller: Puller,
        scheduler: Scheduler,
        registry: BackendRegistry,
        configurations: Configurations,
        abilities: KnownAbilities,
        checks: Checks,
        renderings: Renderings,
        aliases: Aliases,
    ) -> None:
        self._store = store
        self.looks = FolderLooks(store)
        self._puller = puller
        self._scheduler = scheduler
        self._registry = registry
        self._declared = DeclaredModels(registry)
        self._configurations = configurations
        self._abilities = abilities
        self._checks = checks
        self._renderings = renderings
        self.aliases = aliases
        self._pulling: set[asyncio.Task[PullResult]] = set()  # without a caller

    def __iter__(self) -> Iterator[StoredModel]:
        """Yields the usable models, the oldest first."""
        return iter(self._store.list())

    @property
    def folders(self) -> Sequence[Path]:
        """The folders of models, the preferred first."""
        return self._store.folders

    async def all_models(self) -> list[StoredModel]:
        """Returns the usable models, the oldest first, and then those that cannot be used: `damage` says why. Waits a
        moment for folders of which it is not known whether they are here."""
        await self.looks.look()
        return self._store.list(unusable=True)

    def get(self, reference: str) -> StoredModel:
        """Raises `ModelNotFound`, `InvalidReference`, `InvalidModel` for a damaged model."""
        return self._store.get(reference)

    def named(self, reference: str) -> tuple[StoredModel, str]:
        """Returns the model as `get` does, with the name in `reference`, or with the model's first name if `reference`
        is no name of it."""
        model = self._store.get(reference)
        with contextlib.suppress(ModelNotFound, InvalidReference):
            return model, self._store.whole(reference)[1] or model.name
        return model, model.name

    async def described(self, reference: str, backend: str | None = None) -> tuple[StoredModel, str, Abilities]:
        """Returns the model and its name as `named` does, with its abilities; or the model of this name that an engine
        manages itself, of one backend or of all. Raises as `get`."""
        try:
            model, name = self.named(reference)
        except (ModelNotFound, InvalidReference):
            for declared, abilities in await self.listed([], backend):
                if declared.id == reference or declared.name in (reference, reference.removesuffix(":latest")):
                    return declared, declared.name, abilities
            raise
        [(_, abilities)] = await self._checks.shown(await self._able([model]))
        return model, name, abilities

    def voices(self, model: StoredModel) -> list[str]:
        """Returns the names of the voices of a model that speaks, none where they are not known. Reads files."""
        if model.format == DECLARED:
            return []
        try:
            voices = self._store.bundle(model.id).header.metadata.get("voices", [])
        except ModelRunnerError:
            return []
        return [str(name) for name in voices] if isinstance(voices, list | tuple) else []

    def names(self, reference: str) -> tuple[str, ...]:
        """The names that the model is known by, damaged or not; of one that is not here, the name that a pull would
        give it. Raises `InvalidReference`."""
        with contextlib.suppress(ModelNotFound, InvalidReference):
            model = self._store.find(reference)
            return (model.name, *model.tags)
        return (self.pull_name(reference),)

    def pull_name(self, text: str) -> str:
        """The name that a pull of `text` would give, as `list` shows it. Raises `InvalidReference`."""
        with contextlib.suppress(ModelNotFound):
            return self._puller.name(text).short
        return Reference.parse(text).short

    def names_removed(self, reference: str) -> tuple[str, ...]:
        """The names that `remove` would take away at most. Raises as `Store.whole`."""
        model, name = self._store.whole(reference)
        return (name,) if name is not None else tuple(model.tags)

    async def has_file(self, digest: str) -> bool:
        """Returns True if a file with this digest, `sha256:...`, is stored and not known to be damaged, or waits for
        its model. Raises `InvalidReference`."""
        return await self._puller.uploads.has(digest)

    async def may_take_file(self, digest: str, allows: Callable[..., bool]) -> bool:
        """As `has_file`, of a client that sees the models whose names it `allows`: the files of others are not here for
        it, until it has sent them itself. Raises `InvalidReference`."""
        if await self._puller.uploads.waits(digest):
            return True
        return any(allows(model.name, *model.tags) for model in self._store.holders(digest) if not model.damage)

    async def upload(self, digest: str, pieces: AsyncIterator[bytes], size: int) -> None:
        """Takes a file that a model will be made of, as `Uploads.take` does."""
        await self._puller.uploads.take(digest, pieces, size)

    async def details(self, model: StoredModel) -> ModelDetails:
        """Returns the model's template, licences and defaults: none for one that an engine manages itself. Raises as
        `details_of`."""
        if model.format == DECLARED:
            return ModelDetails("", (), None)
        return await asyncio.to_thread(details_of, self._store, model.id)

    async def template_problem(self, reference: str) -> str:
        """Returns what is wrong with the model's own chat template in one sentence, "" if nothing is known to be.
        Raises as `Store.bundle`."""
        return await asyncio.to_thread(lambda: self._renderings.problem(self._store.bundle(reference)))

    async def pull(self, order: PullOrder, report: ProgressReport) -> PullResult:
        """Downloads or packages a model; `report` is called from the event loop's thread. A model that loses its last
        name to it is removed, unless it is in use. Raises what `Puller.pull` raises."""
        name = order.name or order.model or ""
        if not name.strip() or (order.model is not None and not order.model.strip() and not order.files):
            raise BadRequest("from names no model", param="from")
        former = self._named(name)
        events = self._scheduler.events
        making = order.recipe.making(None) if order.recipe else None
        base = await self._base(order, report) if order.derives else ""
        if base:
            making = order.recipe.making(await asyncio.to_thread(details_of, self._store, base))
        origin = self._origin(order, base)
        received: list[int] = []

        def reported(step: WorkProgress) -> None:
            if step.phase == "downloading":
                received[1:] = [step.current]
            report(step)

        try:
            pulled = await self._puller.pull(
                origin,
                reported,
                token=order.token,
                name=order.name,
                trust=order.trust or order.derives,
                verify=order.verify,
                verify_key=None if order.derives else order.verify_key,
                making=making,
                folder=order.folder,
            )
        except ModelRunnerError as error:
            events.emit("pull", model=name, reason=f"failed: {error}", downloaded=_span(received))
            raise
        events.emit("pull", model=pulled.name, reason=f"pulled from {order}", downloaded=_span(received))
        with contextlib.suppress(ModelRunnerError):  # the model may be gone by now
            if problem := await self.template_problem(pulled.id):
                report(WorkProgress(f"{pulled.name} is here, but {problem}", warning=True))
        if isinstance(origin, UploadedFiles):
            await asyncio.to_thread(self._puller.uploads.drop, origin.sent)
        if former is not None and former.id != pulled.id:
            await self._remove_former(former.id)
        return pulled

    async def begin(self, order: PullOrder) -> None:
        """Begins a pull that needs no caller, and returns with its first progress; events tell the rest. Raises as
        `pull` what ends it before."""
        begun = asyncio.Event()

        def report(step: WorkProgress) -> None:
            begun.set()
            if step.warning:
                self._scheduler.events.emit("pull", model=order.name or order.model or "", reason=step.message)

        task = asyncio.create_task(self.pull(order, report), name=f"pull {order}")
        self._pulling.add(task)
        task.add_done_callback(self._pulling.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # an event has told it
        waiting = asyncio.create_task(begun.wait())
        try:
            await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if task.done():
            task.result()

    async def close(self) -> None:
        """Ends the pulls without a caller; the received bytes are kept."""
        await all_stopped(*self._pulling)

    def _origin(self, order: PullOrder, base: str) -> str | LocalOrigin:
        """Returns what the puller pulls; `base` is the ID of the model that the new one is made of. Raises
        `BadRequest`, `InvalidReference`."""
        uploads = self._puller.uploads
        if order.files:
            return UploadedFiles.parse(uploads, order.files)
        if base and order.adapters:
            return UploadedFiles.parse(uploads, order.adapters, base)
        if base:
            return StoredFiles(self._store, base, order.extras)
        if isinstance(order.source, LocalFiles):
            return order.source
        if order.model is None:
            return LocalFiles(path_of(order.source, "from"), order.extras)
        return order.model

    def _named(self, text: str) -> StoredModel | None:
        try:
            return self._store.whole(text)[0]
        except (ModelNotFound, InvalidReference):
            return None

    async def _remove_former(self, id: str) -> None:
        if (model := self._named(id)) is not None and self.is_forgotten(model):
            try:
                await self.remove(id)
            except ModelRunnerError as error:  # `prune` takes it later
                log.info("the former model %s stays: %s", id, error)

    def is_forgotten(self, model: StoredModel) -> bool:
        """Returns whether the model has no name, and nobody has pulled it by its digest, pinned or preloads it."""
        settings = self._configurations.settings.of(model.id)
        by_digest = any("@" in origin.name for origin in self.origins(model))
        return not (model.tags or by_digest or settings.pin or settings.preload)

    def origins(self, model: StoredModel) -> list[wire.Origin]:
        """Returns the sources from which the model was pulled."""
        return self._puller.origins(model.id)

    async def updates(self, models: Iterable[StoredModel]) -> list[wire.Update]:
        """Asks whether the sources of the models have newer ones."""
        return [update for model in models for update in await self._puller.updates(model.id)]

    async def search(self, query: str, format: ModelFormat, limit: int) -> list[wire.Offer]:
        """Returns the models that hubs offer. Raises `SourceFailed`."""
        return await self._puller.search(query, format, limit)

    async def make(self, order: PullOrder, report: ProgressReport) -> str:
        """Makes a model of another one, and returns its name. A model that carries nothing of its own becomes another
        name of the first one. Raises as `pull` and `tag`."""
        if order.derives or order.model is None:
            return (await self.pull(order, report)).name
        base = await self._base(order, report)
        await self.tag(base, order.name or "")
        return order.name or ""

    async def _base(self, order: PullOrder, report: ProgressReport) -> str:
        """Returns the ID of the model that a new one is made of. A model that carries code was trusted when it came
        here."""
        model = order.model or ""
        if order.name is None:
            raise BadRequest(f"give the model that is made of {model} a name", param="name")
        if order.verify_key is None:
            with contextlib.suppress(ModelNotFound):
                return self._store.get(model).id
        plain = PullOrder(model, token=order.token, trust=order.trust, verify_key=order.verify_key)
        return (await self.pull(plain, report)).id

    def pulls(self) -> list[RunningPull]:
        """The pulls under way."""
        return self._puller.running()

    async def cancel_pull(self, reference: str) -> str:
        """Cancels a pull, as `Puller.cancel` does."""
        return await self._puller.cancel(reference)

    def archive(self, reference: str) -> ModelArchive:
        """Returns the model as a tar archive. Reads the manifest. Raises as `archive_of`."""
        return archive_of(self._store, reference)

    async def load(
        self, pieces: AsyncIterator[bytes], report: ProgressReport, *, name: str | None, trust: bool, size: int
    ) -> list[PullResult]:
        """Takes the models of a tar archive of `size` bytes, 0 if the size is unknown. `name` replaces the name of its
        one model, `trust` takes models that carry code. Raises as `Puller.load`."""
        loaded = await self._puller.load(pieces, report, LoadOptions(name, trust), size)
        for model in loaded:
            self._scheduler.events.emit("pull", model=model.name, reason="loaded from an archive")
        return loaded

    async def leftovers(self) -> tuple[Leftover, ...]:
        """Returns the files that `prune` would remove. Raises `StorageFailed`."""
        return await self._puller.leftovers()

    async def prune(self) -> tuple[Leftover, ...]:
        """Removes the same files as `Store.prune`, and returns them. Pulls go on meanwhile. Raises `StorageFailed`."""
        return await self._puller.prune()

    async def verify(self, reference: str, report: ProgressReport) -> str:
        """Reads every byte of the model, about a second per gigabyte, and returns its name; `report` is called from the
        event loop's thread. Damaged files count as missing from then on: no engine is started with them. A cancelled
        call stops reading. Raises `InvalidModel` for a damaged model, and as `get` and `Store.verify`."""
        model = self._store.get(reference)
        step = WorkProgress(f"Verifying {model.name}", "verifying", model.size)
        if damaged := await _reading(step, report, lambda count: self._store.verify(model.id, count)):
            raise InvalidModel(f"{model.name} has {len(damaged)} missing or damaged files: pull or package it again")
        return model.name

    async def tag(self, reference: str, name: str) -> None:
        """Gives the model one more name, which another model that has it loses. Raises as `Store.whole`, and
        `InsufficientDisk`, `StorageFailed`."""
        await asyncio.to_thread(self._store.tag, reference, name)
        self._scheduler.events.emit("tag", model=name, reason=f"a name of {reference}")

    async def move(self, reference: str, folder: Path, report: ProgressReport) -> str:
        """Moves the model to another folder of models, and returns its name. Its idle runners end before. Raises as
        `Store.move`, and `Conflict` while it is in use."""
        model = self._store.get(reference)
        if self._scheduler.uses(model.id):
            raise Conflict(f"{reference} is answering a request: wait, then move it", param="model")
        await self._scheduler.unload(model_ids=[model.id])
        step = WorkProgress(f"Moving {model.name}", "copying", 2 * model.size)
        await _reading(step, report, lambda count: self._store.move(model.id, folder, count))
        self._scheduler.events.emit("move", model=model.name, reason=f"to {folder}")
        return model.name

    async def remove(self, reference: str, *, force: bool = False) -> RemoveResult:
        """Takes the name away, and the model with its last name. A removal that has begun is ended even if the caller
        is cancelled. `force` removes all names of an ID, waits for the model's requests as long as a drain may take,
        and cuts those that have not ended by then. Raises as `Store.whole`, and `Conflict` while it is in use."""
        return await asyncio.shield(asyncio.ensure_future(self._remove(reference, force=force)))

    async def _remove(self, reference: str, *, force: bool) -> RemoveResult:
        model, name = self._store.whole(reference)
        if name is None or len(model.tags) <= 1:
            if not force and self._scheduler.uses(model.id):
                raise Conflict(f"{reference} is answering a request: wait, or remove it with force", param="model")
            self._scheduler.forget(model.id)
            await self._scheduler.unload(model_ids=[model.id])  # drains
            if force:
                await self._scheduler.unload(model_ids=[model.id], force=True)
        removed = await asyncio.to_thread(self._store.remove, reference, force=force)
        self._scheduler.events.emit(
            "remove", model=name or model.name, reason="" if removed.deleted else "a name of it"
        )
        if removed.deleted:
            await self._forget(model)
            self._scheduler.forget(model.id)
            await self._scheduler.unload(model_ids=[model.id], force=force)  # one may have come up in between
            await asyncio.to_thread(self._registry.forget, model.id)
            for backend in self._registry:
                if (saves := interface_of(backend, SavesState)) is None:
                    continue
                try:
                    await saves.forget(model.id)
                except ModelRunnerError as error:  # the model is gone all the same
                    log.warning("what %s kept of %s may still be there: %s", backend.name, model.name, error)
        return removed

    async def _forget(self, model: StoredModel) -> None:
        """Forgets the model's configuration. A full disk does not undo the removal; a later model with the same ID
        would find its configuration again."""
        try:
            await self._configurations.forget(model.id)
        except (InsufficientDisk, StorageFailed) as error:
            log.warning("%s was removed, and its configuration is still there: %s", model.name, error)

    def serves(self, backend: str, model: StoredModel) -> bool:
        """Returns True if the backend reads the model's format, or, of a model that an engine manages itself, if it is
        one of those that `listed` gives for the backend. Raises `BackendNotFound`, `BackendUnavailable`."""
        return model.format in (DECLARED, *self._registry.get(backend).formats)

    async def listed(self, models: Sequence[StoredModel], backend: str | None = None) -> list[AbleModel]:
        """Returns these models of the store, and then those that engines manage themselves, of one backend or of
        all."""
        return await self._checks.shown([*await self._able(models), *await self._declared.listed(backend)])

    async def _able(self, models: Sequence[StoredModel]) -> list[AbleModel]:
        """Returns the models with their abilities: those of its runner for a loaded one, else those that its settings
        give. Without checks."""
        able = self._abilities.known(models)
        if able is None:
            able = await asyncio.to_thread(self._abilities.of, models)
        return as_they_run(able, self._scheduler.runs())

    async def keep_check(self, reference: str, outcome: wire.CheckOutcome) -> wire.ModelCheck:
        """Keeps what a check of the model found, for lists. Raises as `described`."""
        model, name, abilities = await self.described(reference)
        check = await self._checks.keep(model.id, abilities.backend, outcome)
        failed = ", ".join(check.failed)
        self._scheduler.events.emit("check", model=name, reason=f"failed: {failed}" if failed else "passed")
        return check

    async def learn_abilities(self) -> None:
        """Finds the abilities of all models, and finds them again after a change, until it is cancelled. Before that it
        asks the engines that manage models themselves, so that the first list has those of a slow one."""
        await self._declared.listed()
        await self._abilities.learn()


async def _reading(step: WorkProgress, report: ProgressReport, read: Callable[[ReadProgress], R]) -> R:
    """Returns the result of `read`, which gets a thread, and a function to call with the size of each piece in bytes:
    `report` is then called from the event loop's thread with the `step` so far. A cancelled call stops the reading."""
    loop = asyncio.get_running_loop()

    def work(stop: threading.Event) -> R:
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            if stop.is_set():
                raise asyncio.CancelledError
            loop.call_soon_threadsafe(report, replace(step, total=max(step.total, done), current=done))

        return read(count)

    return await in_thread(work, HASHING)


def _span(received: list[int]) -> int:
    """Returns the bytes that came between the first and the last report; the other bytes are left from earlier
    attempts."""
    return received[-1] - received[0] if received else 0


class FolderLooks:
    """Looks which folders of models are there. Callers share a look that is under way. A disk that never answers
    occupies one thread of its own."""

    def __init__(self, store: Store, wait: float = WAIT) -> None:
        self._store = store
        self._wait = wait
        self._look: JointWork[None, None] | None = None
        self._begun = 0.0

    async def absent(self) -> tuple[AbsentFolder, ...]:
        """Returns the folders that cannot be used now, or those of the last look if the disks take longer than
        `wait`."""
        await self.look()
        return self._store.absent()

    async def look(self) -> None:
        """Looks at the folders, for at most `wait`."""
        if len(self._store.folders) > 1:
            if self._look is None or self._look.task.done():
                self._begun = time.monotonic()
                self._look = JointWork(self._looked, stops_alone=False)
            look = self._look.task
            await asyncio.wait({look}, timeout=max(0.0, self._begun + self._wait - time.monotonic()))
            if look.done():
                look.result()

    @property
    def trouble(self) -> str:
        """Returns a sentence while a look takes longer than `wait`, else ""."""
        if self._look is None or self._look.task.done() or (taken := time.monotonic() - self._begun) < self._wait:
            return ""
        return f"a disk of model_dirs has not answered for {taken:.0f} s"

    async def _looked(self, report: object) -> None:
        await asyncio.get_running_loop().run_in_executor(_THREADS, self._store.look)
