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
# A busy runner is dearer than all idle ones together.
_BUSY = 1e9


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

    def __init__(self, candidates: Iterable[Candidate], budget: Vector) -> None:
        self.ranked = sorted(candidates, key=lambda c: c.cost / _share(c.size, budget))
        self._none = (0,) * len(budget)
        self.total = total((c.size for c in self.ranked), self._none)

    def remove(self, victims: Sequence[Candidate]) -> None:
        self.ranked = [c for c in self.ranked if c not in victims]
        self.total = total((c.size for c in self.ranked), self._none)


class Victims:
    """The runners that may have to go, within one plan: `idle` ones, which go at once, and busy ones, which are
    drained; those that are spared for now count only for a group that has waited for half of the maximum wait."""

    def __init__(
        self, slots: Iterable[Slot], oldest: Mapping[RunnerKey, float], room: Room, policy: Policy, now: float
    ) -> None:
        """`oldest` says since when somebody waits for a key."""
        self.next = math.inf  # when another one is spared no longer
        idle: dict[bool, list[Candidate]] = {False: [], True: []}
        busy: dict[bool, list[Candidate]] = {False: [], True: []}
        for slot in slots:
            if slot.pinned or not _may_go(slot, slot.key in oldest):
                continue
            cost = eviction_cost(slot, now) + (_BUSY if slot.leases else 0.0)
            candidate = Candidate(cost, room.gives(slot), slot)
            kind = busy if slot.leases else idle
            kind[True].append(candidate)
            until = spared_until(slot, oldest.get(slot.key, math.inf), policy)
            if until <= now:
                kind[False].append(candidate)
            else:
                self.next = min(self.next, until)
        self._idle = {anyone: Pool(found, room.budget) for anyone, found in idle.items()}
        self._busy = {anyone: Pool(found, room.budget) for anyone, found in busy.items()}

    def idle(self, shortage: Vector, anyone: bool) -> list[Candidate]:
        """The runners that nobody holds and whose going covers `shortage`; none if that takes others."""
        pool = self._idle[anyone]
        return choose(pool.ranked, shortage) if covers(pool.total, shortage) else []

    def any(self, shortage: Vector, anyone: bool) -> list[Candidate]:
        """Busy ones too; none if even all of them are not enough."""
        idle, busy = self._idle[anyone], self._busy[anyone]
        if not covers(add(idle.total, busy.total), shortage):
            return []
        return choose(idle.ranked + busy.ranked, shortage)

    def remove(self, victims: Sequence[Candidate]) -> None:
        for pool in (*self._idle.values(), *self._busy.values()):
            pool.remove(victims)


def _may_go(slot: Slot, wanted: bool) -> bool:
    """A load that everybody left may, too."""
    return slot.phase is Phase.READY or (slot.phase is Phase.STARTING and not wanted)


def choose(ranked: Sequence[Candidate], shortage: Vector) -> list[Candidate]:
    """The cheapest candidates that together cover `shortage`, none of which could be spared; all of them together must.
    In the order of cost for the room given until it is enough, then without those that turned out to be needless, the
    dearest first; or the single one that costs less than that set. Not always the optimum of the knapsack problem that
    this is, but never more victims than the shortage asks for."""
    victims: list[Candidate] = []
    missing = shortage
    for candidate in ranked:
        if not any(m > 0 for m in missing):
            break
        victims.append(candidate)
        missing = subtract(missing, candidate.size)
    for candidate in sorted(victims, key=lambda c: -c.cost):
        without = add(missing, candidate.size)
        if not any(m > 0 for m in without):
            victims.remove(candidate)
            missing = without
    single = min((c for c in ranked if covers(c.size, shortage)), key=lambda c: c.cost, default=None)
    if single is not None and single.cost < sum(c.cost for c in victims):
        return [single]
    return victims


def _share(size: Vector, budget: Vector) -> float:
    """Of the budget, of whichever resource it is most."""
    return max((s / b for s, b in zip(size, budget, strict=True) if b > 0), default=0.0) or 1e-9
