"""A plan in the making: the actions so far, and what they make of runners and room."""

import math
from collections.abc import Sequence
from dataclasses import replace

from modelrunner.scheduler.order import in_turn
from modelrunner.scheduler.room import Room, subtract
from modelrunner.scheduler.state import (
    Action,
    Admit,
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
from modelrunner.scheduler.victims import Victims
from modelrunner.types import RequiredMemory, RunnerKey


class Draft:
    """`live` are the runners whose process may still exist, as they will be; `waiting` says how many
    requests wait for a key; `mapped` has, by model, the bytes of its files that a start of this plan counts for;
    `evictable` is the budget without what pinned runners hold."""

    def __init__(self, state: State, now: float) -> None:
        self.live: dict[RunnerKey, Slot] = {s.key: s for s in state.slots if s.phase is not Phase.ENDED}
        self.room = Room(state.budget, list(self.live.values()), state.groups)
        pinned = [_awake(s) for s in self.live.values() if _stays(s) and s.key.model_id not in state.paused]
        self.evictable = subtract(self.room.budget, self.room.total(pinned))
        self.waiting: dict[RunnerKey, int] = {}
        self.served = state.served
        self.mapped: dict[str, int] = {}
        self._kept: set[RunnerKey] = set()
        self.actions: list[Action] = []
        self._wake = math.inf
        self._victims: Victims | None = None
        self._state, self._now = state, now

    @property
    def victims(self) -> Victims:
        if self._victims is None:
            slots, state = self.live.values(), self._state
            self._victims = Victims(slots, self._kept, self.waiting, self.room, state.policy, self._now)
        return self._victims

    def keep(self, key: RunnerKey) -> None:
        """From here on no room is made of this runner."""
        self._kept.add(key)
        if self._victims is not None:
            self._victims.keep(key)

    def finished(self) -> list[Action]:
        return self.actions if math.isinf(self._wake) else [*self.actions, WakeAt(self._wake)]

    def wake_at(self, time: float) -> None:
        """The earliest counts; what is past has been looked at."""
        if self._now < time < self._wake:
            self._wake = time

    def grant(self, slot: Slot, group: Group) -> Group:
        """As many leases as the runner has left. Returns the group without those who got one."""
        free, policy = max(0, slot.capacity - slot.leases), self._state.policy
        chosen = in_turn(group.waiting, free, self.served, policy.ageing, self._now)
        if not chosen:
            return group
        turn = max(self.served.values(), default=0.0) + 1.0
        self.served = {**self.served, **{(r.caller, r.batch): turn + i for i, r in enumerate(chosen)}}
        ids = tuple([request.id for request in chosen])
        self.live[slot.key] = slot._replace(leases=slot.leases + len(ids), last_used=self._now)
        self.actions.append(Grant(slot.key, ids))
        taken = set(ids)
        return replace(group, waiting=tuple([r for r in group.waiting if r.id not in taken]))

    def start(self, group: Group, number: int, memory: RequiredMemory) -> bool:
        """If there is room now that nobody before waits for."""
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
        """If it can, and there is room for what it moves into main memory."""
        if not self._turn(slot, Phase.SLEEPING):
            return False
        self.actions.append(Sleep(slot.key))
        return True

    def wake(self, slot: Slot) -> bool:
        """If there is room now that nobody before waits for."""
        if slot.other is None or not self._turn(slot, Phase.STARTING):
            return False
        self.actions.append(Wake(slot.key, slot.other))
        return True

    def _turn(self, slot: Slot, phase: Phase) -> bool:
        if slot.other is None:
            return False
        memory = slot.memory.most(slot.other)
        growth = subtract(self.room.vector(memory), self.room.vector(slot.memory))
        if not self.room.can_take(growth):
            return False
        self.room.take(growth)
        self._victims = None
        self.live[slot.key] = slot._replace(phase=phase, memory=memory, other=slot.memory)
        return True

    def stop(self, slot: Slot, reason: Reason, room_for: str = "") -> None:
        if slot.phase is not Phase.DRAINING:
            self.room.leaves(slot)
        self.live[slot.key] = slot._replace(phase=Phase.STOPPING)
        self.actions.append(Stop(slot.key, reason, room_for))

    def drain(self, slot: Slot, reason: Reason, room_for: str = "") -> None:
        """Stops it if nobody holds it."""
        if not slot.leases:
            self.stop(slot, reason, room_for)
            return
        self.room.leaves(slot)
        self.live[slot.key] = slot._replace(phase=Phase.DRAINING, drain=reason)
        self.actions.append(Drain(slot.key, reason, room_for))

    def take_back(self, slot: Slot) -> None:
        """The drain."""
        self.room.stays(slot)
        self._victims = None
        self.live[slot.key] = slot._replace(phase=Phase.READY, drain=None)
        self.actions.append(Admit(slot.key))

    def refuse(self, key: RunnerKey, requests: Sequence[Request], error: BaseException) -> None:
        if requests:
            self.actions.append(Refuse(key, tuple([r.id for r in requests]), error))


def _awake(slot: Slot) -> Slot:
    """A sleeping one may be woken at any time."""
    other = slot.other if slot.phase is Phase.SLEEPING else None
    return slot if other is None else slot._replace(memory=slot.memory.most(other))


def _stays(slot: Slot) -> bool:
    """It is pinned, and was so before anybody asked it to go but for room."""
    leaving = slot.phase is Phase.STOPPING or (slot.phase is Phase.DRAINING and slot.drain is not Reason.ROOM)
    return slot.pinned and not leaving
