"""Decides which runners go for a group of requests that waits for memory, and when. Pure.

A switch and back costs price = load(group's model) + load(runner). Let wait = min(patience, 8 * price).

- An idle runner goes at once for a request that came after its last answer: that may be the same client's, who has
  changed the model. For one that came before, or if others wait for the runner, so that two want the room in turn, it
  goes once its rest has cost all requests of the group together load(runner) (those of a batch alone count as one), or
  the group has waited for `wait`.
- A busy runner is drained once it has been ready for `price`, and the group has waited for `wait`.
- A runner that only a batch uses goes at once for an interactive request, and no runner that interactive requests use
  goes for a batch.
- A runner that sleeps, or loads without a waiting request, goes at once.

The least recently used runner goes first. A busy runner is in use now, so it goes after all idle ones; a sleeping
runner goes before all.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from modelrunner.scheduler.allocation import Allocations, Vector, add, subtract
from modelrunner.scheduler.state import Group, Phase, Policy, RunnerId, Site, Slot
from modelrunner.types import RequiredMemory, RunnerKey

# Bytes per second at which a model is assumed to load until its load was measured: a slow disk.
_ASSUMED_RATE = 500e6
_NEVER = (math.inf, math.inf)  # the cost where no runner will ever go


def _load_time(measured: float, memory: RequiredMemory) -> float:
    """Seconds of a model's last load (`measured`); estimated from its `memory` if there was none (0)."""
    return measured or memory.total / _ASSUMED_RATE


class Proposal(NamedTuple):
    """What room for a group would take. No victims if none may go yet, or never."""

    victims: tuple[Slot, ...]
    again: float
    """The time at which another one may go; infinity for never, or if there are victims."""
    cost: tuple[float, ...]
    """The lower, the better: to wait is worse than to evict, and a busy runner costs more than idle ones; then the
    seconds that the victims load count, and then how lately they were used."""


class _Victim(NamedTuple):
    """A runner of `size` that loads in `load` seconds. It may go at `earliest` + `price` if the group has waited for
    `wait` by then. An idle one may go after its rest since `idle_since` in any case, and at once for a group that began
    to wait later."""

    slot: Slot
    id: RunnerId
    size: Vector
    load: float
    earliest: float
    idle_since: float


class MayGo(NamedTuple):
    """The runners of a site that may go `now` for a group, and the time at which another one may go `again`."""

    now: Sequence[_Victim]
    again: float


@dataclass
class Eviction:
    """The candidates for eviction within one plan, on each host: `slots` but for those that are `gone`. `waited_for`
    are the keys that requests wait for, `urgent` those of them with a request that does not yield to interactive
    ones."""

    slots: Collection[Slot]
    waited_for: Container[RunnerKey]
    urgent: Container[RunnerKey]
    memory: Allocations
    policy: Policy
    now: float
    gone: set[RunnerId] = field(default_factory=set)
    _candidates: dict[tuple[Site, bool], list[_Victim]] = field(
        default_factory=dict
    )  # by site; for urgent groups, others
    _least: dict[bool, dict[Site, tuple[float, ...]]] = field(
        default_factory=dict
    )  # for urgent groups, others; by host
    _cheapest: dict[bool, list[tuple[tuple[float, ...], Site]]] = field(default_factory=dict)  # the same, in order

    @cached_property
    def _there(self) -> dict[Site, list[Slot]]:
        """What there is of runners on each host, without the pinned ones."""
        slots: dict[Site, list[Slot]] = {}
        for slot in self.slots:
            if not slot.pinned:
                if not (place := slot.option.place).others:
                    slots.setdefault(place.host, []).append(slot)
                    continue
                for host, part in self.memory.parts(slot):
                    slots.setdefault(host, []).append(part)
        return slots

    def rank(self, slot: Slot) -> tuple[float, ...]:
        """Runners with a lower rank go first."""
        return slot.leases > 0, slot.phase is not Phase.SLEEPING, slot.last_used

    def spared(self, slot: Slot, urgent: bool) -> tuple[float, float] | None:
        """`earliest` and `idle_since` as in `_Victim`. None if the runner may not go: it is leaving, or requests need
        it more."""
        at_once = -math.inf, -math.inf
        interactive = bool(slot.interactive or slot.key in self.urgent)
        match slot.phase:
            case Phase.SLEEPING:
                return at_once
            case Phase.STARTING:
                return at_once if slot.key not in self.waited_for or (urgent and not interactive) else None
            case Phase.READY if not slot.leases:
                return -math.inf, slot.last_used
            case Phase.READY if urgent is interactive:
                return slot.ready_at, math.inf
            case Phase.READY if urgent:
                return at_once
        return None

    def may_go(self, group: Group, site: Site) -> MayGo:
        """Those on the `site` that may go for `group` now, in their order."""
        policy, load = self.policy, _load_time(group.load_seconds, group.options[0].memory)
        now, began, asked, again = [], group.since, group.waiting[0].since, math.inf
        urgent = group.key in self.urgent
        share = policy.spare / (len(group.waiting) if urgent else 1)
        for candidate in self._those_for(site, urgent):
            slot, id, _, own, earliest, idle_since = candidate
            if id in self.gone:
                continue
            if idle_since > asked or (idle_since > -math.inf and slot.key in self.waited_for):
                price = load + own
                wait, rest = policy.loads * price, share * own
                waited = began + (wait if wait < policy.patience else policy.patience)
                spared = earliest + policy.spare * price
                at = waited if waited > spared else spared
                at = at if at < idle_since + rest else idle_since + rest
                if at > self.now:
                    again = at if at < again else again
                    continue
            now.append(candidate)
        return MayGo(now, again)

    def propose(self, shortage: Vector, may: MayGo) -> Proposal:
        """Returns the runners that would go where `shortage` is missing, of those that may. If they do not suffice,
        returns none, and the time at which another one may go."""
        chosen, missing = list[_Victim](), shortage
        short = [i for i, size in enumerate(shortage) if size > 0]
        for candidate in may.now:
            if not any(candidate.size[i] for i in short):
                continue
            chosen.append(candidate)
            missing = subtract(missing, candidate.size)
            if max(missing) <= 0:
                break
        else:
            return Proposal((), may.again, (math.inf, may.again))
        for candidate in chosen[::-1]:  # without those that turned out to be needless
            if max(without := add(missing, candidate.size)) <= 0:
                chosen.remove(candidate)
                missing = without
        slots = tuple([candidate.slot for candidate in chosen])
        loads, last_used = sum([victim.load for victim in chosen]), max([slot.last_used for slot in slots])
        return Proposal(slots, math.inf, (any(slot.leases for slot in slots), loads, last_used))

    def cheapest_first(
        self, sites: Container[Site], several: Sequence[Site], group: Group
    ) -> Iterator[tuple[tuple[float, ...], Site]]:
        """Those of the sites on which runners may ever go for `group`, each with what a proposal there costs at least,
        the least first; then the others. `several` are those of several hosts."""
        urgent = group.key in self.urgent
        if urgent not in self._cheapest:
            least = self._least[urgent] = {host: self._least_cost(host, urgent) for host in self.memory}
            self._cheapest[urgent] = sorted([(cost, host) for host, cost in least.items()])
        of_one_host = (each for each in self._cheapest[urgent] if each[1] in sites)
        if not several:
            return of_one_host
        of_several = [(min([self._least[urgent][host] for host in site]), site) for site in several]
        return iter(sorted([*of_one_host, *of_several], key=lambda each: each[0]))

    def take(self, slots: Iterable[Slot]) -> None:
        """Notes that these go."""
        self.gone.update([slot.id for slot in slots])
        for host in {host for slot in slots for host, _ in self.memory.parts(slot)}:
            for urgent, order in self._cheapest.items():
                least = self._least[urgent]
                del order[bisect_left(order, (least[host], host))]
                least[host] = self._least_cost(host, urgent)
                insort(order, (least[host], host))

    def _least_cost(self, host: Site, urgent: bool) -> tuple[float, ...]:
        there = [victim for victim in self._those_on(host, urgent) if victim.id not in self.gone]
        return min([(bool(v.slot.leases), v.load, v.slot.last_used) for v in there], default=_NEVER)

    def _those_for(self, site: Site, urgent: bool) -> list[_Victim]:
        if isinstance(site, str):
            return self._those_on(site, urgent)
        if (site, urgent) not in self._candidates:
            nothing = [(0,) * len(self.memory[host].budget) for host in site]
            victims: dict[RunnerId, _Victim] = {}
            for i, host in enumerate(site):
                for victim in self._those_on(host, urgent):
                    size = tuple([n for part in (*nothing[:i], victim.size, *nothing[i + 1 :]) for n in part])
                    if (known := victims.get(victim.id)) is not None:
                        size = add(known.size, size)
                    victims[victim.id] = victim._replace(size=size)
            in_order = sorted(victims.values(), key=lambda victim: self.rank(victim.slot))
            self._candidates[site, urgent] = in_order
        return self._candidates[site, urgent]

    def _those_on(self, host: Site, urgent: bool) -> list[_Victim]:
        if (host, urgent) not in self._candidates:
            victims = self._candidates[host, urgent] = []
            for slot in sorted(self._there.get(host, ()), key=self.rank):
                load = _load_time(slot.load_seconds, slot.memory)
                if spared := self.spared(slot, urgent):
                    victims.append(_Victim(slot, slot.id, self.memory[host].size(slot), load, *spared))
        return self._candidates[host, urgent]
