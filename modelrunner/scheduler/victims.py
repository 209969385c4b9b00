"""Who has to go for whom: what it costs that a runner goes, how long it is spared, and the choice. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from modelrunner.scheduler.room import Room, Vector, add, covers, subtract, total
from modelrunner.scheduler.state import Phase, Policy, Slot
from modelrunner.types import RunnerKey

# Bytes per second at which a model is assumed to load as long as that was not measured: a disk's speed, rather low.
ASSUMED_RATE = 500e6
# The share of its load time, and the most seconds, for which a runner that was just used may be used again at once.
_LINGER, _MAX_LINGER = 0.25, 1.0
# A busy runner is dearer than all idle ones together, a sleeping one cheaper.
_BUSY, _ASLEEP = 1e9, 1e-9


def eviction_cost(slot: Slot, now: float) -> float:
    """The loading that evicting the slot is expected to bring, in seconds per second: the time that its load took, over
    the seconds since it was used last (and one). For what people use and leave, the rate at which it is used again
    falls about as one over the time since it was (as in GreedyDual-Size and its kin, a cache that weighs recency with
    the cost of a miss), and the load is what a use would then have to wait for. A load that was not measured counts as
    its bytes at `ASSUMED_RATE`. How much room it gives is for the choice of the set: see `choose`."""
    load = slot.load_seconds or (slot.memory.ram + sum(slot.memory.vram)) / ASSUMED_RATE
    return load / (1.0 + max(0.0, now - slot.last_used))


def spared_until(slot: Slot, oldest: float, policy: Policy) -> float:
    """When the runner may be taken for room. After its load it stays for `policy.residency` times as long as that took,
    at least for the patience of others, and, as long as somebody waits for it since before it was ready (`oldest` is
    when the first that waits for it came), for a quarter of the maximum wait, which is the limit of both: two models in
    turns then spend most of the time serving, not loading. One that nobody holds goes earlier, when it was not asked
    for again within a moment (a quarter of its load, at most a second)."""
    if slot.phase is not Phase.READY:
        return -math.inf
    limit = policy.max_wait / 4
    stay = limit if oldest <= slot.ready_at else max(policy.patience, policy.residency * slot.load_seconds)
    until = slot.ready_at + min(stay, limit)
    if slot.leases:
        return until
    return min(until, slot.last_used + min(_MAX_LINGER, _LINGER * slot.load_seconds))


class Candidate(NamedTuple):
    """A runner that may have to go for another."""

    cost: float
    size: Vector
    slot: Slot


class Pool:
    """Candidates, the cheapest for the room they give first, and what they give together; for most groups a look at
    that is enough."""

    def __init__(self, candidates: Iterable[Candidate], room: Room) -> None:
        self.ranked = sorted(candidates, key=lambda c: c.cost / _share(c.size, room.budget))
        self.total = total([c.size for c in self.ranked], room.none)

    def remove(self, victims: Sequence[Candidate]) -> None:
        gone = {id(victim) for victim in victims}
        here = [c for c in self.ranked if id(c) in gone]
        if here:
            self.ranked = [c for c in self.ranked if id(c) not in gone]
            for candidate in here:
                self.total = subtract(self.total, candidate.size)


class Victims:
    """The runners that may have to go, within one plan: `idle` ones, which go at once, and busy ones, which are
    drained; those that are spared for now count only for a group that has waited for half of the maximum wait."""

    def __init__(
        self, slots: Iterable[Slot], oldest: Mapping[RunnerKey, float], room: Room, policy: Policy, now: float
    ) -> None:
        """`oldest` says since when somebody waits for a key."""
        self.next = math.inf  # when another one is spared no longer
        self._room = room
        self._idle: list[Candidate] = []
        self._busy: list[Candidate] = []
        self._spared: set[int] = set()
        self._pools: dict[bool, tuple[Pool, Pool]] = {}
        for slot in slots:
            since = oldest.get(slot.key, math.inf)
            if slot.pinned or not _may_go(slot, since < math.inf):
                continue
            cost = eviction_cost(slot, now) * (_ASLEEP if slot.phase is Phase.SLEEPING else 1.0)
            cost += _BUSY if slot.leases else 0.0
            candidate = Candidate(cost, room.vector(slot.memory), slot)
            (self._busy if slot.leases else self._idle).append(candidate)
            until = spared_until(slot, since, policy)
            if until > now:
                self.next = min(self.next, until)
                self._spared.add(id(candidate))

    def idle(self, shortage: Vector, anyone: bool) -> list[Candidate]:
        """The runners that nobody holds and whose going covers `shortage`; none if that takes others."""
        pool, _ = self._of(anyone)
        return choose(pool.ranked, shortage) if covers(pool.total, shortage) else []

    def any(self, shortage: Vector, anyone: bool) -> list[Candidate]:
        """Busy ones too; none if even all of them are not enough."""
        idle, busy = self._of(anyone)
        if not covers(add(idle.total, busy.total), shortage):
            return []
        return choose(idle.ranked + busy.ranked, shortage)

    def keep(self, key: RunnerKey) -> None:
        self.remove([c for c in (*self._idle, *self._busy) if c.slot.key == key])

    def remove(self, victims: Sequence[Candidate]) -> None:
        gone = {id(victim) for victim in victims}
        self._idle = [c for c in self._idle if id(c) not in gone]
        self._busy = [c for c in self._busy if id(c) not in gone]
        for idle, busy in self._pools.values():
            idle.remove(victims)
            busy.remove(victims)

    def _of(self, anyone: bool) -> tuple[Pool, Pool]:
        """Idle and busy ones, the spared among them or not."""
        if anyone not in self._pools:
            idle = [c for c in self._idle if anyone or id(c) not in self._spared]
            busy = [c for c in self._busy if anyone or id(c) not in self._spared]
            self._pools[anyone] = Pool(idle, self._room), Pool(busy, self._room)
        return self._pools[anyone]


def _may_go(slot: Slot, wanted: bool) -> bool:
    """A load that everybody left may, too."""
    return slot.phase in (Phase.READY, Phase.SLEEPING) or (slot.phase is Phase.STARTING and not wanted)


def choose(ranked: Sequence[Candidate], shortage: Vector) -> list[Candidate]:
    """The cheapest candidates that together cover `shortage`, none of which could be spared; all of them together must.
    In the order of cost for the room given until it is enough, then without those that turned out to be needless, the
    dearest first; or the single one that costs less than that set. Not always the optimum of the knapsack problem that
    this is, but never more victims than the shortage asks for."""
    victims: list[Candidate] = []
    missing = shortage
    for candidate in ranked:
        if max(missing) <= 0:
            break
        victims.append(candidate)
        missing = subtract(missing, candidate.size)
    for candidate in sorted(victims, key=lambda c: -c.cost):
        without = add(missing, candidate.size)
        if max(without) <= 0:
            victims.remove(candidate)
            missing = without
    least = sum(victim.cost for victim in victims)
    for candidate in ranked:
        if candidate.cost < least and covers(candidate.size, shortage):
            victims, least = [candidate], candidate.cost
    return victims


def _share(size: Vector, budget: Vector) -> float:
    """Of the budget, of whichever resource it is most."""
    return max([s / b for s, b in zip(size, budget, strict=True) if b > 0], default=0.0) or 1e-9
