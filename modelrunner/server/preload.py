"""Loading models before anybody asks for them: one that a client names, or those of the start-up list."""

import asyncio
import logging
from contextlib import aclosing
from typing import Any

from modelrunner import api
from modelrunner.errors import ModelRunnerError
from modelrunner.scheduler import Scheduler
from modelrunner.server.resolve import Resolver, main_mode
from modelrunner.server.streaming import Report
from modelrunner.store import Store

log = logging.getLogger(__name__)
_TELL_EVERY = 0.5  # seconds
# After these a model that could not be loaded is tried again.
_MENDING = frozenset({"pull", "install", "configure"})


class Preloader:
    """A model of the start-up list that could not be loaded is noted as missing with the scheduler's `Insight`."""

    def __init__(self, store: Store, resolver: Resolver, scheduler: Scheduler) -> None:
        self._store = store
        self._resolver = resolver
        self._scheduler = scheduler

    async def load(self, model: str, report: Report = lambda line: None) -> str:
        """Returns the model's name once its runner is ready; `report` is told how far it is. Cancelled, it waits no
        more, and a load that has begun goes on. Raises what resolving and scheduling raise."""
        bundle = await asyncio.to_thread(self._store.bundle, model)
        mode = main_mode(bundle)
        await self._resolver.prepare(None, model, mode)
        target = self._resolver(None, model, mode)
        waiting = asyncio.ensure_future(self._scheduler.acquire(target))
        try:
            while not waiting.done():
                report(_line(target.name, self._scheduler.insight.progress(target)))
                await asyncio.wait((waiting,), timeout=_TELL_EVERY)
            waiting.result().release()
        finally:
            waiting.cancel()
        return target.name

    async def run(self) -> None:
        """Loads the list, one model after the other; then, whenever something was mended, those that failed. Does not
        end by itself before the scheduler does."""
        events = self._scheduler.events
        seen = events.last
        failed = await self._load(await asyncio.to_thread(self._wanted))
        while failed and not events.closed:
            async with aclosing(events.subscribe(seen)) as feed:
                async for event in feed:
                    assert event is not None
                    seen = event.id
                    if event.event == "ready" and event.model in failed:
                        failed.remove(event.model)
                        self._scheduler.insight.missing(event.model, None)
                    elif event.event in _MENDING:
                        failed = await self._load(failed)

    def _wanted(self) -> list[str]:
        """By the names that events have for them."""
        here = {model.id: model.tags[0] for model in self._store.list() if model.tags}
        return [here.get(model, model) for model in self._resolver.preloads()]

    async def _load(self, models: list[str]) -> list[str]:
        """Returns those that failed."""
        return [model for model in models if not await self._loaded(model)]

    async def _loaded(self, model: str) -> bool:
        try:
            await self.load(model)
        except Exception as error:  # whatever a backend raises, the other models are loaded all the same
            fault = None if isinstance(error, ModelRunnerError) else error
            log.error("%s is to be loaded from the start, and is not: %s", model, error, exc_info=fault)
            self._scheduler.events.emit("refuse", model=model, reason=f"it was to be loaded from the start: {error}")
            self._scheduler.insight.missing(model, str(error))
            return False
        self._scheduler.insight.missing(model, None)
        return True


def _line(name: str, progress: dict[str, Any]) -> api.Progress:
    seconds = progress["expected_seconds"]
    left = f", about {seconds:.0f} s more" if seconds and seconds >= 0.5 else ""
    return api.Progress("progress", f"Loading {name}: {progress['stage']}{left}", phase=str(progress["stage"]))
