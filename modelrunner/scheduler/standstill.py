"""Puts clients before batches on the same processors and devices. Engines share them whatever the priority of their
requests, so the engines that only batches use stand still while a client waits for an answer of another engine."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from modelrunner.scheduler.eventloop import Alarm
from modelrunner.scheduler.queues import Queues
from modelrunner.scheduler.state import Phase
from modelrunner.types import RunnerKey

if TYPE_CHECKING:
    from modelrunner.scheduler.slots import RunnerSlot

LONGEST = 1.0
"""Seconds of one standstill. Health checks and scrapes of an engine wait longer than that."""
SHARE = 4.0
"""Seconds of standstill for each second of work, so that a batch has a fifth of a busy machine."""
_CLOSE = 1e-3  # seconds
_PROCESSORS = -1  # beside the numbers of devices


class Standstill:
    """`slots` are the scheduler's runners, `queues` the requests that wait; `clock` is in seconds, and `alarm` makes
    the timer."""

    def __init__(
        self,
        slots: "Mapping[RunnerKey, RunnerSlot]",
        queues: Queues,
        clock: Callable[[], float],
        alarm: Callable[[Callable[[], None], Callable[[], float]], Alarm] = Alarm,
    ) -> None:
        self._slots = slots
        self._queues = queues
        self._clock = clock
        self._alarm = alarm(self.look, clock)
        self._held: set[RunnerSlot] = set()
        self._credit = LONGEST  # seconds for which engines may be held
        self._is_spent = False  # until the credit is whole again
        self._looked = clock()

    def look(self) -> None:
        """Holds engines or lets them go on, by the present leases and phases. Called after each change of them."""
        now = self._clock()
        passed, self._looked = now - self._looked, now
        self._credit += -passed if self._held else SHARE * passed
        if self._credit <= _CLOSE:
            self._is_spent = True
        elif self._credit >= LONGEST - _CLOSE:
            self._credit, self._is_spent = LONGEST, False
        wanted = set() if self._is_spent else self._of_batches()
        for slot in self._held - wanted:
            slot.runner.go_on()
        for slot in wanted - self._held:
            slot.runner.hold()
        self._held = wanted
        self._alarm.cancel()
        if wanted:
            self._alarm.at(now + self._credit)
        elif self._is_spent:
            self._alarm.at(now + (LONGEST - self._credit) / SHARE)

    def end(self) -> None:
        self._alarm.cancel()

    def _of_batches(self) -> "set[RunnerSlot]":
        """The runners that work for batches and that no client waits for, if a client waits for another runner on the
        same processors or device."""
        busy = {place for slot in self._slots.values() if slot.interactive for place in _places(slot)}
        if not busy:
            return set()
        used = [slot for slot in self._slots.values() if slot.awaited and not slot.interactive]
        beside = [slot for slot in used if slot.phase is Phase.READY and not busy.isdisjoint(_places(slot))]
        return {slot for slot in beside if not self._has_clients(slot.target.key)}

    def _has_clients(self, key: RunnerKey) -> bool:
        queue = self._queues.get(key)
        return queue is not None and not all(ticket.request.batch for ticket in queue.tickets.values())


def _places(slot: "RunnerSlot") -> set[int]:
    """The places where a runner computes: the devices whose memory it holds, else the processors."""
    return {device for device, size in enumerate(slot.memory.vram) if size} or {_PROCESSORS}
