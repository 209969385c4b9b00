"""The models in memory: an operator pins, pauses, resumes and unloads them, and loads them before their first request,
as the start-up list does."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from modelrunner import wire
from modelrunner.errors import BadRequest, InvalidReference, ModelNotFound, ModelRunnerError
from modelrunner.models.configurator import Configurator, SettingParts
from modelrunner.models.installs import InstallOnDemand
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.progress import LoadProgress, ProgressReport, WorkProgress
from modelrunner.scheduler import FitForecast, Fitting, Scheduler, UnloadResult
from modelrunner.scheduler.state import Reason
from modelrunner.store import Store, StoredModel

log = logging.getLogger(__name__)
_TELL_EVERY = 0.5  # seconds
# Events after which failed models are loaded again.
_MENDING = frozenset({"pull", "install", "configure"})
# Why a runner went that comes back when there is room.
_CROWDED = frozenset({Reason.ROOM.code, Reason.MEMORY.code})
_QUIET = 4.0  # seconds without an event, after which free room is looked for, and at the clock
_MOST_GROUPS = 8  # groups whose models are loaded at the same time


class Residency:
    """A `reference` is a whole name or an ID of a model. The methods raise `ModelNotFound`, `InvalidReference`."""

    def __init__(
        self, store: Store, scheduler: Scheduler, registry: BackendRegistry, configurator: Configurator
    ) -> None:
        self._store = store
        self._scheduler = scheduler
        self._registry = registry
        self._configurator = configurator

    async def pin(self, reference: str, *, pin: bool) -> wire.ModelState:
        """Pins the model, so that it is never evicted for another model, or unpins it: at once, and in its
        configuration. Raises as `Configurator.change`."""
        model = self._whole(reference)
        await self._configurator.change(model.id, {"pin": pin})
        return self._of(model, "is never evicted" if pin else "is evicted where another model needs the memory")

    async def pause(self, reference: str) -> wire.ModelState:
        """Unloads the model and the presets of it, and lets their requests wait until `resume`. Returns when the
        runners are gone, or after the time limit of a drain."""
        model = self._whole(reference)
        pause = self._scheduler.pause(model.id, self._store.files_id(model.id))
        await asyncio.shield(asyncio.ensure_future(pause))
        return self._of(model, "is paused: its requests wait for `modelrunner resume`")

    def resume(self, reference: str) -> wire.ModelState:
        """Lets a paused model answer again, and the presets of it."""
        model = self._whole(reference)
        self._scheduler.resume(self._store.files_id(model.id))
        return self._of(model, "answers again: its next request loads it")

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

    def _of(self, model: StoredModel, what: str) -> wire.ModelState:
        states = (runner.state for runner in self._scheduler.runners() if model.id in runner.models)
        return wire.ModelState(model.name, next(states, "stopped"), f"{model.name} {what}")


class ModelGroup(Protocol):
    """`models` are the references of models that are loaded together."""

    @property
    def models(self) -> Sequence[str]: ...


class Preloader:
    """Reports a model of the start-up list that could not be loaded as missing with the scheduler's `Diagnostics`.
    `starting` is True until every model of the list was loaded or has failed once."""

    def __init__(self, parts: SettingParts, on_demand: InstallOnDemand, groups: Mapping[str, ModelGroup]) -> None:
        self._parts = parts
        self._store, self._resolver, self._scheduler = parts.store, parts.resolver, parts.scheduler
        self._on_demand = on_demand
        self._groups = groups
        self._completing: set[str] = set()
        self._group_places = asyncio.Semaphore(_MOST_GROUPS)
        self.starting = bool(self._resolver.preloads())

    def use_groups(self, groups: Mapping[str, ModelGroup]) -> None:
        """Takes other groups. Those of their models that are loaded bring the rest at their next load."""
        self._groups = groups

    async def load(
        self,
        model: str,
        report: ProgressReport = lambda line: None,
        *,
        may_install: bool = True,
        owner: str | None = None,
    ) -> str:
        """Returns the model's name once its runner is ready, for the asking `owner`; `report` is called every half
        second until then. A missing engine is installed if a request would install it and `may_install` is set. A
        cancelled call stops waiting, but a load that has begun continues. Raises the errors of resolving, installing
        and scheduling."""
        mode = await asyncio.to_thread(self._resolver.main_mode, model)
        if may_install:
            await self._on_demand.prepare(None, model, mode, report)
        else:
            await self._resolver.prepare(None, model, mode)
        target = self._resolver(None, model, mode)
        if lease := self._scheduler.warm(target):
            lease.release()
            return target.name
        waiting = asyncio.ensure_future(self._scheduler.acquire(target, owner=owner))
        try:
            while not waiting.done():
                report(_step(target.name, self._scheduler.diagnostics.progress(target)))
                await asyncio.wait((waiting,), timeout=_TELL_EVERY)
            waiting.result().release()
        finally:
            waiting.cancel()
        return target.name

    async def run(self) -> None:
        """Loads the list, one model after another; after each pull, installation and change of a configuration, it
        loads the failed models again. It installs an engine only once, because a failed installation is such an event.
        A model of the list that had to go for another model or program is loaded again once there is room that nobody
        else waits for. A model that is loaded brings those of its group, where none of the group has to go for them;
        a slow group keeps nothing else waiting. When the hours of models begin or end, their pins and loads follow
        within seconds. Ends with the scheduler."""
        async with asyncio.TaskGroup() as groups:
            await self._follow(groups)

    async def _follow(self, groups: asyncio.TaskGroup) -> None:
        events = self._scheduler.events
        seen, hours = events.last, self._resolver.in_hours()
        wanted = await asyncio.to_thread(self._wanted)
        failed = await self._load(wanted, may_install=True)
        self.starting = False
        away: set[str] = set()
        while not events.closed:
            async with aclosing(events.subscribe(seen, _QUIET)) as feed:
                async for event in feed:
                    if hours != (hours := self._resolver.in_hours()):
                        before, wanted = wanted, await self._turned()
                        away.intersection_update(wanted)
                        for model in set(failed).difference(wanted):
                            self._scheduler.diagnostics.missing(model, None)
                        failed = [model for model in failed if model in wanted]
                        failed += await self._load([m for m in wanted if m not in before], may_install=False)
                    if event is None:
                        back = [model for model in away if await self._has_room(model)]
                        away.difference_update(back)
                        failed += await self._load(back, may_install=False)
                        continue
                    seen = event.id
                    if event.event == "ready":
                        away.discard(event.model)
                        if event.model in failed:
                            failed.remove(event.model)
                            self._scheduler.diagnostics.missing(event.model, None)
                        await self._complete(event.model, groups)
                    elif event.event in _MENDING:
                        failed = await self._load(failed, may_install=False)
                    elif event.details.get("code") in _CROWDED and event.model in await asyncio.to_thread(self._wanted):
                        away.add(event.model)

    async def _turned(self) -> list[str]:
        """Applies the pins of these hours, and returns the list of them."""
        self._resolver.forget()
        for model_id in {id for runner in self._scheduler.runners() for id in runner.models}:
            self._parts.retain(model_id)
        return await asyncio.to_thread(self._wanted)

    async def _complete(self, model: str, tasks: asyncio.TaskGroup) -> None:
        """Begins to load the other models of the groups of a model that is loaded: each group in a task of its own."""
        for name, group in tuple(self._groups.items()):
            models = await asyncio.to_thread(self._named, group.models)
            if model in models and name not in self._completing:
                self._completing.add(name)
                tasks.create_task(self._bring(name, model, models), name=f"group {name}")

    async def _bring(self, group: str, model: str, models: Sequence[str]) -> None:
        try:
            async with self._group_places:
                for other in models:
                    forecast = await self._forecast(other)
                    if forecast is None or forecast.fits is Fitting.NEVER or {*models} & {*forecast.would_evict}:
                        continue
                    try:
                        await self.load(other, may_install=False)
                    except Exception as error:
                        self._tell(other, f"with {model}", error)
        finally:
            self._completing.discard(group)

    async def _has_room(self, model: str) -> bool:
        """Returns True if the model gets its memory at once, and no request waits for a runner."""
        forecast = await self._forecast(model)
        fits = forecast is not None and forecast.fits in (Fitting.NOW, Fitting.SPLIT) and not forecast.would_evict
        return fits and not self._scheduler.waiting()

    async def _forecast(self, model: str) -> FitForecast | None:
        """Returns None for a model that cannot be loaded, whatever the memory."""
        try:
            mode = await asyncio.to_thread(self._resolver.main_mode, model)
            await self._resolver.prepare(None, model, mode)
            return await self._scheduler.diagnostics.fit(self._resolver(None, model, mode))
        except ModelRunnerError:
            return None

    def _wanted(self) -> list[str]:
        """Returns the models of the list, by their names in events."""
        return self._named(self._resolver.preloads())

    def _named(self, models: Sequence[str]) -> list[str]:
        """Returns the names in events of models: IDs or references."""
        here = {model.id: model.tags[0] for model in self._store.list() if model.tags}
        model_id = self._parts.configurations.settings.model_id
        return [here.get(model) or here.get(model_id(model) or "", model) for model in models]

    async def _load(self, models: list[str], *, may_install: bool) -> list[str]:
        """Returns the models that failed."""
        return [model for model in models if not await self._loaded(model, may_install=may_install)]

    async def _loaded(self, model: str, *, may_install: bool) -> bool:
        try:
            await self.load(model, may_install=may_install)
        except Exception as error:  # whatever a backend raises, the other models are loaded all the same
            self._tell(model, "at the start", error)
            self._scheduler.diagnostics.missing(model, str(error))
            return False
        self._scheduler.diagnostics.missing(model, None)
        return True

    def _tell(self, model: str, when: str, error: Exception) -> None:
        fault = None if isinstance(error, ModelRunnerError) else error
        log.error("%s could not be loaded %s: %s", model, when, error, exc_info=fault)
        self._scheduler.events.emit("refuse", model=model, reason=f"it could not be loaded {when}: {error}")


def _step(name: str, load: LoadProgress) -> WorkProgress:
    seconds = load.expected_seconds
    left = f", about {seconds:.0f} s more" if seconds and seconds >= 0.5 else ""
    return WorkProgress(f"Loading {name}: {load.stage}{left}", phase=load.stage)
