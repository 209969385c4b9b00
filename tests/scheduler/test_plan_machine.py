"""Any sequence of events, against what must always hold of the plan. The simulator carries out actions on values: there
is no scheduler in it."""

import math
from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelrunner.errors import EngineFailed, InsufficientMemory, TimedOut
from modelrunner.scheduler.plan import plan
from modelrunner.scheduler.state import (
    Action,
    Admit,
    Drain,
    Failure,
    Forget,
    Grant,
    Group,
    Phase,
    Policy,
    Reason,
    Refuse,
    Request,
    Slot,
    Start,
    State,
    Stop,
    WakeAt,
)
from modelrunner.types import Mode, RequiredMemory, RunnerKey

BUDGET = RequiredMemory(10, (8,))
SIZES = {
    "tiny": RequiredMemory(1, (1,)),
    "small": RequiredMemory(3, (2,)),
    "wide": RequiredMemory(1, (7,)),
    "large": RequiredMemory(8, (3,)),
    "pinned": RequiredMemory(2, (1,)),
    "huge": RequiredMemory(11),
}
POLICY = Policy(max_wait=30.0, patience=3.0)
ROUNDING = 1e-6
names = st.sampled_from(sorted(SIZES))


def key(name: str) -> RunnerKey:
    return RunnerKey("fake", name, Mode.COMPLETION)


@dataclass
class Waiting:
    name: str
    since: float


class PlanMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.wake = math.inf
        self.slots: dict[RunnerKey, Slot] = {}
        self.waiting: dict[int, Waiting] = {}
        self.leases: dict[int, RunnerKey] = {}
        self.failures: dict[RunnerKey, Failure] = {}
        self.answered: set[int] = set()
        self.cancelled: set[int] = set()
        self.issued = 0
        self.closing = False

    # Events

    @rule(name=names, count=st.integers(1, 3))
    def requests_come(self, name: str, count: int) -> None:
        for _ in range(count):
            self.issued += 1
            self.waiting[self.issued] = Waiting(name, self.now)
        self.reconcile()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def a_client_leaves(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[id]
        self.cancelled.add(id)
        self.reconcile()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), keep_alive=st.sampled_from([0.0, 4.0, 20.0, math.inf]))
    def a_lease_ends(self, data: st.DataObject, keep_alive: float) -> None:
        where = self.leases.pop(data.draw(st.sampled_from(sorted(self.leases))))
        held = self.slots.get(where)
        if held is not None:
            self.slots[where] = replace(held, leases=held.leases - 1, last_used=self.now, keep_alive=keep_alive)
        self.reconcile()

    @precondition(lambda self: self.phased(Phase.STARTING))
    @rule(data=st.data())
    def a_runner_gets_ready(self, data: st.DataObject) -> None:
        where = data.draw(st.sampled_from(self.phased(Phase.STARTING)))
        self.slots[where] = replace(self.slots[where], phase=Phase.READY, was_ready=True, last_used=self.now)
        self.failures.pop(where, None)
        self.reconcile()

    @precondition(lambda self: self.phased(Phase.STARTING, Phase.READY, Phase.DRAINING))
    @rule(data=st.data())
    def a_runner_dies(self, data: st.DataObject) -> None:
        where = data.draw(st.sampled_from(self.phased(Phase.STARTING, Phase.READY, Phase.DRAINING)))
        self.slots[where] = replace(self.slots[where], phase=Phase.ENDED, error=EngineFailed("died"))
        failed_start = not self.slots[where].was_ready
        here = {id for id, w in self.waiting.items() if key(w.name) == where}
        actions = self.reconcile()
        if failed_start:
            assert here <= self.answered, "a failed start answers everybody"
            assert Start(where, SIZES[where.model_id]) not in actions, "and is not tried again at once"

    @precondition(lambda self: self.phased(Phase.STOPPING))
    @rule(data=st.data())
    def a_process_is_gone(self, data: st.DataObject) -> None:
        where = data.draw(st.sampled_from(self.phased(Phase.STOPPING)))
        self.slots[where] = replace(self.slots[where], phase=Phase.ENDED)
        self.reconcile()

    @precondition(lambda self: self.phased(Phase.READY))
    @rule(data=st.data())
    def somebody_unloads(self, data: st.DataObject) -> None:
        where = data.draw(st.sampled_from(self.phased(Phase.READY)))
        self.slots[where] = replace(self.slots[where], phase=Phase.DRAINING, drain=Reason.UNLOAD)
        self.reconcile()

    @rule(seconds=st.floats(0.1, 40.0))
    def time_passes(self, seconds: float) -> None:
        end = self.now + seconds
        while self.wake <= end:
            self.now = max(self.now, self.wake)
            self.reconcile()
        self.now = end

    @precondition(lambda self: self.issued > 12)
    @rule()
    def it_closes(self) -> None:
        self.closing = True
        self.reconcile()
        assert not self.waiting

    # The simulator

    def phased(self, *phases: Phase) -> list[RunnerKey]:
        return sorted((k for k, s in self.slots.items() if s.phase in phases), key=str)

    def state(self) -> State:
        groups: dict[str, list[Request]] = {}
        for id, waiting in self.waiting.items():
            groups.setdefault(waiting.name, []).append(Request(id, waiting.since))
        return State(
            tuple(Group(key(name), tuple(requests), (SIZES[name],), name) for name, requests in groups.items()),
            tuple(self.slots.values()),
            BUDGET,
            self.failures,
            POLICY,
            self.closing,
        )

    def reconcile(self) -> list[Action]:
        actions = plan(self.state(), self.now)
        self.wake = math.inf
        for action in actions:
            self.carry_out(action)
        again = plan(self.state(), self.now)
        assert all(isinstance(action, WakeAt) for action in again), f"{actions} left {again} to do"
        return actions

    def carry_out(self, action: Action) -> None:
        match action:
            case Grant(where, requests):
                assert self.slots[where].phase is Phase.READY
                for id in requests:
                    assert key(self.waiting.pop(id).name) == where
                    self.answer(id)
                    self.leases[id] = where
                held = self.slots[where]
                self.slots[where] = replace(held, leases=held.leases + len(requests), last_used=self.now)
            case Start(where, memory):
                assert where not in self.slots, "two runners of one key"
                pinned = where.model_id == "pinned"
                self.slots[where] = Slot(
                    where, Phase.STARTING, memory, 0, self.now, 20.0, pinned, was_ready=False, load_seconds=1.0
                )
            case Stop(where, reason):
                stopped = self.slots[where]
                assert stopped.phase not in (Phase.STOPPING, Phase.ENDED)
                assert not stopped.leases, "a lease was lost"
                assert not (stopped.pinned and reason in (Reason.ROOM, Reason.IDLE))
                self.slots[where] = replace(stopped, phase=Phase.STOPPING)
            case Drain(where, reason):
                assert self.slots[where].phase is Phase.READY
                assert not self.slots[where].pinned or reason is Reason.SHUTDOWN
                self.slots[where] = replace(self.slots[where], phase=Phase.DRAINING, drain=reason)
            case Admit(where):
                assert self.slots[where].drain is Reason.ROOM
                self.slots[where] = replace(self.slots[where], phase=Phase.READY, drain=None)
            case Forget(where, failure):
                assert self.slots.pop(where).phase is Phase.ENDED
                self.leases = {id: held for id, held in self.leases.items() if held != where}
                if failure is not None:
                    self.failures[where] = failure
            case Refuse(where, requests, error):
                for id in requests:
                    waited = self.now - self.waiting.pop(id).since
                    assert not isinstance(error, TimedOut) or waited >= POLICY.max_wait - ROUNDING
                    assert isinstance(error, InsufficientMemory) or where.model_id != "huge" or self.closing
                    self.answer(id)
            case WakeAt(at):
                assert at > self.now
                self.wake = at

    def answer(self, id: int) -> None:
        assert id not in self.answered
        assert id not in self.cancelled
        self.answered.add(id)

    # What always holds

    @invariant()
    def never_over_the_budget(self) -> None:
        total = sum((slot.memory for slot in self.slots.values()), RequiredMemory(0))
        assert total.fits(BUDGET), total

    @invariant()
    def every_request_is_answered_or_waits(self) -> None:
        assert set(range(1, self.issued + 1)) == self.answered | self.cancelled | set(self.waiting)

    @invariant()
    def nobody_waits_beyond_the_limit(self) -> None:
        assert all(self.now - w.since <= POLICY.max_wait + ROUNDING for w in self.waiting.values())

    @invariant()
    def nobody_waits_for_a_ready_runner(self) -> None:
        ready = self.phased(Phase.READY)
        assert not [w for w in self.waiting.values() if key(w.name) in ready]

    @invariant()
    def the_oldest_is_not_overtaken_beyond_its_patience(self) -> None:
        """Who waited so long for room has it on its way, unless a load that others wait for holds it for now."""
        wanted = {key(w.name) for w in self.waiting.values()}
        blocked = [w for w in self.waiting.values() if key(w.name) not in self.slots]
        if not blocked or any(s.phase is Phase.STARTING and s.key in wanted for s in self.slots.values()):
            return
        oldest = min(blocked, key=lambda w: w.since)
        if any(w.since <= oldest.since and w.name != oldest.name for w in self.waiting.values()):
            return
        if self.now - oldest.since >= POLICY.patience + ROUNDING:
            staying = [s.memory for s in self.slots.values() if s.phase in (Phase.READY, Phase.STARTING)]
            assert (sum(staying, RequiredMemory(0)) + SIZES[oldest.name]).fits(BUDGET)

    @invariant()
    def nothing_unused_outlives_its_keep_alive(self) -> None:
        for slot in self.slots.values():
            if slot.phase is Phase.READY and not slot.leases and not slot.pinned:
                assert self.now <= slot.last_used + slot.keep_alive + ROUNDING


TestPlan = PlanMachine.TestCase
TestPlan.settings = settings(max_examples=170, stateful_step_count=60, deadline=None)
