"""Explains why the requests of a model wait, and whether a model would fit into memory and on the disk."""

import asyncio
import contextlib
import shutil
from dataclasses import dataclass, replace

from modelrunner.errors import (
    BackendUnavailable,
    InvalidReference,
    ModelNotFound,
    ModelRunnerError,
    Unavailable,
)
from modelrunner.models.configurations import Configurations, ModelSettings
from modelrunner.models.resolve import Resolver, main_mode
from modelrunner.pull import Preview, Puller
from modelrunner.pull.places import roomy
from modelrunner.scheduler import Explanation, FitForecast, Obstacle, Scheduler, Standing, Target
from modelrunner.store import Reference, Store
from modelrunner.types import Bundle, Mode


@dataclass(frozen=True, slots=True)
class FitReport:
    """Bytes on disk: `disk_needed` is 0 for a model that is here."""

    forecast: FitForecast
    disk_needed: int
    disk_free: int


class Explainer:
    def __init__(
        self,
        store: Store,
        configurations: Configurations,
        resolver: Resolver,
        scheduler: Scheduler,
        puller: Puller,
    ) -> None:
        self._store = store
        self._configurations = configurations
        self._resolver = resolver
        self._scheduler = scheduler
        self._puller = puller

    async def why(self, reference: str, mode: str | None = None) -> Explanation:
        """Explains why the model's requests wait, or why its next request would wait; by default in its main mode. It
        explains a model that is being pulled, or whose engine is missing, too. Raises `ModelNotFound`,
        `InvalidReference`, `BadRequest`, and the errors of the backend's estimate."""
        diagnostics = self._scheduler.diagnostics
        try:
            target = await self._target(reference, mode)
        except ModelNotFound:
            if (pull := self._puller.under_way(reference)) is None:
                raise
            return diagnostics.absent(
                reference, Standing.PULLING, Obstacle.PULL, f"{reference} is being pulled: {pull.message}"
            )
        except (BackendUnavailable, Unavailable) as error:
            state = Standing.INSTALLING if isinstance(error, Unavailable) else Standing.FAILED
            return diagnostics.absent(reference, state, Obstacle.INSTALL, error.message)
        return await diagnostics.why(target)

    async def fit(self, reference: str) -> FitReport:
        """Returns whether the model would get its memory now. An absent model is estimated from its header, if its
        source allows reading a part of the file; else from the size of its files, which the forecast's reason tells.
        Raises as `why`, and `NotImplementedHere` if a source does not tell the size of its model."""
        free = await asyncio.to_thread(lambda: shutil.disk_usage(roomy(self._store, 0)).free)
        try:
            return FitReport(await self._scheduler.diagnostics.fit(await self._target(reference, None)), 0, free)
        except (ModelNotFound, InvalidReference):  # the address of a file is not a reference
            preview = await self._puller.preview(reference)
            return FitReport(await self._fit_unseen(reference, preview), preview.size, free)

    async def _fit_unseen(self, reference: str, preview: Preview) -> FitForecast:
        if preview.bundle is not None:
            with contextlib.suppress(ModelRunnerError):  # no engine for it is installed
                name = Reference.parse(preview.bundle.name)
                settings = self._configurations.settings.for_absent(name, preview.bundle.model_id)
                target = await asyncio.to_thread(self._target_of, preview.bundle, settings)
                return await self._scheduler.diagnostics.fit(target)
        forecast = self._scheduler.diagnostics.fit_bytes(reference, preview.size)
        reason = (
            f"{forecast.reason}. This counts the files alone: a context needs more, which is known once it is pulled"
        )
        return replace(forecast, reason=reason)

    def _target_of(self, bundle: Bundle, settings: ModelSettings) -> Target:
        mode = main_mode(bundle)
        backend = self._resolver.configured_backend(bundle, mode, settings)
        return self._resolver.target(backend, bundle, mode, settings)

    async def _target(self, reference: str, mode: str | None) -> Target:
        named = None if mode is None else Mode.parse(mode)
        wanted = named if named is not None else await asyncio.to_thread(self._resolver.main_mode, reference)
        await self._resolver.prepare(None, reference, wanted)
        return self._resolver(None, reference, wanted)
