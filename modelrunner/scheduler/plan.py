"""Which runners exist and who gets them: one pure function, called after every change. `Scheduler` carries the actions
out. The rules are those of docs/scheduling: a failed start answers everybody once; oldest request first; memory counts
until the process is gone; the cheapest unleased runners go first, then busy ones are drained; a pin holds."""

import math
from collections.abc import Sequence
from dataclasses import replace

from modelrunner.errors import BackendUnavailable, BackingOff, InsufficientMemory, ShuttingDown, TimedOut
from modelrunner.scheduler.room import Room, Vector, choose, covers, subtract
from modelrunner.scheduler.state import (
    Action,
    Admit,
    Drain,
    Failure,
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

# Seconds: the longest pause between two starts of a model that fails, and how long after its pause a failure counts.
MAX_BACKOFF = 60.0


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


def next_failure(previous: Failure | None, error: BaseException, now: float) -> Failure:
    """Pauses of 1, 2, 4 ... seconds, from the first again when the last failure is long past."""
    recent = previous is not None and now < previous.until + MAX_BACKOFF
    count = previous.count + 1 if previous is not None and recent else 1
    return Failure(count, now + min(MAX_BACKOFF, 2.0 ** (count - 1)), error)


class _Plan:
    """The making of one plan."""

    def __init__(self, state: State, now: float) -> None:
        self._state, self._now, self._policy = state, now, state.policy
        self._actions: list[Action] = []
        self._wakes: list[float] = []
        self._wanted: set[RunnerKey] = set()
        self._live: dict[RunnerKey, Slot] = {s.key: s for s in state.slots if s.phase is not Phase.ENDED}
        needs = [g.need for g in state.groups if g.need is not None]
        self._room = Room(state.budget, list(self._live.values()), needs)
        pinned = (s for s in self._live.values() if s.pinned and s.phase in (Phase.STARTING, Phase.READY))
        self._evictable = subtract(self._room.budget, self._room.total(pinned))

    def make(self) -> list[Action]:
        failed = self._forget_ended()
        groups = [g for g in self._state.groups if g.waiting and g.key not in failed]
        if self._state.closing:
            self._close(groups)
            groups = []
        waiting = [g for g in map(self._serve, groups) if g is not None]
        self._wanted = {g.key for g in waiting}
        self._stop_unused()
        for group in sorted(waiting, key=_age):
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
                if not isinstance(
                    slot.error, BackendUnavailable
                ):  # nothing was started: installing it mends it at once
                    failure = next_failure(self._state.failures.get(slot.key), slot.error, self._now)
                self._refuse(slot.key, waiting.get(slot.key, ()), slot.error)
                failed.add(slot.key)
            self._actions.append(Forget(slot.key, failure))
        return failed

    def _close(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._refuse(group.key, group.waiting, ShuttingDown("modelrunner is shutting down"))
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
        late = sum(1 for r in group.waiting if r.since + self._policy.max_wait <= self._now)
        if late:
            what = "load" if slot is not None and slot.phase is Phase.STARTING else "room in memory"
            limit = f"{self._policy.max_wait:g} s"
            self._refuse(
                group.key,
                group.waiting[:late],
                TimedOut(f"{_name(group)} was not ready within {limit} (waiting for its {what}); try again later"),
            )
        if late == len(group.waiting):
            return None
        self._wakes.append(group.waiting[late].since + self._policy.max_wait)
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
        if group.need is None or (slot is not None and slot.phase is Phase.STARTING):
            return
        need = self._room.vector(group.need)
        error = self._refusal(group, need, slot)
        if error is not None:
            self._refuse(group.key, group.waiting, error)
        elif slot is not None and self._may_stay(slot):
            self._take_back(slot)
            self._grant(self._live[slot.key], group)
        elif slot is not None or not self._start(group, need):
            self._make_room(group, need)
            if slot is not None or not self._start(group, need):
                self._room.claim(need)

    def _start(self, group: Group, need: Vector) -> bool:
        """If there is room now that no older request waits for."""
        if group.need is None or not self._room.can_take(need):
            return False
        self._room.take(need)
        self._actions.append(Start(group.key, group.need))
        return True

    def _refusal(self, group: Group, need: Vector, slot: Slot | None) -> Exception | None:
        failure = self._state.failures.get(group.key)
        if slot is None and failure is not None and self._now < failure.until:
            pause = failure.until - self._now
            return BackingOff(
                f"{_name(group)} failed to start a moment ago ({failure.error}); it is tried again in {pause:.1f} s",
                retry_after=pause,
            )
        if not covers(self._room.budget, need):
            return self._too_large(group, "more than there is: choose a smaller model or context, or raise the budget")
        if not covers(self._evictable, need):
            return self._too_large(group, "and pinned models hold the rest: unpin one, or raise the budget")
        return None

    def _too_large(self, group: Group, why: str) -> InsufficientMemory:
        assert group.need is not None
        budget, free = self._room.budget, self._room.free
        lines = [f"main memory: needed {group.need.ram}, free {max(0, free[0])}, budget {budget[0]} bytes"]
        for i, need in enumerate(group.need.vram, start=1):
            lines.append(f"device {i - 1}: needed {need}, free {max(0, free[i])}, budget {budget[i]} bytes")
        return InsufficientMemory(f"{_name(group)} needs {group.need}, {why} ({'; '.join(lines)})")

    def _make_room(self, group: Group, need: Vector) -> None:
        """Frees just what is missing: idle runners, or, after the patience of the oldest request, busy ones too."""
        shortage = self._room.shortage(need)
        if not any(shortage):
            return  # it is on its way
        idle = [s for s in self._live.values() if self._is_idle(s)]
        victims = self._choose(idle, shortage)
        if not victims:
            busy = [s for s in self._live.values() if s.phase is Phase.READY and s.leases and not s.pinned]
            victims = self._choose(idle + busy, shortage)
            due = group.waiting[0].since + self._policy.patience
            if victims and self._now < due:
                self._wakes.append(due)
                return
        for slot in victims:
            if slot.leases:
                self._drain(slot, Reason.ROOM)
            else:
                self._stop(slot, Reason.ROOM)

    def _choose(self, candidates: list[Slot], shortage: Vector) -> list[Slot]:
        if not covers(self._room.total(candidates), shortage):
            return []
        return choose(candidates, shortage, self._cost, lambda s: self._room.vector(s.memory))

    def _cost(self, slot: Slot) -> float:
        """A busy runner is dearer than all idle ones together; an idle one's cost is the policy's."""
        return self._policy.cost(slot, self._now) + (1e9 if slot.leases else 0.0)

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
        if slot.phase is not Phase.DRAINING or slot.drain is not Reason.ROOM or not slot.leases:
            return False
        return covers(self._room.over(), self._room.vector(slot.memory))

    def _take_back(self, slot: Slot) -> None:
        self._room.stays(slot)
        self._live[slot.key] = replace(slot, phase=Phase.READY, drain=None)
        self._actions.append(Admit(slot.key))

    def _grant(self, slot: Slot, group: Group) -> None:
        self._live[slot.key] = replace(slot, leases=slot.leases + len(group.waiting), last_used=self._now)
        self._actions.append(Grant(slot.key, tuple(r.id for r in group.waiting)))

    def _stop(self, slot: Slot, reason: Reason) -> None:
        if slot.phase is not Phase.DRAINING:
            self._room.leaves(slot)
        self._live[slot.key] = replace(slot, phase=Phase.STOPPING)
        self._actions.append(Stop(slot.key, reason))

    def _drain(self, slot: Slot, reason: Reason) -> None:
        self._room.leaves(slot)
        self._live[slot.key] = replace(slot, phase=Phase.DRAINING, drain=reason)
        self._actions.append(Drain(slot.key, reason))

    def _refuse(self, key: RunnerKey, requests: Sequence[Request], error: BaseException) -> None:
        if requests:
            self._actions.append(Refuse(key, tuple(r.id for r in requests), error))


def _age(group: Group) -> tuple[float, int]:
    return group.waiting[0].since, group.waiting[0].id


def _name(group: Group) -> str:
    return group.name or str(group.key)
