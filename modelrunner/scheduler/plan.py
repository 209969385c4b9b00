"""Which runners exist and who gets them: one pure function, called after every change.

1. A runner that ended by itself is held against its model for a while (`failures`); a failed start answers everybody
   who waited for it, once.
2. A runner that nobody holds stops when its keep-alive has passed, that of a paused model at once. One that can sleep
   sleeps for a second keep-alive before that; who asks for it has it woken like a start, in room made the same way.
3. Whose turn it is comes first (`order`). Its runner is ready and has a lease left: grant; starting: wait; can never
   fit: refuse; fits: start; else free just enough: the cheapest runners that nobody holds, and, once the request has
   been overtaken for long enough, busy ones too, which then take nothing new and stop after their last lease; not one
   that somebody before it in line waits for. One that has just been loaded or used is spared for a while (`victims`).
4. The preferred variant of a run is waited for as long as room can be made for it; a smaller one is started where it
   could not be had if everything went that may go, or if it fits at once when half of the maximum wait has passed.
5. A runner's memory counts until its process is gone.
6. A pinned runner is never stopped for room; who needs the room of pinned ones is refused.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from modelrunner.errors import BackendUnavailable, OutOfMemory
from modelrunner.scheduler import failures, refusals
from modelrunner.scheduler.draft import Draft
from modelrunner.scheduler.order import in_line
from modelrunner.scheduler.room import Vector, add, covers, raised, subtract
from modelrunner.scheduler.sharing import own
from modelrunner.scheduler.state import Action, Failure, Forget, Group, Phase, Reason, Slot, State
from modelrunner.types import RequiredMemory, RunnerKey

_STAYING = (Phase.STARTING, Phase.READY, Phase.SLEEPING)


def is_warm(phase: Phase, waiting: int, in_use: int, capacity: int) -> bool:
    """May a request have the runner without queueing: it is ready, nobody else waits for it, and fewer than `capacity`
    requests hold it."""
    return phase is Phase.READY and not waiting and in_use < capacity


def is_full(waiting: int, in_use: int, parallel: int, max_queue: int) -> bool:
    """Is a model's queue full: requests beyond the engine's `parallel` sequences wait too, inside the engine."""
    return waiting + max(0, in_use - parallel) >= max_queue


def plan(state: State, now: float) -> list[Action]:
    """The actions that the state asks for at time `now`, in the order to carry them out. Carried out, they leave a
    state whose plan is empty but for `WakeAt`."""
    return _Plan(state, now).make()


class _Plan:
    """The making of one plan: the decisions, of which the draft keeps the account."""

    def __init__(self, state: State, now: float) -> None:
        self._state, self._now, self._policy = state, now, state.policy
        self._failures = dict(state.failures)
        self._draft = Draft(state, now)
        self._room = self._draft.room
        self._claims: dict[RunnerKey, Group] = {}

    def make(self) -> list[Action]:
        failed = self._forget_ended()
        groups = [g for g in self._state.groups if g.waiting and g.key not in failed]
        if self._state.closing:
            self._close(groups)
            groups = []
        else:
            self._pause()
            self._keep_pinned()
        waiting = [g for g in map(self._serve, groups) if g.waiting]
        self._draft.waiting = {g.key: len(g.waiting) for g in waiting}
        self._stop_unused()
        self._admit_in_line(waiting)
        if not self._state.closing:
            self._take_back_drains()
        return self._draft.finished()

    def _forget_ended(self) -> set[RunnerKey]:
        """Rule 1. Returns the keys whose waiters were answered with the failure."""
        groups = {g.key: g for g in self._state.groups}
        failed = set()
        for slot in self._state.slots:
            if slot.phase is not Phase.ENDED:
                continue
            group, failure = groups.get(slot.key), None
            # An engine that is not installed was not started: installing it mends that at once.
            if slot.error is not None and not isinstance(slot.error, BackendUnavailable):
                variants = len(group.needs) if group is not None else 1
                failure = failures.after(self._failures.get(slot.key), slot, variants, self._now)
                self._failures[slot.key] = failure
            if slot.error is not None and not slot.was_ready and not (failure and failure.waits):
                failed.add(slot.key)
                if group is not None:
                    self._draft.refuse(slot.key, group.waiting, self._told(group, slot.error))
            self._draft.actions.append(Forget(slot.key, failure))
        return failed

    def _told(self, group: Group, error: BaseException) -> BaseException:
        if isinstance(error, OutOfMemory) and group.needs:
            return refusals.out_of_memory(group, error, self._room.budget, self._room.free)
        return error

    def _close(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._draft.refuse(group.key, group.waiting, refusals.shutting_down())
        for slot in list(self._draft.live.values()):
            if slot.phase in _STAYING:
                self._draft.drain(slot, Reason.SHUTDOWN)

    def _pause(self) -> None:
        """The runners of paused models go, pinned or not."""
        for slot in list(self._draft.live.values()):
            if slot.key.model_id in self._state.paused and slot.phase in _STAYING:
                self._draft.drain(slot, Reason.PAUSED)

    def _keep_pinned(self) -> None:
        """One that was pinned after its drain for room began."""
        for slot in list(self._draft.live.values()):
            paused = slot.key.model_id in self._state.paused
            if slot.pinned and not paused and slot.phase is Phase.DRAINING and slot.drain is Reason.ROOM:
                self._draft.take_back(slot)

    def _serve(self, group: Group) -> Group:
        """Grants what is ready and refuses who waited too long. Returns what still waits."""
        slot = self._draft.live.get(group.key)
        if slot is not None and slot.phase is Phase.READY:
            group = self._draft.grant(slot, group)
        late = tuple(takewhile(lambda r: r.since + self._policy.max_wait <= self._now, group.waiting))
        if late:
            paused = group.key.model_id in self._state.paused
            error = refusals.timed_out(group, self._policy.max_wait, slot.phase if slot else None, paused)
            self._draft.refuse(group.key, late, error)
            group = replace(group, waiting=group.waiting[len(late) :])
        if group.waiting:
            self._draft.wake_at(group.waiting[0].since + self._policy.max_wait)
        return group

    def _admit_in_line(self, waiting: Sequence[Group]) -> None:
        """Who needs a runner, in turn. From a runner that others wait for, those who come after them take no room."""
        if not any(self._wants_a_runner(group) for group in waiting):
            return
        staying = [group for group in waiting if not self._is_refused(group)]
        for group in in_line(staying, self._draft.served, self._policy.ageing, self._now):
            if self._wants_a_runner(group):
                self._draft.wake_at(group.waiting[0].since + self._policy.ageing)  # when it may come first
                self._admit(group)
            else:
                self._draft.keep(group.key)

    def _wants_a_runner(self, group: Group) -> bool:
        """It has none, nor one that starts, and could have one."""
        slot = self._draft.live.get(group.key)
        has_one = slot is not None and slot.phase in (Phase.READY, Phase.STARTING)
        return bool(group.needs) and not has_one and group.key.model_id not in self._state.paused

    def _stop_unused(self) -> None:
        """Rule 2, and the end of every drain."""
        for slot in list(self._draft.live.values()):
            if slot.leases:
                continue
            if slot.phase is Phase.DRAINING:
                self._draft.stop(slot, slot.drain or Reason.UNLOAD)
            elif slot.phase in (Phase.READY, Phase.SLEEPING) and not slot.pinned:
                self._let_expire(slot)

    def _let_expire(self, slot: Slot) -> None:
        tired, expires = slot.last_used + slot.keep_alive, slot.last_used + 2 * slot.keep_alive
        if self._now < tired:
            self._draft.wake_at(tired)
        elif self._now < expires and (slot.phase is Phase.SLEEPING or self._draft.sleep(slot)):
            self._draft.wake_at(expires)
        else:
            self._draft.stop(slot, Reason.IDLE)

    def _is_refused(self, group: Group) -> bool:
        """Answers those who can have no runner now, or ever."""
        error = self._refusal(group) if self._wants_a_runner(group) else None
        if error is not None:
            self._draft.refuse(group.key, group.waiting, error)
        return error is not None

    def _refusal(self, group: Group) -> Exception | None:
        failure = self._resting(group)
        if failure is not None:
            return None if failure.waits else refusals.backing_off(group, failure, self._now)
        _, memory = self._variant(group)
        need = self._room.vector(memory)
        if not covers(self._room.budget, need):
            return refusals.too_large(group, self._room.budget, self._room.free)
        if not covers(self._evictable(group), need):
            return refusals.pinned_out(group, self._room.budget, self._room.free)
        return None

    def _resting(self, group: Group) -> Failure | None:
        """The failure after which the pause is not over."""
        failure = self._failures.get(group.key)
        if failure is None or self._now >= failure.until or group.key in self._draft.live:
            return None
        return failure

    def _admit(self, group: Group) -> None:
        """Rule 3, for one group that wants a runner."""
        failure = self._resting(group)
        if failure is not None:
            self._draft.wake_at(failure.until)
            return
        slot = self._draft.live.get(group.key)
        number, memory = self._variant(group)
        need = self._room.vector(memory)
        if not covers(self._evictable(group), need):
            self._is_refused(group)  # a runner that will be pinned was started before it
        elif slot is not None and self._may_stay(slot):
            self._take_back(slot, group)
        elif not self._begin(group, number, memory):
            if (sleeper := self._sleeper(group)) is not None:
                need = subtract(need, self._room.vector(sleeper.memory))
                self._draft.keep(group.key)
            self._make_room(group, need)
            if (slot := self._draft.live.get(group.key)) is not None and self._may_stay(slot):
                self._take_back(slot, group)  # the others who go for it are enough
            elif not self._begin(group, number, memory):
                self._room.claim(tuple([max(0, n) for n in need]))
                self._claims[group.key] = group

    def _begin(self, group: Group, number: int, memory: RequiredMemory) -> bool:
        """To load its model, or to wake its runner, if there is room now."""
        if (sleeper := self._sleeper(group)) is not None:
            return self._draft.wake(sleeper)
        return group.key not in self._draft.live and self._draft.start(group, number, memory)

    def _sleeper(self, group: Group) -> Slot | None:
        slot = self._draft.live.get(group.key)
        return slot if slot is not None and slot.phase is Phase.SLEEPING else None

    def _evictable(self, group: Group) -> Vector:
        """What it could have at most: its own runner is not in its way, even if pinned."""
        sleeper = self._sleeper(group)
        own = self._choices(group)[0][1] if sleeper is not None and sleeper.pinned else None
        return self._draft.evictable if own is None else add(self._draft.evictable, self._room.vector(own))

    def _variant(self, group: Group) -> tuple[int, RequiredMemory]:
        """Rule 4: a variant's number, and what counts for it; the smallest one where none fits."""
        choices = self._choices(group)
        fitting = [c for c in choices if covers(self._draft.evictable, self._room.vector(c[1]))] or choices[-1:]
        if len(fitting) > 1 and self._now >= self._overdue_at(group):
            return next((c for c in fitting if self._room.can_take(self._room.vector(c[1]))), fitting[0])
        return fitting[0]

    def _choices(self, group: Group) -> list[tuple[int, RequiredMemory]]:
        """The variants that may be tried; where memory ran out, more counts for them than was estimated. A sleeping
        runner has only its own."""
        sleeper = self._sleeper(group)
        if sleeper is not None and sleeper.other is not None:
            return [(sleeper.variant, sleeper.memory.most(sleeper.other))]
        failure, choices = self._failures.get(group.key), list(enumerate(group.needs))
        if mapped := self._draft.mapped.get(group.key.model_id):
            choices = [(number, own(memory, mapped)) for number, memory in choices]
        if failure is None or not failure.raised:
            return choices
        floor = min(failure.floor, len(choices) - 1)
        return [(number, raised(memory, self._draft.evictable)) for number, memory in choices[floor:]]

    def _overdue_at(self, group: Group) -> float:
        """When nobody is spared any longer, so that it is served before the maximum wait is over."""
        return group.waiting[0].since + self._policy.max_wait / 2

    def _make_room(self, group: Group, need: Vector) -> None:
        """Frees just what is missing, if those who go for it may go now."""
        shortage = self._room.shortage(need)
        if not any(shortage):
            return  # it is on its way
        candidates, since, waiting = self._draft.victims, group.waiting[0].since, len(group.waiting)
        for victim in (victims := candidates.take(shortage, since, waiting)):
            self._draft.drain(victim.slot, Reason.ROOM, group.name)
        if not victims:
            for time in candidates.again_at(since, waiting):
                self._draft.wake_at(time)

    def _take_back_drains(self) -> None:
        drained = [s for s in self._draft.live.values() if s.phase is Phase.DRAINING]
        for slot in sorted(drained, key=lambda s: -s.last_used):
            if self._may_stay(slot):
                self._take_back(slot, self._claims.get(slot.key))

    def _take_back(self, slot: Slot, group: Group | None) -> None:
        """`group` waits for it."""
        self._draft.take_back(slot)
        if group is not None and self._draft.grant(self._draft.live[slot.key], group).waiting:
            self._draft.keep(slot.key)

    def _may_stay(self, slot: Slot) -> bool:
        """It is drained for room or was paused, and those who still wait for room do without it."""
        if slot.phase is not Phase.DRAINING or not slot.leases or slot.key.model_id in self._state.paused:
            return False
        if slot.drain not in (Reason.ROOM, Reason.PAUSED):
            return False
        return covers(self._room.over(), self._room.vector(slot.memory))
