"""Carries out a plan's orders to sleep and to wake, and knows the memory of runners that can sleep, asleep and awake.
Only vLLM's engines sleep."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from modelrunner.engine.runner import LAST_CHANCE
from modelrunner.errors import ModelRunnerError
from modelrunner.scheduler.eventloop import Background
from modelrunner.scheduler.events import Events
from modelrunner.scheduler.ledger import Account
from modelrunner.scheduler.slots import RunnerSlot
from modelrunner.scheduler.state import Phase, RunnerId
from modelrunner.types import RequiredMemory

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sleeper:
    """A runner that can sleep, at that `level` of `Backend.sleep_level`. `awake` is the memory that counts for
    it when awake, noted while it sleeps. `turn` is held while it falls asleep or is woken: a runner that is woken while
    it falls asleep first falls asleep."""

    slot: RunnerSlot
    level: int
    awake: RequiredMemory | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def asleep(self) -> RequiredMemory:
        """The most that the runner holds while it sleeps. Level 1 moves the weights, which are about as large as their
        files, to main memory."""
        memory, spec = self.awake or self.slot.memory, self.slot.variant.spec
        weights = spec.bundle.size + (spec.draft.size if spec.draft is not None else 0)
        moved = min(weights, sum(memory.vram)) if self.level == 1 else 0
        return replace(memory, ram=memory.ram + moved, vram=(0,) * len(memory.vram))


class Sleeping:
    """All runners that can sleep. `changed` is called after every change that a plan depends on. A runner that fails to
    fall asleep or to wake has crashed."""

    def __init__(
        self,
        account: Account,
        events: Events,
        background: Background,
        changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._account = account
        self._events = events
        self._background = background
        self._changed = changed
        self._clock = clock
        self._sleepers: dict[RunnerId, _Sleeper] = {}

    def add(self, slot: RunnerSlot) -> None:
        """Adds a runner that has just become ready, if it can sleep. What one over several hosts holds asleep cannot be
        known: its workers are measured nowhere."""
        if (level := slot.runner.sleep_level) and not slot.option.place.others:
            sleeper = self._sleepers[slot.id] = _Sleeper(slot, level)
            slot.runner.expect(slot.option.memory.most(sleeper.asleep()))

    def remove(self, slot: RunnerSlot) -> None:
        """Removes a runner whose process is gone."""
        self._sleepers.pop(slot.id, None)

    def view(self) -> Mapping[RunnerId, RequiredMemory]:
        """The value of `State.asleep`."""
        return {key: sleeper.awake or sleeper.asleep() for key, sleeper in self._sleepers.items()}

    def sleep(self, slot: RunnerSlot) -> None:
        sleeper = self._sleepers[slot.id]
        sleeper.awake = slot.memory
        slot.become(Phase.SLEEPING, self._clock())
        slot.count(slot.memory.most(sleeper.asleep()), slot.measured)
        self._background.start(self._sleep(sleeper))

    def wake(self, slot: RunnerSlot) -> None:
        sleeper = self._sleepers[slot.id]
        assert sleeper.awake is not None
        slot.become(Phase.STARTING, self._clock())
        slot.count(slot.memory.most(sleeper.awake), slot.measured)
        self._background.start(self._wake(sleeper, sleeper.awake))

    async def _sleep(self, sleeper: _Sleeper) -> None:
        slot = sleeper.slot
        async with sleeper.turn:
            if not await self._obeys(slot, slot.runner.sleep):
                return
            reason = "its keep-alive has passed"
            self._events.emit("sleep", model=slot.target.name, runner=slot.runner.id, reason=reason)
            measured = await self._account.seen(slot) or sleeper.asleep()
            if slot.phase is Phase.SLEEPING:
                slot.count(measured, measured)
                self._changed()

    async def _wake(self, sleeper: _Sleeper, memory: RequiredMemory) -> None:
        slot = sleeper.slot
        async with sleeper.turn:
            if not await self._obeys(slot, slot.runner.wake):
                return
        sleeper.awake = None
        slot.count(memory, None)
        if slot.phase is Phase.STARTING:
            slot.become(Phase.READY, self._clock())
            seconds = round(self._clock() - slot.load_began, 3)
            self._events.emit("wake", model=slot.target.name, runner=slot.runner.id, seconds=seconds)
        self._changed()
        if await self._account.measure(slot, fresh=False):
            self._changed()

    async def _obeys(self, slot: RunnerSlot, order: Callable[[], Awaitable[None]]) -> bool:
        """True if the engine carried out the order; False if it failed, or if the runner is being stopped."""
        if slot.phase in (Phase.STOPPING, Phase.ENDED):
            return False
        try:
            await order()
        except ModelRunnerError as error:
            await self._crash(slot, error)
        return slot.phase not in (Phase.STOPPING, Phase.ENDED)

    async def _crash(self, slot: RunnerSlot, error: ModelRunnerError) -> None:
        """Ends a runner that failed. Waits `LAST_CHANCE` seconds for the engine to end by itself, since its last words
        explain more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_CHANCE):
                await slot.gone.wait()
        if slot.stop(self._clock()):
            slot.failed(error)
            self._changed()
