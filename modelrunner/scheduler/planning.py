"""A plan in the making: the actions so far, and what they make of runners and memory."""

import math
from collections.abc import Sequence
from dataclasses import replace

from modelrunner.scheduler.room import Room, subtract
from modelrunner.scheduler.state import (
    Action,
    Drain,
    Grant,
    Group,
    Phase,
    Reason,
    Refuse,
    Request,
    Sleep,
    Slot,
    Start,
    State,
    Stop,
    Wake,
    WakeAt,
)
from modelrunner.scheduler.turns import ages_at, in_turn, urgent
from modelrunner.scheduler.victims import Victims
from modelrunner.types import RequiredMemory, RunnerKey


class Planning:
    """`live` are the runners whose process may still exist, as they will be. `waiting` are the groups that got no
    lease. `mapped` has, by model, the bytes of its files that a start of this plan counts for. `evictable` is the
    budget without what pinned runners hold."""

    def __init__(self, state: State, now: float) -> None:
        self.live: dict[RunnerKey, Slot] = {s.key: s for s in state.slots if s.phase is not Phase.ENDED}
        self.room = Room(state.budget, list(self.live.values()), state.groups, state.asleep.values())
        self.served = state.served
        self.mapped: dict[str, int] = {}
        self.actions: list[Action] = []
        self._state, self._now = state, now
        pinned = [self._awake(s) for s in self.live.values() if _stays(s) and s.key.model_id not in state.paused]
        self.evictable = subtract(self.room.budget, self.room.total(pinned))
        self._kept: set[RunnerKey] = set()
        self._evicted: set[RunnerKey] = set()
        self._wake = math.inf
        self.waiting: Sequence[Group] = ()
        self.urgent: set[RunnerKey] = set()
        self._victims: Victims | None = None

    def wait(self, groups: Sequence[Group]) -> None:
        """Notes the groups that got no lease, and which of them have a request that does not yield to others."""
        self.waiting, ageing = groups, self._state.policy.ageing
        self.urgent = urgent(groups, self.served, ageing, self._now)
        for group in groups:
            if group.key not in self.urgent:
                self.wake_at(min([ages_at(request, self.served, ageing) for request in group.waiting]))

    @property
    def victims(self) -> Victims:
        if self._victims is None:
            slots = [slot for slot in self.live.values() if slot.key not in self._kept]
            waited_for, policy = {group.key for group in self.waiting}, self._state.policy
            self._victims = Victims(slots, waited_for, self.urgent, self.room, policy, self._now)
        return self._victims

    def keep(self, key: RunnerKey) -> None:
        """From now on this runner is not evicted."""
        self._kept.add(key)
        self._victims = None

    def finished(self) -> list[Action]:
        return self.actions if math.isinf(self._wake) else [*self.actions, WakeAt(self._wake)]

    def wake_at(self, time: float) -> None:
        """Plan again at the earliest of these times; past times are ignored."""
        if self._now < time < self._wake:
            self._wake = time

    def grant(self, slot: Slot, group: Group) -> Group:
        """Grants as many leases as the runner has left. Returns the group without the requests that got one."""
        free, policy = max(0, slot.capacity - slot.leases), self._state.policy
        chosen = in_turn(group.waiting, free, self.served, policy.ageing, self._now)
        if not chosen:
            return group
        self.served = {**self.served, **{(r.caller, r.batch): self._now for r in chosen}}
        ids = tuple([request.id for request in chosen])
        leases, interactive = slot.leases + len(ids), slot.interactive + sum([not r.batch for r in chosen])
        self.live[slot.key] = slot._replace(leases=leases, interactive=interactive, last_used=self._now)
        self.actions.append(Grant(slot.key, ids))
        taken = set(ids)
        return replace(group, waiting=tuple([r for r in group.waiting if r.id not in taken]), turn=self._now)

    def start(self, group: Group, number: int, memory: RequiredMemory) -> bool:
        """Starts a runner if there is memory now that no request earlier in line waits for."""
        need = self.room.vector(memory)
        if not self.room.can_take(need):
            return False
        if group.pinned:
            self.evictable = subtract(self.evictable, need)
        self.room.take(need)
        if memory.shared:
            self.mapped[group.key.model_id] = self.mapped.get(group.key.model_id, 0) + memory.shared
        self.actions.append(Start(group.key, memory, number))
        return True

    def sleep(self, slot: Slot) -> bool:
        """Puts a runner to sleep if it can, and if there is room for what it moves to main memory."""
        return self._turn(slot, Phase.SLEEPING, Sleep(slot.key))

    def wake(self, slot: Slot) -> bool:
        """Wakes a runner if there is memory now that no request earlier in line waits for."""
        return self._turn(slot, Phase.STARTING, Wake(slot.key, self._state.asleep[slot.key]))

    def _turn(self, slot: Slot, phase: Phase, action: Action) -> bool:
        other = self._state.asleep.get(slot.key)
        if other is None:
            return False
        memory = slot.memory.most(other)
        growth = subtract(self.room.vector(memory), self.room.vector(slot.memory))
        if not self.room.can_take(growth):
            return False
        self.room.take(growth)
        self._victims = None
        self.live[slot.key] = slot._replace(phase=phase, memory=memory)
        self.actions.append(action)
        return True

    def _awake(self, slot: Slot) -> Slot:
        """A sleeping runner may be woken at any time, so it counts as awake."""
        other = self._state.asleep.get(slot.key) if slot.phase is Phase.SLEEPING else None
        return slot if other is None else slot._replace(memory=slot.memory.most(other))

    def stop(self, slot: Slot, reason: Reason, room_for: str = "") -> None:
        if slot.phase is not Phase.DRAINING:
            self.room.leaves(slot)
        self.live[slot.key] = slot._replace(phase=Phase.STOPPING)
        self.actions.append(Stop(slot.key, reason, room_for))

    def drain(self, slot: Slot, reason: Reason, room_for: str = "") -> None:
        """Stops the runner after its last lease, at once if it has none."""
        if not slot.leases:
            self.stop(slot, reason, room_for)
            return
        self.room.leaves(slot)
        self.live[slot.key] = slot._replace(phase=Phase.DRAINING, drain=reason)
        self.actions.append(Drain(slot.key, reason, room_for))

    def evict(self, slot: Slot, group: Group) -> None:
        """Drains the runner for `group`. The drain counts as a turn of the runner's own model, which so stands in line
        behind `group`."""
        self._evicted.add(slot.key)
        self.drain(slot, Reason.ROOM, group.name)

    def turned(self, group: Group) -> Group:
        """The group, with the turn of an eviction."""
        return replace(group, turn=self._now) if group.key in self._evicted else group

    def refuse(self, key: RunnerKey, requests: Sequence[Request], error: BaseException) -> None:
        if requests:
            self.actions.append(Refuse(key, tuple([r.id for r in requests]), error))


def _stays(slot: Slot) -> bool:
    return slot.pinned and slot.phase not in (Phase.DRAINING, Phase.STOPPING)
