"""Which runners go for a group of requests that waits for memory, and from when on. Pure.

With p = min(patience, loads * (load of the group's model + load of the runner)), the price of a switch and back:

- An idle runner goes once it has been idle for as long as its own load took, or the group has waited for p.
- A busy runner is drained once the group has waited for p, and the runner has been ready for twice as long as its load
  took.
- A runner that only a batch uses goes at once for an interactive request; no busy runner that interactive requests use
  goes for a batch.

Idle runners go first, and the least recently used first; sleeping ones before all.
"""

import math
from collections.abc import Container, Iterable
from typing import NamedTuple

from modelrunner.scheduler.room import Room, Vector, add, subtract
from modelrunner.scheduler.state import Group, Phase, Policy, Slot
from modelrunner.types import RequiredMemory, RunnerKey

# Bytes per second at which a model is assumed to load until its load was measured: a slow disk.
ASSUMED_RATE = 500e6


def load_time(measured: float, memory: RequiredMemory) -> float:
    """Seconds of a model's last load (`measured`); estimated from its `memory` if there was none (0)."""
    return measured or (memory.ram + sum(memory.vram)) / ASSUMED_RATE


# When a runner may go for a request: at once, as an idle one, or as a busy one.
_AT_ONCE, _IDLE, _BUSY = range(3)


class _Victim(NamedTuple):
    """A runner that may have to go for a request. Its `load` took so many seconds; until `spared` it stays for its own
    sake."""

    slot: Slot
    size: Vector
    when: int
    load: float
    spared: float


class Victims:
    """The runners that may have to go within one plan. `waited_for` are the keys that requests wait for, `urgent` those
    of them with a request that does not yield to interactive ones."""

    def __init__(
        self,
        slots: Iterable[Slot],
        waited_for: Container[RunnerKey],
        urgent: Container[RunnerKey],
        room: Room,
        policy: Policy,
        now: float,
    ) -> None:
        self._slots = sorted([slot for slot in slots if not slot.pinned], key=_rank)
        self._waited_for, self._urgent = waited_for, urgent
        self._policy, self._now, self._room = policy, now, room
        self._victims: dict[bool, list[_Victim]] = {}  # for an urgent group, and for others

    def take(self, shortage: Vector, group: Group) -> tuple[list[Slot], float]:
        """The runners that go for `group`, which lacks `shortage`; they are candidates no longer. None if the runners
        that may go now do not suffice; then the time at which another one may go, infinity if no time helps."""
        most, loads, since, now = self._policy.patience, self._policy.loads, group.since, self._now
        load = load_time(group.load_seconds, group.needs[0])
        chosen: list[_Victim] = []
        missing, again = shortage, math.inf
        for victim in self._candidates(group.key in self._urgent):
            _, size, when, own, spared = victim
            if when and (now < spared or when == _BUSY):
                wait = loads * (load + own)
                waited = since + (wait if wait < most else most)
                # For a busy runner the later of both times, for an idle one the sooner.
                at = waited if (waited > spared) == (when == _BUSY) else spared
                if at > now:
                    again = at if at < again else again
                    continue
            if _helps(size, missing):
                chosen.append(victim)
                missing = subtract(missing, size)
                if max(missing) <= 0:
                    break
        else:
            return [], again
        for victim in chosen[::-1]:  # without those that turned out to be needless
            if max(without := add(missing, victim.size)) <= 0:
                chosen.remove(victim)
                missing = without
        gone = [victim.slot for victim in chosen]
        self._slots = [slot for slot in self._slots if slot not in gone]
        for candidates in self._victims.values():
            candidates[:] = [victim for victim in candidates if victim.slot not in gone]
        return gone, math.inf

    def _candidates(self, urgent: bool) -> list[_Victim]:
        if urgent not in self._victims:
            found = [(slot, self._when(slot, urgent)) for slot in self._slots]
            self._victims[urgent] = [self._victim(slot, when) for slot, when in found if when is not None]
        return self._victims[urgent]

    def _victim(self, slot: Slot, when: int) -> _Victim:
        load = slot.load_seconds or load_time(0.0, slot.memory)
        if when == _IDLE:
            spared = slot.last_used + self._policy.linger * load
        else:
            spared = slot.ready_at + self._policy.residency * load
        return _Victim(slot, self._room.vector(slot.memory), when, load, spared)

    def _when(self, slot: Slot, urgent: bool) -> int | None:
        """None for a runner that may not go: it is leaving, or interactive requests need it more."""
        batch_only = not slot.interactive and slot.key not in self._urgent
        if slot.phase is Phase.SLEEPING:
            return _AT_ONCE
        if slot.phase is Phase.STARTING:
            return _AT_ONCE if slot.key not in self._waited_for or (batch_only and urgent) else None
        if slot.phase is not Phase.READY:
            return None
        if not slot.leases:
            return _IDLE
        if batch_only:
            return _AT_ONCE if urgent else _BUSY
        return _BUSY if urgent else None


def _rank(slot: Slot) -> tuple[bool, bool, float]:
    return slot.leases > 0, slot.phase is not Phase.SLEEPING, slot.last_used


def _helps(size: Vector, missing: Vector) -> bool:
    for s, m in zip(size, missing):  # noqa: B905, SIM110 - any() takes twice as long, as in `covers`
        if s > 0 < m:
            return True
    return False
