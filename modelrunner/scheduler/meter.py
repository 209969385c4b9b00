"""Memory as the scheduler sees it: how much there is, what a run needs, what one was seen to hold."""

from collections.abc import Iterable

from modelrunner.registry import BackendRegistry
from modelrunner.scheduler.ledger import Ledger
from modelrunner.scheduler.memory import Probe
from modelrunner.scheduler.runners import Measure
from modelrunner.scheduler.slots import RunnerSlot, Target
from modelrunner.scheduler.state import Phase
from modelrunner.types import RequiredMemory, Variant


class Meter:
    def __init__(self, registry: BackendRegistry, probe: Probe, ledger: Ledger, measure: Measure) -> None:
        self._registry = registry
        self._probe = probe
        self._ledger = ledger
        self._measure = measure

    def budget(self, slots: Iterable[RunnerSlot]) -> RequiredMemory:
        """What all runners together may hold; `slots` are those that there are."""
        return self._probe({slot.runner.pid: slot.memory for slot in slots if slot.runner.pid is not None})

    async def variants(self, target: Target, budget: RequiredMemory) -> list[Variant]:
        """The ways to run it, the preferred one first. Raises what the backend raises."""
        backend = self._registry.get(target.key.backend)
        return await self._ledger.variants(backend, target.spec, budget)

    async def ask(self, target: Target, budget: RequiredMemory) -> None:
        """Has the engine itself say what the preferred way needs, where it can; slow, and for later."""
        preferred, *_ = await self.variants(target, budget)
        await self._ledger.ask(self._registry.get(target.key.backend), preferred.spec)

    async def asleep(self, slot: RunnerSlot) -> RequiredMemory:
        """What a sleeping runner holds. Says nothing about its next load."""
        return await self._measure(slot.runner) or slot.asleep()

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
