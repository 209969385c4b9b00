"""Which runners exist and which request gets which: one pure function, called after every change.

1. A runner that ended by itself delays its model's next start (`failures`). A failed start answers all requests that
   waited for it.
2. A runner without leases stops when its keep-alive has passed; a paused model's runner stops after its last lease. A
   runner that can sleep sleeps for a second keep-alive before it stops, and is woken like a start.
3. Requests are served in the order of `fairness`. The runner is ready and has a lease left: grant. It is starting or
   leaving: wait. The model can never fit: refuse. It fits: start. Otherwise evict (`eviction`) and reserve the memory,
   which no request later in line may take.
4. Of several variants of a run the first that can be given room by eviction is started.
5. A runner's memory counts until its process is gone.
6. A pinned runner is never evicted; a request that only its memory could serve is refused. A pinned model that is
   waited for counts as pinned already.
7. Batches beside clients of the same model get a runner of their own if it fits without eviction. Their requests wait
   for it until it is gone, then for the clients' runner again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import takewhile

from modelrunner.errors import BackendUnavailable
from modelrunner.scheduler import failures
from modelrunner.scheduler.allocation import Allocation, Vector, add, covers, raised, subtract
from modelrunner.scheduler.eviction import Eviction
from modelrunner.scheduler.fairness import KEPT_FREE, Turns, batch_places, batches_part
from modelrunner.scheduler.state import (
    Action,
    Forget,
    Grant,
    Group,
    Phase,
    Reason,
    Refuse,
    Sleep,
    Slot,
    Start,
    State,
    Stop,
    WakeAt,
)
from modelrunner.types import RunnerKey

_STAYING = (Phase.STARTING, Phase.READY, Phase.SLEEPING)


def plan(state: State, now: float) -> list[Action]:
    """The actions for this state at time `now`, in the order to carry them out. Carried out, they leave a state whose
    plan is empty but for `WakeAt`."""
    return Plan(state, now).make()


class Plan:
    """One plan in the making. `live` are the runners whose process may still exist, as they will be."""

    eviction = Eviction
    batch_places = staticmethod(batch_places)

    def __init__(self, state: State, now: float) -> None:
        self.state, self.now, self.policy = state, now, state.policy
        self.live: dict[RunnerKey, Slot] = {s.key: s for s in state.slots if s.phase is not Phase.ENDED}
        needs = [need for group in state.groups for need in group.needs]
        self.memory = Allocation(state.budget, self.live.values(), (*needs, *state.asleep.values()))
        self._failures = dict(state.failures)
        self._turns = Turns(state.served, state.policy.ageing, now)
        self._waiting: Sequence[Group] = ()
        self._urgent: set[RunnerKey] = set()
        self._actions: list[Action] = []
        self._wake = math.inf

    def make(self) -> list[Action]:
        waiting = {group.key: group for group in self.state.groups}
        failed = self._forget_ended(waiting)
        self._drain_unwanted()
        groups = [group for key, group in waiting.items() if group.waiting and key not in failed]
        self._waiting = [group for group in map(self._serve, groups) if group.waiting]
        self._urgent = self._turns.urgent(self._waiting)
        for group in self._waiting:
            if group.key not in self._urgent:
                self._wake_at(min(map(self._turns.yields_until, group.waiting)))
        self._stop_unused()
        self._admit_in_line([g for g in self._waiting if self._wants_a_runner(g)])
        self._part_batches()
        return self._actions if math.isinf(self._wake) else [*self._actions, WakeAt(self._wake)]

    # Rule 1

    def _forget_ended(self, groups: Mapping[RunnerKey, Group]) -> set[RunnerKey]:
        """Returns the keys whose waiting requests were answered with the failure."""
        failed = set()
        for slot in self.state.slots:
            if slot.phase is not Phase.ENDED:
                continue
            group, failure = groups.get(slot.key), None
            # An engine that is not installed was not started: no pause, since installing it mends that at once.
            if slot.error is not None and not isinstance(slot.error, BackendUnavailable):
                variants = len(group.needs) if group is not None else 1
                failure = failures.after(self._failures.get(slot.key), slot, variants, self.now)
                self._failures[slot.key] = failure
            if slot.error is not None and not slot.was_ready and not (failure and failure.waits):
                failed.add(slot.key)
                if group is not None:
                    self._refuse(group, failures.explained(slot.error, group, self.memory))
            self._actions.append(Forget(slot.key, failure))
        return failed

    def _is_resting(self, group: Group) -> bool:
        """True during the pause after a failure. Refuses the group if its requests may not wait for the end of it."""
        if group.key in self.live or self._may_start(group.key):
            return False
        failure = self._failures[group.key]
        if failure.waits:
            self._wake_at(failure.until)
        else:
            self._refuse(group, failures.backing_off(group, failure, self.now))
        return True

    def _may_start(self, key: RunnerKey) -> bool:
        """True if the key has no runner, and no pause after a failure."""
        return key not in self.live and (key not in self._failures or self.now >= self._failures[key].until)

    # Rule 2

    def _drain_unwanted(self) -> None:
        """Drains all runners when the daemon ends, and those of paused models, pinned or not."""
        for slot in list(self.live.values()):
            if slot.phase in _STAYING and (self.state.closing or slot.key.model_id in self.state.paused):
                self._stop(slot, Reason.SHUTDOWN if self.state.closing else Reason.PAUSED)

    def _stop_unused(self) -> None:
        for slot in [slot for slot in self.live.values() if not slot.leases]:
            if slot.phase is Phase.DRAINING:
                self._stop(slot, slot.drain or Reason.UNLOAD)
            elif slot.phase in (Phase.READY, Phase.SLEEPING) and not slot.pinned:
                tired, expires = slot.last_used + slot.keep_alive, slot.last_used + 2 * slot.keep_alive
                if self.now < tired:
                    self._wake_at(tired)
                elif self.now < expires and (slot.phase is Phase.SLEEPING or self._falls_asleep(slot)):
                    self._wake_at(expires)
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

    # Rule 3

    def _serve(self, group: Group) -> Group:
        """Grants leases of a ready runner and refuses requests that waited too long. Returns the rest of the group."""
        if self.state.closing:
            self._refuse(group, failures.shutting_down())
            return replace(group, waiting=())
        slot = self.live.get(group.key)
        if slot is not None and slot.phase is Phase.READY:
            group = self._grant(slot, group)
        late = tuple(takewhile(lambda r: r.since + self.policy.max_wait <= self.now, group.waiting))
        if late:
            paused = group.key.model_id in self.state.paused
            error = failures.timed_out(group, self.policy.max_wait, slot.phase if slot else None, paused)
            self._refuse(replace(group, waiting=late), error)
            group = replace(group, waiting=group.waiting[len(late) :])
        if group.waiting:
            self._wake_at(group.waiting[0].since + self.policy.max_wait)
        return group

    def _grant(self, slot: Slot, group: Group) -> Group:
        """Grants as many leases as the runner has left. Returns the group without the requests that got one."""
        batches = self.batch_places(slot, self.now)
        chosen = self._turns.in_turn(group.waiting, slot.free, batches)
        if batches < slot.free:
            self._wake_at(slot.interactive_at + KEPT_FREE)
        if not chosen:
            return group
        self._turns.taken(chosen)
        ids = tuple([request.id for request in chosen])
        leases, interactive = slot.leases + len(ids), slot.interactive + sum([not r.batch for r in chosen])
        self.live[slot.key] = slot._replace(leases=leases, interactive=interactive, last_used=self.now)
        self._actions.append(Grant(slot.key, ids))
        taken = set(ids)
        return replace(group, waiting=tuple([r for r in group.waiting if r.id not in taken]), turn=self.now)

    def _wants_a_runner(self, group: Group) -> bool:
        """True if the group may be given a runner: it has none, or one that sleeps."""
        slot, paused = self.live.get(group.key), group.key.model_id in self.state.paused
        return bool(group.needs) and not paused and (slot is None or slot.phase is Phase.SLEEPING)

    def _admit_in_line(self, groups: Sequence[Group]) -> None:
        """Finds runners for the groups that want one, and can have one. A load counts as a turn of its callers."""
        chosen = self._choose([group for group in groups if not self._is_resting(group)])
        slots, waited_for = tuple(self.live.values()), {group.key for group in self._waiting}
        crowded = any(group.is_crowd for group in self.state.groups)
        self._eviction = self.eviction(slots, waited_for, self._urgent, self.memory, self.policy, self.now, crowded)
        loads = {slot.key for slot in self.live.values() if slot.phase is Phase.STARTING}
        line = [group for group in self._waiting if group.key in chosen or group.key in loads]
        for group in self._turns.in_line(line, self._urgent):
            if self._wants_a_runner(group):  # its sleeping runner may have been evicted
                self._admit(group, chosen[group.key])

    def _admit(self, group: Group, start: Start) -> None:
        need = self.memory.need(start.key, start.memory)
        self._eviction.gone.add(group.key)  # a runner that is to be woken makes no room for itself
        if any(shortage := self.memory.shortage(need)):
            victims, again = self._eviction.take(shortage, group)
            for slot in victims:
                self._stop(slot, Reason.ROOM, group.name)
            self._wake_at(again)
        if self.memory.start(start.key, start.memory):
            self._actions.append(start)
        else:
            self.memory.reserve(need)

    # Rules 4 and 6

    def _choose(self, groups: Sequence[Group]) -> dict[RunnerKey, Start]:
        """Returns by key the variant to start. Refuses the groups without a variant that can ever fit. Two parts of the
        budget cannot be evicted: the memory of pinned runners, which may be woken at any time, and the memory of older
        groups that will be pinned. So no start of this plan changes the choice of another group."""
        chosen: dict[RunnerKey, Start] = {}
        pinned = [slot for slot in self.live.values() if slot.pinned and slot.phase in _STAYING] if groups else []
        evictable = reduce(subtract, map(self._awake, pinned), self.memory.budget)
        for group in sorted(groups, key=lambda g: (not g.pinned, g.since, g.waiting[0].id)):
            most, sleeper = evictable, self.live.get(group.key)
            if sleeper is not None and sleeper.pinned:
                most = add(most, self._awake(sleeper))
            for start in self._starts(group, most):
                need = self.memory.total(start.key, start.memory)
                if covers(most, need):
                    chosen[group.key] = start
                    break
            else:
                too_large = not covers(self.memory.budget, need)
                self._refuse(group, failures.never_fits(group, self.memory, too_large))
                continue
            if group.pinned and sleeper is None:
                evictable = subtract(evictable, need)
        return chosen

    def _starts(self, group: Group, most: Vector) -> list[Start]:
        """Returns the variants that may be tried, the preferred one first. After memory ran out, more than the estimate
        counts, if eviction could give it. A sleeping runner has only the variant that it runs."""
        if (sleeper := self.live.get(group.key)) is not None:
            return [Start(group.key, self.state.asleep.get(group.key, sleeper.memory), sleeper.variant)]
        failure, variants = self._failures.get(group.key), list(enumerate(group.needs))
        if failure is not None and failure.floor is not None:
            floor = min(failure.floor, len(variants) - 1)
            variants = [(number, raised(memory, most)) for number, memory in variants[floor:]]
        return [Start(group.key, memory, number) for number, memory in variants]

    def _awake(self, slot: Slot) -> Vector:
        other = self.state.asleep.get(slot.key) if slot.phase is Phase.SLEEPING else None
        return self.memory.total(slot.key, other or slot.memory)

    # Rule 7

    def _part_batches(self) -> None:
        for group in self._waiting:
            own = group.key._replace(batch=True)
            part = self._may_start(own) and batches_part(group, self.live.get(group.key), self.now)
            if part and group.needs and self.memory.start(own, group.needs[0]):
                self._actions.append(Start(own, group.needs[0]))

    def _stop(self, slot: Slot, reason: Reason, room_for: str = "") -> None:
        """Stops the runner after its last lease, at once if it has none."""
        if slot.phase is not Phase.DRAINING:
            self.memory.release(slot)
        self.live[slot.key] = slot._replace(phase=Phase.DRAINING if slot.leases else Phase.STOPPING)
        self._actions.append(Stop(slot.key, reason, room_for))

    def _refuse(self, group: Group, error: BaseException) -> None:
        if group.waiting:
            self._actions.append(Refuse(group.key, tuple([request.id for request in group.waiting]), error))

    def _wake_at(self, time: float) -> None:
        """Notes that a plan is due at this time; the earliest counts, and past times are ignored."""
        if self.now < time < self._wake:
            self._wake = time
