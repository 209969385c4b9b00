"""Which runners exist and which request gets which: one pure function, called after every change.

1. A runner that ended by itself delays its model's next start (`failures`). A failed start is the answer to all who
   waited for it.
2. A runner without leases stops when its keep-alive has passed; a paused model's runner stops after its last lease. A
   runner that can sleep sleeps for a second keep-alive before it stops, and is woken like a start.
3. Requests are served in the order of `turns`. The runner is ready and has a lease left: grant. It is starting: wait.
   The model can never fit: refuse. It fits: start. Otherwise evict (`victims`) and wait for the memory, which no
   request later in line may take.
4. Of several variants of a run the first that can be given room by eviction is started.
5. A runner's memory counts until its process is gone.
6. A pinned runner is never evicted; a request that only its memory could serve is refused.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from modelrunner.errors import BackendUnavailable, OutOfMemory
from modelrunner.scheduler import failures
from modelrunner.scheduler.planning import Planning
from modelrunner.scheduler.room import Vector, add, covers, own, raised, subtract
from modelrunner.scheduler.state import Action, Failure, Forget, Group, Phase, Reason, Slot, State
from modelrunner.scheduler.turns import in_line
from modelrunner.types import RequiredMemory, RunnerKey

_STAYING = (Phase.STARTING, Phase.READY, Phase.SLEEPING)


def is_full(waiting: int, in_use: int, parallel: int, max_queue: int) -> bool:
    """True if a model's queue is full. Requests beyond the engine's `parallel` sequences wait too, inside the
    engine."""
    return waiting + max(0, in_use - parallel) >= max_queue


def plan(state: State, now: float) -> list[Action]:
    """The actions for this state at time `now`, in the order to carry them out. Carried out, they leave a state whose
    plan is empty but for `WakeAt`."""
    return _Plan(state, now).make()


class _Plan:
    """The decisions of one plan; `Planning` keeps account of them."""

    def __init__(self, state: State, now: float) -> None:
        self._state, self._now, self._policy = state, now, state.policy
        self._failures = dict(state.failures)
        self._planning = Planning(state, now)
        self._room = self._planning.room

    def make(self) -> list[Action]:
        failed = self._forget_ended()
        groups = [g for g in self._state.groups if g.waiting and g.key not in failed]
        if self._state.closing:
            self._close(groups)
            groups = []
        else:
            self._pause()
        waiting = [g for g in map(self._serve, groups) if g.waiting]
        self._planning.wait(waiting)
        self._stop_unused()
        self._admit_in_line(waiting)
        return self._planning.finished()

    def _forget_ended(self) -> set[RunnerKey]:
        """Rule 1. Returns the keys whose waiting requests were answered with the failure."""
        groups = {g.key: g for g in self._state.groups}
        failed = set()
        for slot in self._state.slots:
            if slot.phase is not Phase.ENDED:
                continue
            group, failure = groups.get(slot.key), None
            # An engine that is not installed was not started: no pause, since installing it mends that at once.
            if slot.error is not None and not isinstance(slot.error, BackendUnavailable):
                variants = len(group.needs) if group is not None else 1
                failure = failures.after(self._failures.get(slot.key), slot, variants, self._now)
                self._failures[slot.key] = failure
            if slot.error is not None and not slot.was_ready and not (failure and failure.waits):
                failed.add(slot.key)
                if group is not None:
                    self._planning.refuse(slot.key, group.waiting, self._told(group, slot.error))
            self._planning.actions.append(Forget(slot.key, failure))
        return failed

    def _told(self, group: Group, error: BaseException) -> BaseException:
        if isinstance(error, OutOfMemory) and group.needs:
            return failures.out_of_memory(group, error, self._room.budget, self._room.free)
        return error

    def _close(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._planning.refuse(group.key, group.waiting, failures.shutting_down())
        for slot in list(self._planning.live.values()):
            if slot.phase in _STAYING:
                self._planning.drain(slot, Reason.SHUTDOWN)

    def _pause(self) -> None:
        """Drains the runners of paused models, pinned or not."""
        for slot in list(self._planning.live.values()):
            if slot.key.model_id in self._state.paused and slot.phase in _STAYING:
                self._planning.drain(slot, Reason.PAUSED)

    def _serve(self, group: Group) -> Group:
        """Grants leases of a ready runner and refuses requests that waited too long. Returns the rest of the group."""
        slot = self._planning.live.get(group.key)
        if slot is not None and slot.phase is Phase.READY:
            group = self._planning.grant(slot, group)
        late = tuple(takewhile(lambda r: r.since + self._policy.max_wait <= self._now, group.waiting))
        if late:
            paused = group.key.model_id in self._state.paused
            error = failures.timed_out(group, self._policy.max_wait, slot.phase if slot else None, paused)
            self._planning.refuse(group.key, late, error)
            group = replace(group, waiting=group.waiting[len(late) :])
        if group.waiting:
            self._planning.wake_at(group.waiting[0].since + self._policy.max_wait)
        return group

    def _admit_in_line(self, waiting: Sequence[Group]) -> None:
        """Finds runners for the groups that want one, in line; then for those whose runner was evicted for them."""
        planning, done = self._planning, set[RunnerKey]()
        for is_urgent in (True, False):
            groups = [group for group in waiting if (group.key in planning.urgent) is is_urgent]
            while wanting := [g for g in groups if g.key not in done and self._wants_a_runner(g)]:
                done |= {group.key for group in wanting}
                staying = [planning.turned(group) for group in wanting if not self._is_refused(group)]
                leaving = {g.key for g in staying if g.key in planning.live and self._sleeper(g) is None}
                for group in in_line(staying, leaving, planning.served):
                    self._admit(group)

    def _wants_a_runner(self, group: Group) -> bool:
        """True if no runner of the group is ready or starting, and one may be started."""
        slot = self._planning.live.get(group.key)
        has_one = slot is not None and slot.phase in (Phase.READY, Phase.STARTING)
        return bool(group.needs) and not has_one and group.key.model_id not in self._state.paused

    def _stop_unused(self) -> None:
        """Rule 2, and the end of every drain."""
        for slot in list(self._planning.live.values()):
            if slot.leases:
                continue
            if slot.phase is Phase.DRAINING:
                self._planning.stop(slot, slot.drain or Reason.UNLOAD)
            elif slot.phase in (Phase.READY, Phase.SLEEPING) and not slot.pinned:
                self._let_expire(slot)

    def _let_expire(self, slot: Slot) -> None:
        tired, expires = slot.last_used + slot.keep_alive, slot.last_used + 2 * slot.keep_alive
        if self._now < tired:
            self._planning.wake_at(tired)
        elif self._now < expires and (slot.phase is Phase.SLEEPING or self._planning.sleep(slot)):
            self._planning.wake_at(expires)
        else:
            self._planning.stop(slot, Reason.IDLE)

    def _is_refused(self, group: Group) -> bool:
        """Refuses the group if it cannot have a runner now, or ever. Returns whether it did."""
        error = self._refusal(group)
        if error is not None:
            self._planning.refuse(group.key, group.waiting, error)
        return error is not None

    def _refusal(self, group: Group) -> Exception | None:
        failure = self._resting(group)
        if failure is not None:
            return None if failure.waits else failures.backing_off(group, failure, self._now)
        _, memory = self._variant(group)
        need = self._room.vector(memory)
        if not covers(self._room.budget, need):
            return failures.too_large(group, self._room.budget, self._room.free)
        if not covers(self._evictable(group), need):
            return failures.pinned_out(group, self._room.budget, self._room.free)
        return None

    def _resting(self, group: Group) -> Failure | None:
        """The failure whose pause is not over yet."""
        failure = self._failures.get(group.key)
        if failure is None or self._now >= failure.until or group.key in self._planning.live:
            return None
        return failure

    def _admit(self, group: Group) -> None:
        """Rule 3, for one group that wants a runner."""
        failure = self._resting(group)
        if failure is not None:
            self._planning.wake_at(failure.until)
            return
        number, memory = self._variant(group)
        need = self._room.vector(memory)
        if not covers(self._evictable(group), need):
            self._is_refused(group)  # an earlier start of this plan will be pinned
            return
        if self._begin(group, number, memory):
            return
        if (sleeper := self._sleeper(group)) is not None:
            need = subtract(need, self._room.vector(sleeper.memory))
            self._planning.keep(group.key)
        self._make_room(group, need)
        if not self._begin(group, number, memory):
            self._room.claim(tuple([max(0, n) for n in need]))

    def _begin(self, group: Group, number: int, memory: RequiredMemory) -> bool:
        """Starts or wakes the group's runner if there is room now."""
        if (sleeper := self._sleeper(group)) is not None:
            return self._planning.wake(sleeper)
        return group.key not in self._planning.live and self._planning.start(group, number, memory)

    def _sleeper(self, group: Group) -> Slot | None:
        slot = self._planning.live.get(group.key)
        return slot if slot is not None and slot.phase is Phase.SLEEPING else None

    def _evictable(self, group: Group) -> Vector:
        """The most memory that eviction could give the group. Its own sleeping runner, even if pinned, gives its room
        too."""
        sleeper = self._sleeper(group)
        own = self._choices(group)[0][1] if sleeper is not None and sleeper.pinned else None
        return self._planning.evictable if own is None else add(self._planning.evictable, self._room.vector(own))

    def _variant(self, group: Group) -> tuple[int, RequiredMemory]:
        """Rule 4: the number and memory of the variant to start; the smallest one if none fits."""
        choices = self._choices(group)
        fitting = (c for c in choices if covers(self._planning.evictable, self._room.vector(c[1])))
        return next(fitting, choices[-1])

    def _choices(self, group: Group) -> list[tuple[int, RequiredMemory]]:
        """Numbers and memory of the variants that may be tried, the preferred one first. After memory ran out, more
        than the estimate counts. A sleeping runner has only the variant that it runs."""
        sleeper = self._sleeper(group)
        if sleeper is not None:
            return [(sleeper.variant, sleeper.memory.most(self._state.asleep[group.key]))]
        failure, choices = self._failures.get(group.key), list(enumerate(group.needs))
        if mapped := self._planning.mapped.get(group.key.model_id):
            choices = [(number, own(memory, mapped)) for number, memory in choices]
        if failure is None or not failure.raised:
            return choices
        floor = min(failure.floor, len(choices) - 1)
        return [(number, raised(memory, self._planning.evictable)) for number, memory in choices[floor:]]

    def _make_room(self, group: Group, need: Vector) -> None:
        """Evicts just enough for what is missing, if enough runners may go now."""
        shortage = self._room.shortage(need)
        if not any(shortage):
            return  # leaving runners give it
        victims, again = self._planning.victims.take(shortage, group)
        for slot in victims:
            self._planning.evict(slot, group)
        self._planning.wake_at(again)
