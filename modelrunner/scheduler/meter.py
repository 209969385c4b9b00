"""Memory as the scheduler sees it: how much there is, what a run needs, what one was seen to hold."""

import math
from collections.abc import Callable, Iterable

from modelrunner.backend import BackendRegistry
from modelrunner.scheduler.ledger import Ledger
from modelrunner.scheduler.memory import Probe
from modelrunner.scheduler.runners import Measure
from modelrunner.scheduler.slots import RunnerSlot, Target
from modelrunner.scheduler.state import Phase
from modelrunner.types import RequiredMemory, Variant

# Seconds for which a budget is taken as known: looking takes milliseconds where there are many processes.
_BUDGET_AGE = 1.0


class Meter:
    def __init__(
        self, registry: BackendRegistry, probe: Probe, ledger: Ledger, measure: Measure, clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._probe = probe
        self._ledger = ledger
        self._measure = measure
        self._clock = clock
        self._budget, self._probed = RequiredMemory(0), -math.inf

    def budget(self, slots: Iterable[RunnerSlot]) -> RequiredMemory:
        """What all runners together may hold, as it was at most a second ago; `slots` are those that there are."""
        now = self._clock()
        if now - self._probed >= _BUDGET_AGE:
            self._budget = self._probe([pid for slot in slots if (pid := slot.runner.pid) is not None])
            self._probed = now
        return self._budget

    async def variants(self, target: Target, budget: RequiredMemory) -> list[Variant]:
        """The ways to run it, the preferred one first. Raises what the backend raises."""
        backend = self._registry.get(target.key.backend)
        return await self._ledger.variants(backend, target.spec, budget)

    async def measure(self, slot: RunnerSlot, *, fresh: bool) -> bool:
        """Takes down what the runner holds, which counts for it from now on; `fresh` when it has only loaded its model.
        False if that cannot be said: a process on its way out holds less than it did."""
        measured = await self._measure(slot.runner)
        if measured is None or slot.phase not in (Phase.READY, Phase.DRAINING):
            return False
        backend = self._registry.get(slot.target.key.backend)
        slot.memory = self._ledger.record(backend, slot.variant.spec, measured, fresh=fresh)
        slot.measured = measured
        return True
