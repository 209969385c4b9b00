"""How runners fall asleep and are woken: what becomes of a plan's `Sleep` and `Wake`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from modelrunner.errors import ModelRunnerError
from modelrunner.scheduler.background import Background
from modelrunner.scheduler.events import Events
from modelrunner.scheduler.meter import Meter
from modelrunner.scheduler.slots import RunnerSlot
from modelrunner.scheduler.state import Phase

log = logging.getLogger(__name__)
# Seconds that an engine which failed at it gets to end by itself: its last words say more than a broken exchange.
_LAST_CHANCE = 1.0


class Dozing:
    """`changed` is called after whatever a plan depends on. One that is woken while it falls asleep does so first; one
    that fails at either has crashed."""

    def __init__(
        self,
        meter: Meter,
        events: Events,
        background: Background,
        changed: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._meter = meter
        self._events = events
        self._background = background
        self._changed = changed
        self._clock = clock

    def sleep(self, slot: RunnerSlot) -> None:
        awake = slot.memory
        slot.memory = awake.most(slot.asleep())
        slot.awake, slot.rest = awake, Phase.SLEEPING
        self._background.start(self._sleep(slot))

    def wake(self, slot: RunnerSlot) -> None:
        assert slot.awake is not None
        slot.memory = slot.memory.most(slot.awake)
        slot.rest, slot.load_began = Phase.STARTING, self._clock()
        self._background.start(self._wake(slot))

    async def _sleep(self, slot: RunnerSlot) -> None:
        async with slot.turn:
            if not await self._obeys(slot, slot.runner.sleep):
                return
            self._events.emit(
                "sleep", model=slot.target.name, runner=slot.runner.id, reason="its keep-alive has passed"
            )
            measured = await self._meter.asleep(slot)
            if slot.phase is Phase.SLEEPING:
                slot.memory = slot.measured = measured
                self._changed()

    async def _wake(self, slot: RunnerSlot) -> None:
        async with slot.turn:
            if not await self._obeys(slot, slot.runner.wake):
                return
        assert slot.awake is not None
        slot.memory, slot.measured = slot.awake, None
        slot.rest = slot.awake = None
        slot.ready_at = slot.last_used = self._clock()
        seconds = round(slot.ready_at - slot.load_began, 3)
        self._events.emit("wake", model=slot.target.name, runner=slot.runner.id, seconds=seconds)
        self._changed()
        if await self._meter.measure(slot, fresh=False):
            self._changed()

    async def _obeys(self, slot: RunnerSlot, order: Callable[[], Awaitable[None]]) -> bool:
        """False too for one that was asked to end meanwhile."""
        if slot.stopping or slot.ended:
            return False
        try:
            await order()
        except ModelRunnerError as error:
            await self._has_crashed(slot, error)
        return not (slot.stopping or slot.ended)

    async def _has_crashed(self, slot: RunnerSlot, error: ModelRunnerError) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_CHANCE):
                await slot.gone.wait()
        if slot.task is None or slot.stopping or slot.ended:
            return
        slot.error, slot.stopping = error, True
        slot.runner.mark_stopping()
        slot.task.cancel()
        self._changed()
