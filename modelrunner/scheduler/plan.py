"""Which runners exist and which request gets which: one pure function, called after every change. It applies the rules
of docs/scheduling.md in this order:

1. A runner that ended by itself delays its model's next start (`failures`). A failed start answers all requests that
   waited for it.
2. A runner that nobody uses stops when its keep-alive has passed, or where all runners count for more than the
   budget; one that can sleep sleeps for a second keep-alive before it stops. A paused model's runner stops after its
   last lease.
3. Requests get leases of ready runners in the order of `fairness`, suspects of a crash one at a time, or are refused if
   they waited too long.
4. Models without a runner get one in the order of `fairness`. The model can never fit: refuse. It fits: start, or wake
   the runner that sleeps. Otherwise evict (`eviction`) and reserve the memory, which no request later in line may take.
   `placement` decides where, and how small. A pinned runner is never evicted. A pinned model that is waited for counts
   as pinned already, so it is the first in line.
5. A model that may have several runners (replicas) gets another one where an option is free then, one that sleeps
   before a new one: up to its `least` at once, up to its `most` once a request has waited `grow` seconds for a place.
   One that began with one sequence then gets a runner with more, and the first one goes: once that one is ready if both
   have room, else before. Nothing else is evicted for either.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import takewhile

from modelrunner.errors import BackendUnavailable, HostLost
from modelrunner.scheduler import failures, placement
from modelrunner.scheduler.allocation import Vector, add, allocations, covers, pieces, subtract
from modelrunner.scheduler.eviction import Eviction
from modelrunner.scheduler.fairness import Turns
from modelrunner.scheduler.placement import Candidates
from modelrunner.scheduler.state import (
    LEAVING,
    SUSPECT_TURN,
    Action,
    Forget,
    Grant,
    Group,
    Kind,
    Phase,
    Reason,
    Refuse,
    Request,
    RunnerId,
    RunOption,
    RunPlace,
    Sleep,
    Slot,
    Start,
    State,
    Stop,
    WakeAt,
    kinds_of,
)
from modelrunner.types import RunnerKey


def plan(state: State, now: float) -> list[Action]:
    """The actions for this state at time `now`, in the order to carry them out. Carried out, they leave a state whose
    plan is empty but for `WakeAt`, unless one of them is a `Stop`: the first in line may then count on that runner's
    room, and leave other room to those behind it. So a plan with a `Stop` asks for another plan."""
    return Plan(state, now).make()


class Plan:
    """One plan in the making. `live` are the runners whose process may still exist, as they will be."""

    eviction = Eviction

    def __init__(self, state: State, now: float) -> None:
        self.state, self.now, self.policy = state, now, state.policy
        self.live: dict[RunnerId, Slot] = {s.id: s for s in state.slots if s.phase is not Phase.ENDED}
        self._ids: dict[RunnerKey, list[RunnerId]] = {}
        for id in self.live:
            self._ids.setdefault(id.key, []).append(id)
        kinds = [kind for group in state.groups for kind in kinds_of(group.wider or group.options)]
        needs = [option.memory for kind in kinds for option in kind[0][1]]
        several = [kind for kind in kinds if not isinstance(kind[0][0], str)]
        needs += [part for kind in several for option in kind[0][1] for part in option.memory.others]
        self.memory = allocations(state.hosts, self.live.values(), [*needs, *state.asleep.values()])
        self._failures = dict(state.failures)
        self._turns = Turns(state.served, state.policy.ageing, now)
        self._actions: list[Action] = []
        self._due: list[float] = []  # times at which a plan is due; past ones do not count

    def make(self) -> list[Action]:
        groups = {group.key: group for group in self.state.groups if group.waiting}
        self._forget_ended(groups)
        self._stop_unwanted(groups)
        self._yield_memory(groups)
        waiting = [group for group in map(self._serve, groups.values()) if group.waiting]
        self._admit_in_line(waiting)
        for group in waiting:
            if group.wider:
                self._widen(group)
        for group in self.state.groups:
            if group.most > 1:
                rest = next((g.waiting for g in waiting if g.key == group.key), ())
                self._add_replica(replace(group, waiting=rest))
        due = [time for time in self._due if self.now < time < math.inf]
        return [*self._actions, WakeAt(min(due))] if due else self._actions

    def _forget_ended(self, groups: dict[RunnerKey, Group]) -> None:
        """Removes the groups that a failed start answers."""
        for slot in [slot for slot in self.state.slots if slot.phase is Phase.ENDED]:
            group, error, failure = groups.get(slot.key), slot.error, None
            where = slot.key, slot.option.place
            lost = isinstance(error, HostLost) and not self.state.hosts.keys() >= {*slot.option.place.hosts}
            # An engine that is not installed was not started: no pause, since installing it mends that at once.
            if error is not None and not lost and not isinstance(error, BackendUnavailable):
                options = group.wider or group.options if group else ()
                failure = self._failures[where] = failures.after(self._failures, slot, options, self.now)
            fatal = error is not None and not slot.was_ready and not lost and not (failure and failure.waits)
            if group is not None and error is not None and fatal and not self._of(slot.key):
                self._refuse(groups.pop(slot.key), failures.explained(error, group, self.memory))
            self._actions.append(Forget(slot.id, failure))

    def _of(self, key: RunnerKey) -> list[Slot]:
        """The runners of the key, oldest first."""
        return [self.live[id] for id in self._ids.get(key, ())]

    def _stop_unwanted(self, waited_for: Container[RunnerKey]) -> None:
        """Stops unused runners, all when the daemon ends, and those of paused models, pinned or not."""
        for slot in list(self.live.values()):
            needed = slot.leases or self._is_pinned(slot) or slot.key in waited_for
            if slot.phase not in LEAVING and (self.state.closing or slot.key.files in self.state.paused):
                self._stop(slot, Reason.SHUTDOWN if self.state.closing else Reason.PAUSED)
            elif slot.phase is Phase.DRAINING and not slot.leases:
                self._stop(slot, slot.drain or Reason.UNLOAD)
            elif self._is_outgrown(slot):
                self._stop(slot, Reason.GROWN)
            elif slot.phase in (Phase.READY, Phase.SLEEPING) and not needed:
                used = slot.last_used
                if len(self._ids[slot.key]) > 1 and self._is_basic(slot):
                    used = max([self.now if other.leases else other.last_used for other in self._of(slot.key)])
                tired, expires = used + slot.keep_alive, used + 2 * slot.keep_alive
                if self.now < tired:
                    self._due.append(tired)
                elif self.now < expires and (slot.phase is Phase.SLEEPING or self._falls_asleep(slot)):
                    self._due.append(expires)
                else:
                    self._stop(slot, Reason.IDLE)

    def _yield_memory(self, waited_for: Container[RunnerKey]) -> None:
        """Stops idle runners, the least recently used first, while all runners count for more than the budget: other
        programs have taken memory."""
        if not self.state.shrunk:
            return
        idle = [slot for slot in self.live.values() if slot.phase in (Phase.READY, Phase.SLEEPING) and not slot.leases]
        for slot in sorted(idle, key=lambda slot: slot.last_used):
            if self._is_pinned(slot) or slot.key in waited_for:
                continue
            for host, part in self.memory.parts(slot):
                memory = self.memory[host]
                helps = any(left < 0 < size for left, size in zip(memory.left, memory.size(part), strict=True))
                if helps and host in self.state.shrunk:
                    self._stop(slot, Reason.MEMORY)
                    break

    def _is_outgrown(self, slot: Slot) -> bool:
        """True if a ready runner has more sequences of the same key."""
        ready = slot.grows and slot.phase in (Phase.READY, Phase.SLEEPING)
        return ready and any(s.phase is Phase.READY and not s.grows for s in self._of(slot.key))

    def _is_basic(self, slot: Slot) -> bool:
        """True for the first `least` runners of a key; the others came because these were busy."""
        ids = self._ids[slot.key]
        return len(ids) == 1 or sum([id.number < slot.number for id in ids]) < slot.least

    def _is_pinned(self, slot: Slot) -> bool:
        """True for the runners that a pin keeps."""
        return slot.pinned and self._is_basic(slot)

    def _falls_asleep(self, slot: Slot) -> bool:
        """Puts a runner to sleep, if it can sleep and there is room for the larger of both figures. A runner whose
        engine still works does not sleep."""
        asleep = self.state.asleep.get(slot.id)
        if asleep is None or slot.abandoned or not self.memory[slot.host].start(slot.id, asleep):
            return False
        self.live[slot.id] = slot._replace(phase=Phase.SLEEPING, memory=slot.memory.most(asleep))
        self._actions.append(Sleep(slot.id))
        return True

    def _serve(self, group: Group) -> Group:
        """Grants leases of ready runners and refuses requests that may not wait longer. Returns the others."""
        slots, closing, max_wait = self._of(group.key), self.state.closing, self.policy.max_wait
        paused = group.key.files in self.state.paused
        if ready := [slot for slot in slots if slot.phase is Phase.READY]:
            group = self._grant(ready, group)
        late = tuple(takewhile(lambda request: closing or request.since + max_wait <= self.now, group.waiting))
        if late:
            phase = next((slot.phase for slot in (*ready, *slots)), None)
            timed_out = failures.timed_out(group, max_wait, phase, paused)
            error = failures.shutting_down() if closing else timed_out
            self._refuse(replace(group, waiting=late), error)
            group = replace(group, waiting=group.waiting[len(late) :])
        if group.waiting:
            self._due.append(group.waiting[0].since + max_wait)
        return group

    def _grant(self, slots: Sequence[Slot], group: Group) -> Group:
        """Grants as many leases as these ready runners of the group have left, of the suspects one at a time. Returns
        the group without the requests that got one."""
        if not (free := sum([slot.free for slot in slots])):
            return group
        waiting, suspect = group.waiting, next((request for request in group.waiting if request.suspect), None)
        if suspect is not None:
            suspects_from = max([slot.suspects_from for slot in slots])
            its_turn = self.now >= suspects_from
            waiting = tuple([r for r in waiting if not r.suspect or (r is suspect and its_turn)])
            self._due.append(self.now + SUSPECT_TURN if its_turn else suspects_from)
        chosen = self._turns.in_turn(waiting, free)
        if not chosen:
            return group
        granted: dict[RunnerId, list[Request]] = {slot.id: [] for slot in slots}
        for request in chosen:
            places = [s for s in slots if len(granted[s.id]) < s.free]
            best = min(places, key=lambda s: (s.number != request.prefers, s.leases + len(granted[s.id]), s.number))
            granted[best.id].append(request)
        for slot in slots:
            if requests := granted[slot.id]:
                leases = slot.leases + len(requests)
                interactive = slot.interactive + sum([not r.batch for r in requests])
                self.live[slot.id] = slot._replace(leases=leases, interactive=interactive, last_used=self.now)
                self._actions.append(Grant(slot.id, tuple([request.id for request in requests])))
        taken = {request.id for request in chosen}
        return replace(group, waiting=tuple([r for r in group.waiting if r.id not in taken]), turn=self.now)

    def _wants_runner(self, group: Group) -> bool:
        """True if the group has no runner, or only some that sleep, and may have one."""
        paused = group.key.files in self.state.paused
        return bool(group.options) and not paused and all(s.phase is Phase.SLEEPING for s in self._of(group.key))

    def _add_replica(self, group: Group) -> None:
        """Wakes or starts another runner of a model that has a ready one, where there is room for it now."""
        slots = self._of(group.key)
        if self.state.closing or not group.options or group.key.files in self.state.paused:
            return
        ready = [slot for slot in slots if slot.phase is Phase.READY]
        sleepers = [slot for slot in slots if slot.phase is Phase.SLEEPING]
        if not ready or len(ready) + len(sleepers) < len(slots):
            return  # one at a time, and none while another one leaves
        if len(ready) >= group.least:
            due = group.waiting[0].since + self.policy.grow if group.waiting else math.inf
            if len(ready) >= group.most or self.now < due:
                self._due.append(due)
                return
        if not sleepers and not placement.may_be_free(kinds_of(group.options), self.memory):
            return
        if sleepers:
            group = replace(group, number=sleepers[0].number)
            kinds, pause = Candidates.only(self._woken(sleepers[0]))
        else:
            group = replace(group, number=self._next_number(slots))
            kinds, pause = placement.candidates(
                group.runner, group.options, self._failures, self.memory, self._budgets(), self.now
            )
        option = placement.free_now(group.runner, kinds, self.memory)
        if pause is not None:
            self._due.append(pause.until)
        elif option is not None and self.memory[option.place.site].start(group.runner, option.memory):
            self._actions.append(Start(group.runner, option))

    def _widen(self, group: Group) -> None:
        """Gives a model whose only runner has one sequence a runner with more, beside it or in its place."""
        slots = self._of(group.key)
        if len(slots) != 1 or slots[0].phase is not Phase.READY or not slots[0].grows or slots[0].free:
            return
        if self.state.closing or group.key.files in self.state.paused:
            return
        [slot], due = slots, group.waiting[0].since + self.policy.grow
        group = replace(group, number=self._next_number(slots))
        more = [option for option in group.wider if option.sequences > slot.parallel]
        candidates = placement.candidates(group.runner, more, self._failures, self.memory, self._budgets(), self.now)
        if (pause := candidates.pause) is not None or self.now < due:
            self._due.append(max(due, pause.until if pause is not None else due))
        elif (option := placement.free_now(group.runner, candidates.kinds, self.memory)) is not None:
            self.memory[option.place.site].start(group.runner, option.memory)
            self._actions.append(Start(group.runner, option))
        elif any(self._fits_without(slot, option, group.runner) for option in candidates.each()):
            self._stop(slot, Reason.GROWN)

    def _fits_without(self, slot: Slot, option: RunOption, runner: RunnerId) -> bool:
        """True if the option has room once this runner is gone. Then nothing maps the model's files any more."""
        there = dict(self.memory.parts(slot))
        for where, wanted in zip(option.place.each, option.memory.each, strict=True):
            memory, part = self.memory[where.host], there.get(where.host)
            left = add(memory.left, memory.size(part)) if part is not None else memory.left
            if not covers(left, memory.need(runner, replace(wanted, shared=0) if slot.memory.shared else wanted)):
                return False
        return True

    @staticmethod
    def _next_number(slots: Sequence[Slot]) -> int:
        taken = {slot.number for slot in slots}
        return next(number for number in range(len(taken) + 1) if number not in taken)

    def _admit_in_line(self, waiting: Sequence[Group]) -> None:
        """Finds runners for the groups that want one, and can have one. A load counts as a turn of its callers. Two
        parts of the budget cannot be evicted: the memory of pinned runners, which may be woken at any time, and the
        memory of groups that will be pinned. These come first, so no other start of this plan changes the choice of a
        group."""
        urgent, waited_for = self._turns.urgent(waiting), {group.key for group in waiting}
        self._due += [min(map(self._turns.yields_until, g.waiting)) for g in waiting if g.key not in urgent]
        live = [s._replace(pinned=self._is_pinned(s)) if s.pinned else s for s in self.live.values()]
        eviction = self.eviction(live, waited_for, urgent, self.memory, self.policy, self.now)
        loads = {slot.key for slot in self.live.values() if slot.phase is Phase.STARTING}
        wanting = [self._to_run(group) for group in waiting if self._wants_runner(group)]
        pinned = [s for s in self.live.values() if self._is_pinned(s) and s.phase not in LEAVING] if wanting else []
        evictable, first = self._budgets(), set()
        for slot in pinned:
            for host, taken in self._awake(slot):
                if host in evictable:
                    evictable[host] = subtract(evictable[host], taken)
        for group in sorted([g for g in wanting if g.pinned], key=lambda g: (g.since, g.waiting[0].id)):
            if group.runner not in eviction.gone and (kinds := self._candidates(group, evictable)):
                place, taken = self._admit(group, kinds, eviction)
                first.add(group.key)
                if group.runner not in self.live:
                    vectors = [evictable[host] for host in place.hosts]
                    for host, vector, part in zip(place.hosts, vectors, pieces(taken, vectors), strict=True):
                        evictable[host] = subtract(vector, part)
        chosen = {g.key: kinds for g in wanting if not g.pinned and (kinds := self._candidates(g, evictable))}
        numbered = {group.key: group for group in wanting}
        in_line = [numbered.get(g.key, g) for g in waiting if g.key in chosen or g.key in first or g.key in loads]
        for group in self._turns.in_line(in_line, urgent):
            if group.key in chosen and group.runner not in eviction.gone:  # a sleeping runner may have been evicted
                self._admit(group, chosen[group.key], eviction)

    def _admit(self, group: Group, kinds: Sequence[Kind], eviction: Eviction) -> tuple[RunPlace, Vector]:
        """Starts a runner, or evicts for it. Returns its place, and the memory that it takes there, or that is reserved
        for it."""
        eviction.gone.add(group.runner)  # a runner that is to be woken makes no room for itself
        option, parts, again = placement.place(group, kinds, self.memory, eviction)
        victims = [self.live[part.id] for part in parts]
        eviction.take(victims)
        for slot in victims:
            self._stop(slot, Reason.ROOM, group.name)
        self._due.append(again)
        memory = self.memory[option.place.site]
        need = memory.need(group.runner, option.memory)
        if memory.start(group.runner, option.memory):
            self._actions.append(Start(group.runner, option))
        else:
            memory.reserve(need)
        return option.place, need

    def _to_run(self, group: Group) -> Group:
        """The group with the number of the runner that is to be woken, or started."""
        sleepers = self._of(group.key)
        return replace(group, number=sleepers[0].number) if sleepers else group

    def _candidates(self, group: Group, evictable: dict[str, Vector]) -> Sequence[Kind]:
        """The ways to give the group a runner now. Refuses it if nothing can ever fit, or during a pause after a
        failure for whose end its requests may not wait."""
        sleeper = self.live.get(group.runner)
        if sleeper is not None:
            woken = self._woken(sleeper)
            most = evictable.get(sleeper.host)
            if most is not None and self._is_pinned(sleeper):
                most = add(most, dict(self._awake(sleeper))[sleeper.host])
            if most is not None and covers(most, self.memory[sleeper.host].total(sleeper.id, woken.memory)):
                return Candidates.only(woken).kinds
            self._fits_nowhere(group)
            return ()
        kinds, pause = placement.candidates(
            group.runner, group.options, self._failures, self.memory, evictable, self.now
        )
        if pause is not None and pause.waits:
            self._due.append(pause.until)
        elif pause is not None:
            self._refuse(group, failures.backing_off(group, pause, self.now))
        elif not kinds:
            self._fits_nowhere(group)
        return kinds

    def _fits_nowhere(self, group: Group) -> None:
        """Refuses the group, unless hosts may come on which it fits."""
        if self.now < (until := self.state.waits_for_hosts(group)):
            self._due.append(until)
        else:
            self._refuse(group, failures.never_fits(group, self.memory))

    def _woken(self, sleeper: Slot) -> RunOption:
        """The place and the memory of a runner that is awake again."""
        return sleeper.option._replace(memory=self.state.asleep.get(sleeper.id, sleeper.memory))

    def _budgets(self) -> dict[str, Vector]:
        return {host: self.memory[host].budget for host in self.state.hosts}

    def _awake(self, slot: Slot) -> list[tuple[str, Vector]]:
        """What the runner counts for on each of its hosts once it is awake."""
        if slot.phase is Phase.SLEEPING:
            slot = slot._replace(memory=self.state.asleep.get(slot.id, slot.memory))
        return [(host, self.memory[host].total(slot.id, part.memory)) for host, part in self.memory.parts(slot)]

    def _stop(self, slot: Slot, reason: Reason, room_for: str = "") -> None:
        """Stops the runner after its last lease, at once if it has none."""
        if slot.phase is not Phase.DRAINING:
            for host, part in self.memory.parts(slot):
                self.memory[host].release(part)
        self.live[slot.id] = slot._replace(phase=Phase.DRAINING if slot.leases else Phase.STOPPING)
        self._actions.append(Stop(slot.id, reason, room_for))

    def _refuse(self, group: Group, error: BaseException) -> None:
        self._actions.append(Refuse(group.key, tuple([request.id for request in group.waiting]), error))
