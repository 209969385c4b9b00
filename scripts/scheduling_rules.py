"""The rows of the table in docs/scheduling.md: the scheduler as it is, with a rule switched off, and with a rule that
was tried and dropped."""

import math
from dataclasses import replace

from simulator import Rules

from modelrunner.scheduler.eviction import Eviction, MayGo
from modelrunner.scheduler.plan import Plan
from modelrunner.scheduler.state import Group, Phase, Policy, Site, Slot, State


class _OldestRequestFirst(Plan):
    """The model with the oldest request gets memory first, however lately it was served."""

    def __init__(self, state: State, now: float) -> None:
        groups = tuple([replace(group, turn=-math.inf) for group in state.groups])
        super().__init__(replace(state, groups=groups), now)


class _FixedOrder(Eviction):
    """Of several runners that may go, always the same ones do."""

    def rank(self, slot: Slot) -> tuple[float, ...]:
        return slot.leases > 0, sum(slot.key.files.encode())


class _MostRecentlyUsed(Eviction):
    def rank(self, slot: Slot) -> tuple[float, ...]:
        return slot.leases > 0, -slot.last_used


class _BusyOrIdle(Eviction):
    """Least recently used by the last lease that began or ended, even if one runs."""

    def rank(self, slot: Slot) -> tuple[float, ...]:
        return (slot.last_used,)


class _CheapestFirst(Eviction):
    """By load time over idle time: the chance that a model is used again falls as one over its idle time, as
    GreedyDual-Size assumes."""

    def rank(self, slot: Slot) -> tuple[float, ...]:
        return slot.leases > 0, slot.load_seconds / max(1e-3, self.now - slot.last_used)


class _QueuedForLast(Eviction):
    """Of the busy runners, those that requests wait for go last."""

    def rank(self, slot: Slot) -> tuple[float, ...]:
        return slot.leases > 0, slot.leases > 0 and slot.key in self.waited_for, slot.last_used


class _QueueKeepsItsRunner(Eviction):
    """A busy runner that requests wait for does not go."""

    def spared(self, slot: Slot, urgent: bool) -> tuple[float, float] | None:
        if slot.phase is Phase.READY and slot.leases and slot.key in self.waited_for:
            return None
        return super().spared(slot, urgent)


class _RestForAll(Eviction):
    """An idle runner rests, whenever the request came that its room is for."""

    def may_go(self, group: Group, site: Site) -> MayGo:
        oldest = replace(group.waiting[0], since=-math.inf)
        return super().may_go(replace(group, waiting=(oldest,), turn=group.since), site)


def _plan(policy: type[Eviction]) -> type[Plan]:
    return type(f"{policy.__name__}Plan", (Plan,), {"eviction": policy})


RULES = {
    "all rules": Rules(),
    "without patience": Rules(Policy(patience=0.0)),
    "without sparing": Rules(Policy(spare=0.0)),
    "without turns of models": Rules(plan=_OldestRequestFirst),
    "batches as all others": Rules(Policy(ageing=0.0)),
    "without a queue": Rules(capacity=lambda parallel: 1 << 30),
}
DROPPED = {
    "spare leases": Rules(capacity=lambda parallel: parallel + max(1, parallel // 4)),
    "used now or not": Rules(plan=_plan(_BusyOrIdle)),
    "most recently used": Rules(plan=_plan(_MostRecentlyUsed)),
    "fixed order": Rules(plan=_plan(_FixedOrder)),
    "load / idle time": Rules(plan=_plan(_CheapestFirst)),
    "queued for goes last": Rules(plan=_plan(_QueuedForLast)),
    "a queue keeps its runner": Rules(plan=_plan(_QueueKeepsItsRunner)),
    "a wait without limit": Rules(Policy(patience=math.inf)),
    "spared from all requests": Rules(plan=_plan(_RestForAll)),
    "spared for two loads": Rules(Policy(spare=2.0)),
    "as the router": Rules(Policy(600.0, math.inf, loads=math.inf, spare=0.0)),
}
