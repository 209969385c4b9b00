"""Which runners exist and which request gets which: one pure function, called after every change. It applies the rules
of docs/scheduling.md in this order:

1. A runner that ended by itself delays its model's next start (`failures`). A failed start answers all requests that
   waited for it.
2. A runner that nobody uses stops when its keep-alive has passed; one that can sleep sleeps for a second keep-alive
   before it stops. A paused model's runner stops after its last lease.
3. Requests get leases of ready runners in the order of `fairness`, suspects of a crash one at a time, or are refused if
   they waited too long.
4. Models without a runner get one in the order of `fairness`. The model can never fit: refuse. It fits: start, or wake
   the runner that sleeps. Otherwise evict (`eviction`) and reserve the memory, which no request later in line may take.
   `placement` decides where, and how small. A pinned runner is never evicted. A pinned model that is waited for counts
   as pinned already, so it is the first in line.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import replace
from functools import reduce
from itertools import takewhile

from modelrunner.errors import BackendUnavailable
from modelrunner.scheduler import failures, placement
from modelrunner.scheduler.allocation import Allocation, Vector, add, covers, subtract
from modelrunner.scheduler.eviction import Eviction
from modelrunner.scheduler.fairness import Turns
from modelrunner.scheduler.state import (
    LEAVING,
    SUSPECT_TURN,
    Action,
    Forget,
    Grant,
    Group,
    Phase,
    Reason,
    Refuse,
    RunOption,
    Sleep,
    Slot,
    Start,
    State,
    Stop,
    WakeAt,
)
from modelrunner.types import RunnerKey


def plan(state: State, now: float) -> list[Action]:
    """The actions for this state at time `now`, in the order to carry them out. Carried out, they leave a state whose
    plan is empty but for `WakeAt`."""
    return Plan(state, now).make()


class Plan:
    """One plan in the making. `live` are the runners whose process may still exist, as they will be."""

    eviction = Eviction

    def __init__(self, state: State, now: float) -> None:
        self.state, self.now, self.policy = state, now, state.policy
        self.live: dict[RunnerKey, Slot] = {s.key: s for s in state.slots if s.phase is not Phase.ENDED}
        needs = [option.memory for group in state.groups for option in group.options]
        self.memory = Allocation(state.budget, self.live.values(), (*needs, *state.asleep.values()))
        self._failures = dict(state.failures)
        self._turns = Turns(state.served, state.policy.ageing, now)
        self._actions: list[Action] = []
        self._due: list[float] = []  # times at which a plan is due; past ones do not count

    def make(self) -> list[Action]:
        groups = {group.key: group for group in self.state.groups if group.waiting}
        self._forget_ended(groups)
        self._stop_unwanted(groups)
        waiting = [group for group in map(self._serve, groups.values()) if group.waiting]
        self._admit_in_line(waiting)
        due = [time for time in self._due if self.now < time < math.inf]
        return [*self._actions, WakeAt(min(due))] if due else self._actions

    def _forget_ended(self, groups: dict[RunnerKey, Group]) -> None:
        """Removes the groups that a failed start answers."""
        for slot in [slot for slot in self.state.slots if slot.phase is Phase.ENDED]:
            group, error, failure = groups.get(slot.key), slot.error, None
            where = slot.key, slot.option.place
            # An engine that is not installed was not started: no pause, since installing it mends that at once.
            if error is not None and not isinstance(error, BackendUnavailable):
                options = group.options if group else ()
                failure = self._failures[where] = failures.after(self._failures.get(where), slot, options, self.now)
            if group is not None and error is not None and not slot.was_ready and not (failure and failure.waits):
                self._refuse(groups.pop(slot.key), failures.explained(error, group, self.memory))
            self._actions.append(Forget(slot.key, failure))

    def _stop_unwanted(self, waited_for: Container[RunnerKey]) -> None:
        """Stops unused runners, all when the daemon ends, and those of paused models, pinned or not."""
        for slot in list(self.live.values()):
            needed = slot.leases or slot.pinned or slot.key in waited_for
            if slot.phase not in LEAVING and (self.state.closing or slot.key.model_id in self.state.paused):
                self._stop(slot, Reason.SHUTDOWN if self.state.closing else Reason.PAUSED)
            elif slot.phase is Phase.DRAINING and not slot.leases:
                self._stop(slot, slot.drain or Reason.UNLOAD)
            elif slot.phase in (Phase.READY, Phase.SLEEPING) and not needed:
                tired, expires = slot.last_used + slot.keep_alive, slot.last_used + 2 * slot.keep_alive
                if self.now < tired:
                    self._due.append(tired)
                elif self.now < expires and (slot.phase is Phase.SLEEPING or self._falls_asleep(slot)):
                    self._due.append(expires)
                else:
                    self._stop(slot, Reason.IDLE)

    def _falls_asleep(self, slot: Slot) -> bool:
        """Puts a runner to sleep, if it can sleep and there is room for the larger of both figures. A runner whose
        engine still works does not sleep."""
        asleep = self.state.asleep.get(slot.key)
        if asleep is None or slot.abandoned or not self.memory.start(slot.key, asleep):
            return False
        self.live[slot.key] = slot._replace(phase=Phase.SLEEPING, memory=slot.memory.most(asleep))
        self._actions.append(Sleep(slot.key))
        return True

    def _serve(self, group: Group) -> Group:
        """Grants leases of a ready runner and refuses requests that may not wait longer. Returns the others."""
        slot, closing, max_wait = self.live.get(group.key), self.state.closing, self.policy.max_wait
        paused = group.key.model_id in self.state.paused
        if slot is not None and slot.phase is Phase.READY:
            group = self._grant(slot, group)
        late = tuple(takewhile(lambda request: closing or request.since + max_wait <= self.now, group.waiting))
        if late:
            timed_out = failures.timed_out(group, max_wait, slot and slot.phase, paused)
            error = failures.shutting_down() if closing else timed_out
            self._refuse(replace(group, waiting=late), error)
            group = replace(group, waiting=group.waiting[len(late) :])
        if group.waiting:
            self._due.append(group.waiting[0].since + max_wait)
        return group

    def _grant(self, slot: Slot, group: Group) -> Group:
        """Grants as many leases as the runner has left, of the suspects one at a time. Returns the group without the
        requests that got one."""
        waiting, suspect = group.waiting, next((request for request in group.waiting if request.suspect), None)
        if suspect is not None:
            free = self.now >= slot.suspects_from
            waiting = tuple([r for r in waiting if not r.suspect or (r is suspect and free)])
            self._due.append(self.now + SUSPECT_TURN if free else slot.suspects_from)
        chosen = self._turns.in_turn(waiting, slot.free)
        if not chosen:
            return group
        ids = tuple([request.id for request in chosen])
        leases, interactive = slot.leases + len(ids), slot.interactive + sum([not r.batch for r in chosen])
        self.live[slot.key] = slot._replace(leases=leases, interactive=interactive, last_used=self.now)
        self._actions.append(Grant(slot.key, ids))
        taken = set(ids)
        return replace(group, waiting=tuple([r for r in group.waiting if r.id not in taken]), turn=self.now)

    def _wants_runner(self, group: Group) -> bool:
        """True if the group has no runner, or one that sleeps, and may have one."""
        slot, paused = self.live.get(group.key), group.key.model_id in self.state.paused
        return bool(group.options) and not paused and (slot is None or slot.phase is Phase.SLEEPING)

    def _admit_in_line(self, waiting: Sequence[Group]) -> None:
        """Finds runners for the groups that want one, and can have one. A load counts as a turn of its callers. Two
        parts of the budget cannot be evicted: the memory of pinned runners, which may be woken at any time, and the
        memory of groups that will be pinned. These come first, so no other start of this plan changes the choice of a
        group."""
        urgent, waited_for = self._turns.urgent(waiting), {group.key for group in waiting}
        self._due += [min(map(self._turns.yields_until, g.waiting)) for g in waiting if g.key not in urgent]
        eviction = self.eviction(self.live.values(), waited_for, urgent, self.memory, self.policy, self.now)
        loads = {slot.key for slot in self.live.values() if slot.phase is Phase.STARTING}
        wanting = [group for group in waiting if self._wants_runner(group)]
        pinned = [slot for slot in self.live.values() if slot.pinned and slot.phase not in LEAVING] if wanting else []
        evictable, first = reduce(subtract, map(self._awake, pinned), self.memory.budget), set()
        for group in sorted([g for g in wanting if g.pinned], key=lambda g: (g.since, g.waiting[0].id)):
            if group.key not in eviction.gone and (options := self._candidates(group, evictable)):
                taken = self._admit(group, options, eviction)
                first.add(group.key)
                if group.key not in self.live:
                    evictable = subtract(evictable, taken)
        chosen = {g.key: options for g in wanting if not g.pinned and (options := self._candidates(g, evictable))}
        in_line = [g for g in waiting if g.key in chosen or g.key in first or g.key in loads]
        for group in self._turns.in_line(in_line, urgent):
            if group.key in chosen and group.key not in eviction.gone:  # a sleeping runner may have been evicted
                self._admit(group, chosen[group.key], eviction)

    def _admit(self, group: Group, options: Sequence[RunOption], eviction: Eviction) -> Vector:
        """Starts a runner, or evicts for it. Returns the memory that it takes, or that is reserved for it."""
        eviction.gone.add(group.key)  # a runner that is to be woken makes no room for itself
        option, victims, again = placement.place(group, options, self.memory, eviction)
        eviction.gone.update([slot.key for slot in victims])
        for slot in victims:
            self._stop(slot, Reason.ROOM, group.name)
        self._due.append(again)
        need = self.memory.need(group.key, option.memory)
        if self.memory.start(group.key, option.memory):
            self._actions.append(Start(group.key, option))
        else:
            self.memory.reserve(need)
        return need

    def _candidates(self, group: Group, evictable: Vector) -> Sequence[RunOption]:
        """The ways to give the group a runner now. Refuses it if nothing can ever fit, or during a pause after a
        failure for whose end its requests may not wait."""
        sleeper = self.live.get(group.key)
        if sleeper is not None:
            woken = sleeper.option._replace(memory=self.state.asleep.get(group.key, sleeper.memory))
            most = add(evictable, self._awake(sleeper)) if sleeper.pinned else evictable
            if covers(most, self.memory.total(group.key, woken.memory)):
                return (woken,)
            self._refuse(group, failures.never_fits(group, self.memory))
            return ()
        options, pause = placement.candidates(
            group.key, group.options, self._failures, self.memory, evictable, self.now
        )
        if pause is not None and pause.waits:
            self._due.append(pause.until)
        elif pause is not None:
            self._refuse(group, failures.backing_off(group, pause, self.now))
        elif not options:
            self._refuse(group, failures.never_fits(group, self.memory))
        return options

    def _awake(self, slot: Slot) -> Vector:
        other = self.state.asleep.get(slot.key) if slot.phase is Phase.SLEEPING else None
        return self.memory.total(slot.key, other or slot.memory)

    def _stop(self, slot: Slot, reason: Reason, room_for: str = "") -> None:
        """Stops the runner after its last lease, at once if it has none."""
        if slot.phase is not Phase.DRAINING:
            self.memory.release(slot)
        self.live[slot.key] = slot._replace(phase=Phase.DRAINING if slot.leases else Phase.STOPPING)
        self._actions.append(Stop(slot.key, reason, room_for))

    def _refuse(self, group: Group, error: BaseException) -> None:
        self._actions.append(Refuse(group.key, tuple([request.id for request in group.waiting]), error))
