"""Any sequence of events, against what must always hold of the plan. The machine carries out actions on values: there
is no scheduler in it. The promises are computed here, by the formulas of docs/scheduling.md."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelrunner.errors import EngineFailed, HostLost, InsufficientMemory, OutOfMemory, TimedOut
from modelrunner.scheduler.plan import plan
from modelrunner.scheduler.state import (
    Action,
    Failure,
    Forget,
    Grant,
    Group,
    Phase,
    Policy,
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
)
from modelrunner.types import Mode, RequiredMemory, RunnerKey
from tests.scheduler.states import option, over

HOSTS = {"": RequiredMemory(14, (8, 8, 4)), "b": RequiredMemory(9, (6,)), "c": RequiredMemory(8, (6,))}


def anywhere(rank: int, ram: int, size: int) -> list[RunOption]:
    """On any one of the devices of this machine."""
    return [option(RequiredMemory(ram, (*(0,) * i, size)), rank) for i in range(3)]


def over_there(rank: int, ram: int, *vram: int, shared: int = 0) -> RunOption:
    return option(RequiredMemory(ram, vram, shared), rank, host="b")


def over_both(rank: int, first: RequiredMemory, other: RequiredMemory) -> list[RunOption]:
    """On the hosts b and c together, with the engine on either."""
    return [over(("b", first), ("c", other), rank=rank), over(("c", first), ("b", other), rank=rank)]


WAYS = {
    "tiny": [option(RequiredMemory(1, (1,)))],
    "small": [*anywhere(0, 3, 2), over_there(0, 3, 2)],
    "far": [over_there(0, 2, 5), over_there(1, 4)],
    "wide": anywhere(0, 1, 7),
    "large": [option(RequiredMemory(8, (3,)))],
    "pinned": anywhere(0, 2, 4),
    "huge": [option(RequiredMemory(15))],
    "split": [*anywhere(0, 1, 9), *anywhere(1, 2, 6), over_there(1, 2, 6), option(RequiredMemory(6), 2)],
    "both": [
        option(RequiredMemory(1, (5, 5))),
        option(RequiredMemory(1, (5, 0, 3))),
        option(RequiredMemory(1, (0, 5, 3))),
    ],
    "apart": over_both(0, RequiredMemory(7), RequiredMemory(6)),
    "far apart": [over_there(0, 8, 7), *over_both(1, RequiredMemory(2, (4,)), RequiredMemory(1, (4,)))],
    "there": [over_there(0, 3, 2), option(RequiredMemory(3, (2,)), host="c")],
    "mapped": [option(RequiredMemory(5, (), 3)), over_there(0, 5, shared=3)],
    "mapped again": [option(RequiredMemory(6, (), 4))],
}
OPTIONS = {name: tuple(o._replace(number=i) for i, o in enumerate(ways)) for name, ways in WAYS.items()}
ASLEEP = {"wide": RequiredMemory(3), "small": RequiredMemory(2)}
CAPACITY = 2
LOAD_SECONDS = 0.7
# With two loads of 0.7 s, eight times both is more than each patience.
POLICY = Policy(max_wait=30.0, patience=3.0, loads=8.0, spare=1.0, ageing=8.0)
ROUNDING = 1e-6


def key(name: str) -> RunnerKey:
    """Two of them are runners of one model."""
    return RunnerKey("fake", name.removesuffix(" again"), Mode.COMPLETION, int(name.endswith(" again")))


NAMES = {key(name): name for name in OPTIONS}


@dataclass
class Waiting:
    name: str
    since: float
    caller: str
    batch: bool

    @property
    def where(self) -> RunnerKey:
        return key(self.name)

    @property
    def line(self) -> tuple[str, bool]:
        return self.caller, self.batch


class PlanMachine(RuleBasedStateMachine):
    names: tuple[str, ...] = tuple(sorted(OPTIONS))

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.wake = math.inf
        self.slots: dict[RunnerKey, Slot] = {}
        self.awake: dict[RunnerKey, RequiredMemory] = {}
        self.waiting: dict[int, Waiting] = {}
        self.leases: dict[int, tuple[RunnerKey, bool]] = {}
        self.turns: dict[RunnerKey, float] = {}
        self.loaded: set[RunnerKey] = set()
        self.failures: dict[tuple[RunnerKey, RunPlace], Failure] = {}
        self.paused: set[str] = set()
        self.served: dict[tuple[str, bool], float] = {}
        self.restarts: list[tuple[tuple[RunnerKey, RunPlace], float]] = []
        self.fell: set[tuple[RunnerKey, RunPlace]] = set()
        self.answered: set[int] = set()
        self.cancelled: set[int] = set()
        self.issued = 0
        self.closing = False
        self.hosts = set(HOSTS)

    # Events

    @rule(host=st.sampled_from(["b", "c"]))
    def a_host_vanishes(self, host: str) -> None:
        """The runs of its runners end with an error; the plan goes on without it."""
        self.hosts.discard(host)
        for slot in self.on(host, self.slots.values()):
            if slot.phase is not Phase.ENDED:
                self.end(slot.key, HostLost(f"the host {host} does not answer"))
        self.reconcile()

    @rule(host=st.sampled_from(["b", "c"]))
    def a_host_returns(self, host: str) -> None:
        self.hosts.add(host)
        self.reconcile()

    @rule(data=st.data(), count=st.integers(1, 5), caller=st.sampled_from(["", "x", "y"]), batch=st.booleans())
    def requests_come(self, data: st.DataObject, count: int, caller: str, batch: bool) -> None:
        name = data.draw(st.sampled_from(self.names))
        for _ in range(count):
            self.issued += 1
            self.waiting[self.issued] = Waiting(name, self.now, caller, batch)
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
        where, batch = self.leases.pop(data.draw(st.sampled_from(sorted(self.leases))))
        held = self.slots.get(where)
        if held is not None:
            leases, interactive = held.leases - 1, held.interactive - (not batch)
            self.slots[where] = held._replace(
                leases=leases, interactive=interactive, last_used=self.now, keep_alive=keep_alive
            )
        self.reconcile()

    @precondition(lambda self: self.phased(Phase.STARTING))
    @rule(data=st.data())
    def a_runner_gets_ready(self, data: st.DataObject) -> None:
        where = data.draw(st.sampled_from(self.phased(Phase.STARTING)))
        self.slots[where] = self.slots[where]._replace(
            phase=Phase.READY,
            last_used=self.now,
            ready_at=self.now,
            memory=self.awake.pop(where, self.slots[where].memory),
        )
        self.loaded.add(where)
        self.reconcile()

    @precondition(lambda self: self.phased(Phase.SLEEPING))
    @rule(data=st.data())
    def a_runner_has_fallen_asleep(self, data: st.DataObject) -> None:
        where = data.draw(st.sampled_from(self.phased(Phase.SLEEPING)))
        self.slots[where] = self.slots[where]._replace(memory=ASLEEP[NAMES[where]])
        self.reconcile()

    @precondition(lambda self: self.phased(Phase.STARTING, Phase.READY, Phase.SLEEPING, Phase.DRAINING))
    @rule(data=st.data(), starved=st.booleans())
    def a_runner_dies(self, data: st.DataObject, starved: bool) -> None:
        where = data.draw(st.sampled_from(self.phased(Phase.STARTING, Phase.READY, Phase.SLEEPING, Phase.DRAINING)))
        error = OutOfMemory(-9) if starved else EngineFailed("died")
        here = {id for id, w in self.waiting.items() if w.where == where}
        self.end(where, error)
        self.fell.add((where, self.slots[where].option.place))
        failed_start = not self.slots[where].was_ready
        actions = self.reconcile()
        started = [a for a in actions if isinstance(a, Start) and a.runner.key == where]
        if failed_start and not starved:
            assert here <= self.answered, "a failed start answers everybody"
            assert not started, "and is not tried again at once"

    @rule(data=st.data(), paused=st.booleans())
    def somebody_pauses_or_resumes(self, data: st.DataObject, paused: bool) -> None:
        name = data.draw(st.sampled_from(self.names))
        (self.paused.add if paused else self.paused.discard)(key(name).files)
        self.reconcile()

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), pinned=st.booleans())
    def somebody_pins_or_unpins(self, data: st.DataObject, pinned: bool) -> None:
        where = data.draw(st.sampled_from(sorted(self.slots, key=str)))
        self.slots[where] = self.slots[where]._replace(pinned=pinned)
        self.reconcile()

    @precondition(lambda self: self.phased(Phase.STOPPING))
    @rule(data=st.data())
    def a_process_is_gone(self, data: st.DataObject) -> None:
        where = data.draw(st.sampled_from(self.phased(Phase.STOPPING)))
        self.end(where)
        self.reconcile()

    @precondition(lambda self: self.phased(Phase.READY, Phase.SLEEPING))
    @rule(data=st.data())
    def somebody_unloads(self, data: st.DataObject) -> None:
        where = data.draw(st.sampled_from(self.phased(Phase.READY, Phase.SLEEPING)))
        self.slots[where] = self.slots[where]._replace(phase=Phase.DRAINING, drain=Reason.UNLOAD)
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

    def end(self, where: RunnerKey, error: EngineFailed | None = None) -> None:
        self.slots[where] = self.slots[where]._replace(phase=Phase.ENDED, error=error)

    def phased(self, *phases: Phase) -> list[RunnerKey]:
        return sorted((k for k, s in self.slots.items() if s.phase in phases), key=str)

    def state(self) -> State:
        groups: dict[RunnerKey, list[Request]] = {}
        for id, waiting in self.waiting.items():
            request = Request(id, waiting.since, waiting.caller, waiting.batch)
            groups.setdefault(waiting.where, []).append(request)
        counted = [
            Group(
                where,
                tuple(requests),
                OPTIONS[NAMES[where]],
                NAMES[where],
                NAMES[where] == "pinned",
                LOAD_SECONDS if where in self.loaded else 0.0,
                self.turns.get(where, -math.inf),
            )
            for where, requests in groups.items()
        ]
        return State(
            tuple(counted),
            tuple(self.slots.values()),
            {host: HOSTS[host] for host in sorted(self.hosts)},
            self.failures,
            POLICY,
            self.closing,
            frozenset(self.paused),
            self.served,
            {RunnerId(k): self.awake.get(k, ASLEEP[NAMES[k]]) for k in self.slots if NAMES[k] in ASLEEP},
        )

    def reconcile(self) -> list[Action]:
        actions = list[Action]()
        evicted = True
        while evicted:
            planned = plan(self.state(), self.now)
            self.wake = math.inf
            for action in planned:
                self.carry_out(action)
            evicted = any(isinstance(action, Stop) for action in planned)
            actions += planned
        again = plan(self.state(), self.now)
        assert all(isinstance(action, WakeAt) for action in again), f"{actions} left {again} to do"
        return actions

    def carry_out(self, action: Action) -> None:
        match action:
            case Grant(RunnerId(where), requests):
                assert self.slots[where].phase is Phase.READY
                assert where.files not in self.paused
                granted = [self.waiting.pop(id) for id in requests]
                assert {request.where for request in granted} == {where}
                self.check_turns(granted, [w for w in self.waiting.values() if w.where == where])
                self.turns[where] = self.now
                for id, request in zip(requests, granted, strict=True):
                    self.served[request.line] = self.now
                    self.answer(id)
                    self.leases[id] = where, request.batch
                held = self.slots[where]
                interactive = held.interactive + sum(not request.batch for request in granted)
                self.slots[where] = held._replace(
                    leases=held.leases + len(requests), interactive=interactive, last_used=self.now
                )
                assert self.slots[where].leases <= CAPACITY
            case Start(RunnerId(where), option) if (slept := self.slots.get(where)) is not None:
                assert slept.phase is Phase.SLEEPING, "two runners of one key"
                assert where.files not in self.paused
                assert option == slept.option._replace(memory=self.awake[where])
                self.slots[where] = slept._replace(phase=Phase.STARTING, memory=slept.memory.most(option.memory))
            case Start(RunnerId(where), option):
                assert where.files not in self.paused
                offered = OPTIONS[NAMES[where]][option.number]
                assert offered.memory.fits(option.memory)
                assert (offered.rank, offered.place) == (option.rank, option.place)
                self.check_rank(where, option)
                self.check_restart((where, option.place))
                self.slots[where] = Slot(
                    where,
                    Phase.STARTING,
                    option.memory,
                    last_used=self.now,
                    keep_alive=20.0,
                    pinned=where.files == "pinned",
                    load_seconds=LOAD_SECONDS,
                    parallel=CAPACITY,
                    option=option,
                )
            case Sleep(RunnerId(where)):
                tired = self.slots[where]
                assert tired.phase is Phase.READY
                assert not tired.leases
                assert not tired.pinned
                self.awake[where] = tired.memory
                memory = tired.memory.most(ASLEEP[NAMES[where]])
                self.slots[where] = tired._replace(phase=Phase.SLEEPING, memory=memory)
            case Stop(RunnerId(where), reason, room_for):
                stopped = self.slots[where]
                assert stopped.phase not in (Phase.STOPPING, Phase.ENDED)
                self.turns[where] = self.now
                if stopped.phase is Phase.DRAINING:
                    assert not stopped.leases, "a lease was lost"
                else:  # a drain is not taken back by a pin that comes later
                    assert not (stopped.pinned and reason in (Reason.ROOM, Reason.IDLE))
                if not stopped.leases:
                    self.slots[where] = stopped._replace(phase=Phase.STOPPING)
                    return
                if reason is Reason.ROOM:
                    self.check_drain(stopped, key(room_for))
                self.slots[where] = stopped._replace(phase=Phase.DRAINING, drain=reason)
            case Forget(RunnerId(where), failure):
                fallen = self.slots.pop(where)
                assert fallen.phase is Phase.ENDED
                self.awake.pop(where, None)
                self.leases = {id: held for id, held in self.leases.items() if held[0] != where}
                if failure is not None:
                    self.failures[where, fallen.option.place] = failure
            case Refuse(where, requests, error):
                for id in requests:
                    waited = self.now - self.waiting.pop(id).since
                    assert not isinstance(error, TimedOut) or waited >= POLICY.max_wait - ROUNDING
                    excused = where.files != "huge" or "huge" in self.paused or self.closing
                    assert isinstance(error, InsufficientMemory) or excused
                    self.answer(id)
            case WakeAt(at):
                assert at > self.now
                self.wake = at

    def is_aged(self, w: Waiting) -> bool:
        """A batch whose caller got nothing for the ageing."""
        return self.now - max(w.since, self.served.get(w.line, -math.inf)) >= POLICY.ageing - ROUNDING

    def check_turns(self, granted: list[Waiting], left: list[Waiting]) -> None:
        """Interactive requests are before a batch, but for one of each that is aged; and no caller has two turns before
        another's first."""
        chat, batch = [w for w in granted if not w.batch], [w for w in granted if w.batch]
        others = {w.line for w in left if not w.batch}
        if others:
            assert all(map(self.is_aged, batch))
            assert len({w.line for w in batch}) == len(batch)
        turns = Counter(w.line for w in chat)
        assert max(turns.values(), default=0) <= 1 or others <= set(turns)
        for line in others - set(turns):
            assert all(self.served.get(line, -1) >= self.served.get(served, -1) for served in turns)

    def check_drain(self, slot: Slot, other: RunnerKey) -> None:
        """No thrash: a runner that interactive requests use serves for the time of both loads before it is drained, and
        never for a batch that is not aged."""
        if slot.interactive:
            price = LOAD_SECONDS + (LOAD_SECONDS if other in self.loaded else 0.0)
            assert self.now - slot.ready_at >= price - ROUNDING
            elsewhere = [w for w in self.waiting.values() if w.where != slot.key]
            assert any(not w.batch or self.is_aged(w) for w in elsewhere)

    def check_rank(self, where: RunnerKey, option: RunOption) -> None:
        """A smaller run only where no larger one can ever fit, or where memory ran out."""
        fell = any(failed == where and f.floor is not None for (failed, _), f in self.failures.items())
        wanted = [w for w in self.waiting.values() if w.name == "pinned"]
        if not fell and not wanted and where.files != "mapped":
            larger = [o for o in OPTIONS[NAMES[where]] if o.rank < option.rank]
            assert not self.fitting(larger, self.unmovable())

    @staticmethod
    def on(host: str, slots: Iterable[Slot]) -> list[Slot]:
        """What there is of them on that host."""
        there = [(slot, parts[host]) for slot in slots if host in (parts := parts_of(slot.option.place, slot.memory))]
        return [slot._replace(memory=memory) for slot, memory in there]

    def fitting(self, options: Iterable[RunOption], beside: Iterable[Slot]) -> list[RunOption]:
        """Those that fit beside these runners, on hosts that answer."""
        beside = list(beside)
        return [
            o
            for o in options
            if all(
                host in self.hosts and (memory + held(self.on(host, beside))).fits(HOSTS[host])
                for host, memory in parts_of(o.place, o.memory).items()
            )
        ]

    def best(self, options: Iterable[RunOption], beside: Iterable[Slot]) -> list[RunOption]:
        """Of those the ones of the best rank."""
        possible = self.fitting(options, beside)
        return [o for o in possible if o.rank == possible[0].rank]

    def unmovable(self) -> list[Slot]:
        """Pinned runners, with what they hold or will hold when they are awake."""
        leaving = (Phase.DRAINING, Phase.STOPPING, Phase.ENDED)
        pinned = [slot for slot in self.slots.values() if slot.pinned and slot.phase not in leaving]
        return [slot._replace(memory=self.awake.get(slot.key, slot.memory)) for slot in pinned]

    def check_restart(self, where: tuple[RunnerKey, RunPlace]) -> None:
        if where in self.fell:
            self.fell.remove(where)
            self.restarts.append((where, self.now))
        recent = [at for there, at in self.restarts if there == where and at > self.now - 60.0]
        assert len(recent) <= 7

    def answer(self, id: int) -> None:
        assert id not in self.answered
        assert id not in self.cancelled
        self.answered.add(id)

    # What always holds

    @invariant()
    def never_over_the_budget(self) -> None:
        for host, budget in HOSTS.items():
            assert held(self.on(host, self.slots.values())).fits(budget)

    @invariant()
    def nothing_starts_on_a_host_that_does_not_answer(self) -> None:
        ended = {slot.phase for slot in self.slots.values() if not self.hosts.issuperset(slot.option.place.hosts)}
        assert ended <= {Phase.ENDED}

    @invariant()
    def every_request_is_answered_or_waits(self) -> None:
        assert set(range(1, self.issued + 1)) == self.answered | self.cancelled | set(self.waiting)

    @invariant()
    def nobody_waits_beyond_the_limit(self) -> None:
        assert all(self.now - w.since <= POLICY.max_wait + ROUNDING for w in self.waiting.values())

    @invariant()
    def nobody_waits_for_a_ready_runner_that_has_a_lease_left(self) -> None:
        ready = [where for where in self.phased(Phase.READY) if self.slots[where].leases < CAPACITY]
        assert not [w for w in self.waiting.values() if w.where in ready]

    @invariant()
    def nobody_waits_for_memory_beside_a_free_place(self) -> None:
        """Whoever is the only one that wants memory."""
        wanted = {w.where for w in self.waiting.values()}
        wanting = [w for w in wanted if w.files not in self.paused and w not in self.slots]
        if len(wanting) == 1 and not any(failed == wanting[0] for failed, _ in self.failures) and not self.closing:
            best = self.best(OPTIONS[NAMES[wanting[0]]], self.unmovable())
            assert not self.fitting(best, self.slots.values())

    @invariant()
    def nobody_starves(self) -> None:
        """The only model that interactive requests want memory for has it on its way if the runners that may go by now
        give enough: idle ones after their rest, busy ones after the patience, a batch's at once."""
        wanted = {w.where for w in self.waiting.values()}
        wanting = [w for w in wanted if w.files not in self.paused and w not in self.slots]
        if len(wanting) != 1 or self.closing or NAMES[wanting[0]].startswith("mapped"):
            return
        if any(s.key.files == "mapped" and s.phase in (Phase.DRAINING, Phase.STOPPING) for s in self.slots.values()):
            return  # what its end gives depends on who else maps its files: seen once it is gone
        [where] = wanting
        mine = [w for w in self.waiting.values() if w.where == where]
        if all(w.batch for w in mine) or any(failed == where for failed, _ in self.failures):
            return
        asked = min(w.since for w in mine)
        waited = self.now - max(asked, self.turns.get(where, -math.inf))
        live = [s for s in self.slots.values() if s.phase not in (Phase.DRAINING, Phase.STOPPING)]
        best = self.best(OPTIONS[NAMES[where]], [s for s in live if s.pinned])
        if self.fitting(best, [s for s in live if self.is_spared(s, asked, waited)]):
            assert self.fitting(best, live)

    def is_spared(self, slot: Slot, asked: float, waited: float) -> bool:
        patience = POLICY.patience
        waiting = [w for w in self.waiting.values() if w.where == slot.key]
        urgent = any(not w.batch or self.is_aged(w) for w in waiting)
        if slot.pinned or slot.key.files == "mapped":
            return True
        if slot.phase is Phase.STARTING:
            return urgent
        if slot.phase is Phase.SLEEPING or not (slot.interactive or urgent or not slot.leases):
            return False
        if not slot.leases:
            rests = asked < slot.last_used and self.now < slot.last_used + LOAD_SECONDS + ROUNDING
            return rests and waited < patience + ROUNDING
        fresh = self.now < slot.ready_at + 2 * LOAD_SECONDS + ROUNDING
        return fresh or waited < patience + ROUNDING

    @invariant()
    def nothing_unused_outlives_its_keep_alive(self) -> None:
        waited_for = {w.where for w in self.waiting.values()}
        for slot in [slot for slot in self.slots.values() if slot.key not in waited_for]:
            if slot.phase is Phase.READY and not slot.leases and not slot.pinned:
                assert self.now <= slot.last_used + slot.keep_alive + ROUNDING
            if slot.phase is Phase.SLEEPING and not slot.pinned:
                assert self.now <= slot.last_used + 2 * slot.keep_alive + ROUNDING


def parts_of(place: RunPlace, memory: RequiredMemory) -> dict[str, RequiredMemory]:
    """What a run takes of each of its hosts: over several hosts whole devices."""
    if not place.others:
        return {place.host: memory}
    vram = {host: HOSTS[host].vram for host in place.hosts}
    there = zip(place.hosts, memory.each, strict=True)
    return {host: replace(part, vram=tuple([vram[host][i] for i in range(len(part.vram))])) for host, part in there}


def held(slots: Iterable[Slot]) -> RequiredMemory:
    """What they hold together: what runners of one model share only once."""
    own, shared = RequiredMemory(0), dict[str, int]()
    for slot in slots:
        own += replace(slot.memory, ram=slot.memory.ram - slot.memory.shared)
        shared[slot.key.files] = max(slot.memory.shared, shared.get(slot.key.files, 0))
    return own + RequiredMemory(sum(shared.values()))


class OverHostsMachine(PlanMachine):
    """With models that run over two hosts, and others there alone."""

    names = ("apart", "far", "far apart", "there")


TestPlan = PlanMachine.TestCase
TestPlanOverHosts = OverHostsMachine.TestCase
TestPlanOverHosts.settings = settings(max_examples=100, stateful_step_count=60)
TestPlan.settings = settings(max_examples=170, stateful_step_count=60)
