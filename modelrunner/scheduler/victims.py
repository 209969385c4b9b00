"""Who has to go for whom: what it costs that a runner goes, how long it is spared, and the choice. Pure."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from modelrunner.scheduler.room import Room, Vector, add, covers, subtract, total
from modelrunner.scheduler.state import Phase, Policy, Slot
from modelrunner.types import RunnerKey

# Bytes per second at which a model is assumed to load as long as that was not measured: a disk's speed, rather low.
ASSUMED_RATE = 500e6
_MOST_PATIENCES = 6.0
# A busy runner is dearer than all idle ones together, one that more requests wait for twice that: it would be loaded
# again for them. A sleeping one is cheaper.
_BUSY, _ASLEEP = 1e9, 1e-9


def eviction_cost(slot: Slot, now: float) -> float:
    """The loading that evicting the slot is expected to bring, in seconds per second: the time that its load took, over
    the seconds since it was used last (and one). For what people use and leave, the rate at which it is used again
    falls about as one over the time since it was (as in GreedyDual-Size and its kin, a cache that weighs recency with
    the cost of a miss), and the load is what a use would then have to wait for. A load that was not measured counts as
    its bytes at `ASSUMED_RATE`. How much room it gives is for the choice of the set: see `choose`."""
    load = slot.load_seconds or (slot.memory.ram + sum(slot.memory.vram)) / ASSUMED_RATE
    return load / (1.0 + max(0.0, now - slot.last_used))


def patience(served: int, queued: int, policy: Policy) -> float:
    """How long, in seconds, a request that waits for room lets itself be overtaken, while ready runners serve so many
    and so many queue for them: the policy's patience, and as much again for each eighth that queues, at most six times.
    What is served meanwhile needs no load of its own: queues end before a model goes, and larger batches serve all."""
    times = min(1.0 + 8.0 * queued / max(1, served), _MOST_PATIENCES)
    return min(times * policy.patience, policy.max_wait / 4)


def spared_until(slot: Slot, queued: int, policy: Policy, waiting: int = 1) -> float:
    """When the runner may be taken for room that so many requests wait for, while so many queue for ready runners. A
    busy one stays after its load for `policy.residency` times as long as that took, at least for the patience of others
    and at most for a quarter of the maximum wait: two models in turns then spend most of the time serving, not loading.
    One that nobody holds stays after its last use, at most for the patience, until those who wait have waited for
    `policy.linger` times its load, all of them together, or for as long as more queue: where clients ask in a loop, it
    is used again before that, and a queue that ends in its company needs no load afterwards."""
    if slot.phase is not Phase.READY:
        return -math.inf
    if not slot.leases:
        spared = policy.patience
        if queued <= waiting:
            spared = min(spared, policy.linger * slot.load_seconds / waiting)
        return slot.last_used + spared
    return slot.ready_at + min(max(policy.residency * slot.load_seconds, policy.patience), policy.max_wait / 4)


class Candidate(NamedTuple):
    """A runner that may have to go for another: for a single request from `until` on, a busy one for more as well."""

    cost: float
    size: Vector
    slot: Slot
    until: float = -math.inf


class Pool:
    """Candidates, the cheapest for the room they give first, and what they give together; for most groups a look at
    that is enough."""

    def __init__(self, candidates: Iterable[Candidate], room: Room) -> None:
        self.ranked = sorted(candidates, key=lambda c: c.cost / _share(c.size, room.budget))
        self.total = total([c.size for c in self.ranked], room.none)

    def remove(self, victim: Candidate) -> None:
        """Also one that is not in it, since it is spared."""
        if victim in self.ranked:
            self.ranked.remove(victim)
            self.total = subtract(self.total, victim.size)


class Victims:
    """The runners that may have to go, within one plan: `idle` ones, which go at once, and busy ones, which are
    drained; none of `kept`. `waiting` says how many requests wait for a key."""

    def __init__(
        self,
        slots: Iterable[Slot],
        kept: Collection[RunnerKey],
        waiting: Mapping[RunnerKey, int],
        room: Room,
        policy: Policy,
        now: float,
    ) -> None:
        self._room, self._policy, self._now = room, policy, now
        self._idle: list[Candidate] = []
        self._busy: list[Candidate] = []
        self._pools: dict[tuple[int, bool], tuple[Pool, Pool]] = {}
        slots = list(slots)
        ready = [slot for slot in slots if slot.phase is Phase.READY]
        served = sum([slot.leases for slot in ready])
        self._idling = not served
        self._queued = sum([waiting.get(slot.key, 0) for slot in ready])
        for slot in slots:
            wanted = slot.key in waiting
            if not slot.pinned and slot.key not in kept and _may_go(slot, wanted):
                self._add(slot, wanted)
        self._patience = patience(served, self._queued, policy)

    def _add(self, slot: Slot, wanted: bool) -> None:
        cost = eviction_cost(slot, self._now) * (_ASLEEP if slot.phase is Phase.SLEEPING else 1.0)
        cost += _BUSY * ((slot.leases > 0) + wanted)
        until = spared_until(slot, self._queued, self._policy)
        candidate = Candidate(cost, self._room.vector(slot.memory), slot, until)
        (self._busy if slot.leases else self._idle).append(candidate)

    def take(self, shortage: Vector, since: float, waiting: int) -> list[Candidate]:
        """The runners whose going covers `shortage` for so many, of whom the first has waited since `since`; they are
        candidates no longer. Idle ones where they suffice, else, when it has been overtaken long enough, busy ones too;
        none if that takes others, or time. Idle ones are spared until then, where anything is served meanwhile, busy
        ones until half of the maximum wait is over."""
        waited = self._now - since
        overtaken = waited >= self._patience
        for_whom = 0 if overtaken or self._idling else waiting
        idle, busy = self._of(for_whom, waited >= self._policy.max_wait / 2)
        if covers(idle.total, shortage):
            victims = choose(idle.ranked, shortage)
        elif overtaken and covers(add(idle.total, busy.total), shortage):
            victims = choose(idle.ranked + busy.ranked, shortage)
        else:
            return []
        self._remove(victims)
        return victims

    def again_at(self, since: float, waiting: int) -> list[float]:
        """When somebody may be had who could not, though nothing happens but time."""
        times = [self._until(c, waiting) for c in self._idle] + [c.until for c in self._busy]
        overtaken = [since + self._patience, since + self._policy.max_wait / 2]
        return overtaken + [time for time in times if time > self._now]

    def keep(self, key: RunnerKey) -> None:
        self._remove([c for c in (*self._idle, *self._busy) if c.slot.key == key])

    def _remove(self, victims: Sequence[Candidate]) -> None:
        for victim in victims:
            is_busy = victim.slot.leases > 0
            (self._busy if is_busy else self._idle).remove(victim)
            for idle, busy in self._pools.values():
                (busy if is_busy else idle).remove(victim)

    def _until(self, candidate: Candidate, waiting: int) -> float:
        return spared_until(candidate.slot, self._queued, self._policy, waiting)

    def _of(self, waiting: int, any_busy: bool) -> tuple[Pool, Pool]:
        """Idle and busy ones. Among them: idle ones that are spared from so many who wait, 0 for all; busy ones that
        are spared."""
        which = waiting, any_busy
        if which not in self._pools:
            idle = [c for c in self._idle if not waiting or self._until(c, waiting) <= self._now]
            busy = [c for c in self._busy if any_busy or c.until <= self._now]
            self._pools[which] = Pool(idle, self._room), Pool(busy, self._room)
        return self._pools[which]


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
