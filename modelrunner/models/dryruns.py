"""Asks an engine for its own estimate of a model's memory (`HasDryRun.dry_run`), after a pull and after a change of the
model's configuration. The scheduler remembers the answer; a load never waits for it."""

import asyncio
import logging
from contextlib import aclosing

from modelrunner.errors import ModelRunnerError
from modelrunner.models.resolve import Resolver, main_mode
from modelrunner.scheduler import Scheduler
from modelrunner.store import Store

log = logging.getLogger(__name__)


class DryRuns:
    def __init__(self, store: Store, resolver: Resolver, scheduler: Scheduler) -> None:
        self._store = store
        self._resolver = resolver
        self._scheduler = scheduler

    async def run(self) -> None:
        """Asks about one model after another, until the daemon ends."""
        async with aclosing(self._scheduler.events.subscribe()) as feed:
            async for event in feed:
                if event is not None and event.event in ("pull", "configure"):
                    await self._ask(event.model)

    async def _ask(self, model: str) -> None:
        try:
            mode = main_mode(await asyncio.to_thread(self._store.bundle, model))
            await self._resolver.prepare(None, model, mode)
            await self._scheduler.ask(self._resolver(None, model, mode))
        except (ModelRunnerError, OSError) as error:  # a request for the model gets the same error
            log.debug("%s: its memory could not be asked for: %s", model, error)
