"""What a simulated machine consists of: engines, queues and timers in virtual time. `simulator.py` drives them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from workloads import Client

from modelrunner.scheduler.state import Phase, Request, Slot
from modelrunner.types import RequiredMemory

Later = Callable[[float, Callable[[], None]], None]


@dataclass
class SimulatedRunner:
    """One simulated engine. `inside` are requests that hold a lease and wait for a sequence, with the time when they
    came. It has stood still for `still` seconds in all; `since` is the begin of the present standstill, which they do
    not include. The properties are those of a `RunnerSlot` that `Standstill` reads."""

    slot: Slot
    clock: Callable[[], float]
    working: int = 0
    inside: list[tuple[Client, float]] = field(default_factory=list)
    still: float = 0.0
    since: float | None = None

    def __hash__(self) -> int:
        return id(self)

    @property
    def runner(self) -> "SimulatedRunner":
        return self

    @property
    def target(self) -> Slot:
        return self.slot

    @property
    def interactive(self) -> int:
        return self.slot.interactive

    @property
    def awaited(self) -> int:
        return self.slot.leases

    @property
    def phase(self) -> Phase:
        return self.slot.phase

    @property
    def memory(self) -> RequiredMemory:
        return self.slot.memory

    def hold(self) -> None:
        self.since = self.clock()

    def go_on(self) -> None:
        if self.since is not None:
            self.still, self.since = self.still + self.clock() - self.since, None

    def stood_still(self) -> float:
        """Seconds, the present standstill included."""
        return self.still + (self.clock() - self.since if self.since is not None else 0.0)


class Waiting(NamedTuple):
    request: Request
    client: Client


class SimulatedQueue(dict[int, Waiting]):
    """The requests that wait for a key, as `Standstill` reads them."""

    @property
    def tickets(self) -> "SimulatedQueue":
        return self


class VirtualAlarm:
    """An `Alarm` in virtual time: `later` calls a function after so many seconds."""

    def __init__(self, ring: Callable[[], None], clock: Callable[[], float], later: Later) -> None:
        self._ring, self._clock, self._later = ring, clock, later
        self._at = math.inf

    def at(self, time: float) -> None:
        self._at = time
        self._later(max(0.0, time - self._clock()), lambda: self._due(time))

    def cancel(self) -> None:
        self._at = math.inf

    def _due(self, time: float) -> None:
        if time == self._at:
            self._at = math.inf
            self._ring()
