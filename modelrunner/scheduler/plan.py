"""Which runners exist and who gets them: one pure function, called after every change.

1. A failed start answers everybody who waited for it, once, and is held against the model for a short time.
2. A runner that nobody holds stops when its keep-alive has passed.
3. The oldest request comes first. Its runner is ready: grant; starting: wait; can never fit: refuse; fits: start; else
   free just enough: the cheapest runners that nobody holds, and, once the request has been overtaken for as long as its
   patience lasts, busy ones too, which then take nothing new and stop after their last lease.
4. A runner's memory counts until its process is gone.
5. A pinned runner is never stopped for room; who needs the room of pinned ones is refused.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

from modelrunner.errors import BackendUnavailable
from modelrunner.scheduler import refusals
from modelrunner.scheduler.room import Candidate, Pool, Room, Vector, add, choose, covers, subtract
from modelrunner.scheduler.state import (
    Action,
    Admit,
    Drain,
    Forget,
    Grant,
    Group,
    Phase,
    Reason,
    Refuse,
    Request,
    Slot,
    Start,
    State,
    Stop,
    WakeAt,
)
from modelrunner.types import RunnerKey


def is_warm(phase: Phase, waiting: int, in_use: int, limit: int) -> bool:
    """May a request have the runner without queueing: it is ready, nobody older waits for it, and fewer than `limit`
    requests hold it."""
    return phase is Phase.READY and not waiting and in_use < limit


def is_full(waiting: int, in_use: int, parallel: int, max_queue: int) -> bool:
    """Is a model's queue full: requests beyond the engine's `parallel` sequences wait too, inside the engine."""
    return waiting + max(0, in_use - parallel) >= max_queue


def plan(state: State, now: float) -> list[Action]:
    """The actions that the state asks for at time `now`, in the order to carry them out. Carried out, they leave a
    state whose plan is empty but for `WakeAt`."""
    return _Plan(state, now).make()


class _Plan:
    """The making of one plan."""

    def __init__(self, state: State, now: float) -> None:
        self._state, self._now, self._policy = state, now, state.policy
        self._actions: list[Action] = []
        self._wakes: list[float] = []
        self._wanted: set[RunnerKey] = set()
        self._pools: tuple[Pool, Pool] | None = None
        self._live: dict[RunnerKey, Slot] = {s.key: s for s in state.slots if s.phase is not Phase.ENDED}
        needs = [need for g in state.groups for need in g.needs]
        self._room = Room(state.budget, list(self._live.values()), needs)
        pinned = (s for s in self._live.values() if s.pinned and s.phase in (Phase.STARTING, Phase.READY))
        self._evictable = subtract(self._room.budget, self._room.total(pinned))

    def make(self) -> list[Action]:
        failed = self._forget_ended()
        groups = [g for g in self._state.groups if g.waiting and g.key not in failed]
        if self._state.closing:
            self._close(groups)
            groups = []
        self._pause()
        waiting = [g for g in map(self._serve, groups) if g is not None]
        self._wanted = {g.key for g in waiting}
        self._stop_unused()
        for group in sorted(waiting, key=age):
            self._admit(group)
        if not self._state.closing:
            self._take_back_drains()
        if self._wakes:
            self._actions.append(WakeAt(min(self._wakes)))
        return self._actions

    def _forget_ended(self) -> set[RunnerKey]:
        """Rule 1. Returns the keys whose waiters were answered with the failure."""
        waiting = {g.key: g.waiting for g in self._state.groups}
        failed = set()
        for slot in self._state.slots:
            if slot.phase is not Phase.ENDED:
                continue
            failure = None
            if slot.error is not None and not slot.was_ready:
                # An engine that is not installed was not started: installing it mends that at once.
                if not isinstance(slot.error, BackendUnavailable):
                    failure = refusals.next_failure(self._state.failures.get(slot.key), slot.error, self._now)
                self._refuse(slot.key, waiting.get(slot.key, ()), slot.error)
                failed.add(slot.key)
            self._actions.append(Forget(slot.key, failure))
        return failed

    def _pause(self) -> None:
        """The runners of paused models go, pinned or not."""
        for slot in list(self._live.values()):
            if slot.key.model_id in self._state.paused:
                if slot.phase is Phase.READY and slot.leases:
                    self._drain(slot, Reason.PAUSED)
                elif slot.phase in (Phase.STARTING, Phase.READY):
                    self._stop(slot, Reason.PAUSED)

    def _close(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._refuse(group.key, group.waiting, refusals.shutting_down())
        for slot in list(self._live.values()):
            if slot.phase is Phase.STARTING or (slot.phase is Phase.READY and not slot.leases):
                self._stop(slot, Reason.SHUTDOWN)
            elif slot.phase is Phase.READY:
                self._drain(slot, Reason.SHUTDOWN)

    def _serve(self, group: Group) -> Group | None:
        """Grants what is ready and refuses who waited too long. Returns what still waits."""
        slot = self._live.get(group.key)
        if slot is not None and slot.phase is Phase.READY:
            self._grant(slot, group)
            return None
        late = len(list(takewhile(lambda r: r.since + self._policy.max_wait <= self._now, group.waiting)))
        if late:
            loading = slot is not None and slot.phase is Phase.STARTING
            self._refuse(group.key, group.waiting[:late], refusals.timed_out(group, self._policy.max_wait, loading))
        if late == len(group.waiting):
            return None
        self._wakes.append(group.waiting[late].since + self._policy.max_wait)
        if group.key.model_id in self._state.paused:
            return None
        return replace(group, waiting=group.waiting[late:]) if late else group

    def _stop_unused(self) -> None:
        """Rule 2, and the end of every drain."""
        for slot in list(self._live.values()):
            if slot.leases:
                continue
            if slot.phase is Phase.DRAINING:
                self._stop(slot, slot.drain or Reason.UNLOAD)
            elif slot.phase is Phase.READY and not slot.pinned:
                expires = slot.last_used + slot.keep_alive
                if expires <= self._now:
                    self._stop(slot, Reason.IDLE)
                elif expires < math.inf:
                    self._wakes.append(expires)

    def _admit(self, group: Group) -> None:
        """Rule 3, for one group that has no ready runner."""
        slot = self._live.get(group.key)
        if not group.needs or (slot is not None and slot.phase is Phase.STARTING):
            return
        number = self._variant(group)
        need = self._room.vector(group.needs[number])
        error = self._refusal(group, need, slot)
        if error is not None:
            self._refuse(group.key, group.waiting, error)
        elif slot is not None and self._may_stay(slot):
            self._take_back(slot)
            self._grant(self._live[slot.key], group)
        elif slot is not None or not self._start(group, number):
            self._make_room(group, need)
            if slot is not None or not self._start(group, number):
                self._room.claim(need)

    def _variant(self, group: Group) -> int:
        """The first that could have its room if all went that may go; where none could, the smallest."""
        fitting = (i for i, need in enumerate(group.needs) if covers(self._evictable, self._room.vector(need)))
        return next(fitting, len(group.needs) - 1)

    def _start(self, group: Group, number: int) -> bool:
        """If there is room now that no older request waits for."""
        memory = group.needs[number]
        need = self._room.vector(memory)
        if not self._room.can_take(need):
            return False
        self._room.take(need)
        self._actions.append(Start(group.key, memory, number))
        return True

    def _refusal(self, group: Group, need: Vector, slot: Slot | None) -> Exception | None:
        """Why the group can have no runner, now or ever."""
        failure = self._state.failures.get(group.key)
        if slot is None and failure is not None and self._now < failure.until:
            return refusals.backing_off(group, failure, self._now)
        if not covers(self._room.budget, need):
            return refusals.too_large(group, self._room.budget, self._room.free)
        if not covers(self._evictable, need):
            return refusals.pinned_out(group, self._room.budget, self._room.free)
        return None

    def _make_room(self, group: Group, need: Vector) -> None:
        """Frees just what is missing: idle runners, or, after the patience of the oldest request, busy ones too."""
        shortage = self._room.shortage(need)
        if not any(shortage):
            return  # it is on its way
        if self._pools is None:
            self._pools = self._pool(self._is_idle), self._pool(_is_busy)
        idle, busy = self._pools
        if covers(idle.total, shortage):
            victims = choose(idle.ranked, shortage)
        elif covers(add(idle.total, busy.total), shortage):
            due = group.waiting[0].since + self._policy.patience
            if self._now < due:
                self._wakes.append(due)
                return
            victims = choose(idle.ranked + busy.ranked, shortage)
        else:
            return  # until a load that others wait for is done
        for pool in self._pools:
            pool.remove(victims)
        for _, _, slot in victims:
            if slot.leases:
                self._drain(slot, Reason.ROOM, group.name)
            else:
                self._stop(slot, Reason.ROOM, group.name)

    def _pool(self, belongs: Callable[[Slot], bool]) -> Pool:
        """A busy runner is dearer than all idle ones together."""
        cost, now = self._policy.cost, self._now
        return Pool(
            (
                Candidate(cost(s, now) + (1e9 if s.leases else 0.0), self._room.vector(s.memory), s)
                for s in self._live.values()
                if belongs(s)
            ),
            self._room.none,
        )

    def _is_idle(self, slot: Slot) -> bool:
        """Unleased and wanted by nobody; a load that everybody left is too."""
        if slot.pinned or slot.leases:
            return False
        return slot.phase is Phase.READY or (slot.phase is Phase.STARTING and slot.key not in self._wanted)

    def _take_back_drains(self) -> None:
        drained = [s for s in self._live.values() if s.phase is Phase.DRAINING]
        for slot in sorted(drained, key=lambda s: -s.last_used):
            if self._may_stay(slot):
                self._take_back(slot)

    def _may_stay(self, slot: Slot) -> bool:
        """It is drained for room only, and those who still wait for room do without it."""
        if slot.phase is not Phase.DRAINING or not slot.leases or slot.key.model_id in self._state.paused:
            return False
        if slot.drain not in (Reason.ROOM, Reason.PAUSED):
            return False
        return covers(self._room.over(), self._room.vector(slot.memory))

    def _take_back(self, slot: Slot) -> None:
        self._room.stays(slot)
        self._pools = None
        self._live[slot.key] = replace(slot, phase=Phase.READY, drain=None)
        self._actions.append(Admit(slot.key))

    def _grant(self, slot: Slot, group: Group) -> None:
        self._live[slot.key] = replace(slot, leases=slot.leases + len(group.waiting), last_used=self._now)
        self._actions.append(Grant(slot.key, tuple(r.id for r in group.waiting)))

    def _stop(self, slot: Slot, reason: Reason, room_for: str = "") -> None:
        if slot.phase is not Phase.DRAINING:
            self._room.leaves(slot)
        self._live[slot.key] = replace(slot, phase=Phase.STOPPING)
        self._actions.append(Stop(slot.key, reason, room_for))

    def _drain(self, slot: Slot, reason: Reason, room_for: str = "") -> None:
        self._room.leaves(slot)
        self._live[slot.key] = replace(slot, phase=Phase.DRAINING, drain=reason)
        self._actions.append(Drain(slot.key, reason, room_for))

    def _refuse(self, key: RunnerKey, requests: Sequence[Request], error: BaseException) -> None:
        if requests:
            self._actions.append(Refuse(key, tuple(r.id for r in requests), error))


def _is_busy(slot: Slot) -> bool:
    return slot.phase is Phase.READY and slot.leases > 0 and not slot.pinned


def age(group: Group) -> tuple[float, int]:
    """What the groups that wait are sorted by: the oldest request first."""
    return group.waiting[0].since, group.waiting[0].id
