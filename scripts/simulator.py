"""A machine in virtual time, whose runners come and go as a plan decides: what a rule of the scheduler is worth,
without an engine and without waiting. `scripts/bench scheduler` prints the table; `scheduling_rules.py` has its rows,
`workloads.py` its columns.

Load times, sizes and answer times are those that `scripts/bench contention` measured on two processors
(docs/performance.md): an engine alone answers 8 requests a second one after another and 11.3 of four at once, and two
engines share the processors. An answer therefore takes `work` * (1 + 0.6 * (sequences beside it in the engine)) *
(engines that work) seconds. In 120 s the daemon, without the rule of crowds, gave 1,235 answers with 53 loads, and
llama-server's router 1,252 with 19; simulated 1,268 with 50 and 1,296 with 14. On
the second machine, an answer alone took 0.15 to 0.2 s (SmolLM2), 0.25 to 0.32 s (Gemma) and 0.006 s (MiniLM); four at
once took 3.6, 2.9 and 4 times as long each, and beside four of the other large model twice as long as that.

A client beside a batch of its own model: SmolLM2's answer of 32 tokens takes 0.29 s alone, its first token a tenth of
that. So four lines together are 4.9 a second, with one to three of them under way the first token takes 1.6 to 2.8
times as long, and with all four places taken the client waits for a line to end. Measured were 4.9 lines a second, 1.5
to 3.3 times, and 16 to 19 times (docs/performance.md).
"""

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, assert_never

from workloads import Client, Model, Workload

from modelrunner.scheduler.fairness import note_turn
from modelrunner.scheduler.plan import Plan
from modelrunner.scheduler.state import (
    Forget,
    Grant,
    Group,
    Line,
    Phase,
    Policy,
    Refuse,
    Request,
    RunnerId,
    RunOption,
    Sleep,
    Slot,
    Start,
    State,
    Stop,
    WakeAt,
)
from modelrunner.types import RunnerKey

_CROWDING = 0.6
_FIRST_TOKEN = 0.1  # of an answer's time


@dataclass
class SimulatedRunner:
    """One simulated engine."""

    slot: Slot
    working: int = 0
    inside: list[tuple[Client, float]] = field(default_factory=list)
    """Requests that hold a lease and wait for a sequence, with the time when they came."""


class Waiting(NamedTuple):
    request: Request
    client: Client


@dataclass
class Outcome:
    """`waits` are the seconds that watched requests waited, loads included; `asked` are the models of all requests, in
    the order in which they came."""

    answers: int = 0
    asked: list[str] = field(default_factory=list)
    loads: int = 0
    waits: list[float] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        ranked = sorted(self.waits)
        return ranked[min(len(ranked) - 1, int(len(ranked) * share))] if ranked else 0.0


@dataclass(frozen=True)
class Rules:
    """How the simulated scheduler decides: by `plan`, with the figures of `policy`, and `capacity` leases of an engine
    that works on so many requests at once."""

    policy: Policy = field(default_factory=Policy)
    plan: type[Plan] = Plan
    capacity: Callable[[int], int] = lambda parallel: parallel


class Simulation:
    def __init__(self, workload: Workload, rules: Rules, seed: int) -> None:
        self.workload, self.rules = workload, rules
        self.models = {model.key: model for model in workload.models}
        self.by_name = {model.name: model for model in workload.models}
        self.options = {model.key: model.options(len(workload.devices), workload.machines) for model in workload.models}
        self.random = random.Random(seed)
        self.now = 0.0
        self.outcome = Outcome()
        self.runners: dict[RunnerKey, SimulatedRunner] = {}
        self.waiting: dict[RunnerKey, dict[int, Waiting]] = {}
        self.served: dict[Line, float] = {}
        self.loads: dict[RunnerKey, float] = {}
        self.turns: dict[RunnerKey, float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids, self._order = itertools.count(1), itertools.count()
        self._left: dict[Client, int] = {}

    def run(self) -> Outcome:
        for client in self.workload.clients:
            self._left[client] = client.count
            self._later(self._pause(client) if client.think else 0.0, lambda c=client: self._ask(c))
        self._drain_events()
        for request, client in (r for queue in self.waiting.values() for r in queue.values()):
            if client.watched:
                self.outcome.waits.append(self.now - request.since)
        if self.workload.first_token:
            inside = [entry for runner in self.runners.values() for entry in runner.inside]
            self.outcome.waits += [self.now - since for client, since in inside if client.watched]
        return self.outcome

    def _drain_events(self) -> None:
        while self._events and self._events[0][0] <= self.workload.seconds:
            self.now, _, act = heapq.heappop(self._events)
            act()
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._reconcile()

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), act))

    def _pause(self, client: Client) -> float:
        return self.random.expovariate(1 / client.think)

    def _ask(self, client: Client) -> None:
        if not self._left[client]:
            return
        self._left[client] -= 1
        name = client.choose(self.random)
        self.outcome.asked.append(name)
        key = self.by_name[name].key
        request = Request(next(self._ids), self.now, "", client.batch)
        self.waiting.setdefault(key, {})[request.id] = Waiting(request, client)

    def _state(self) -> State:
        groups = tuple([self._group(key, queue) for key, queue in self.waiting.items() if queue])
        slots = tuple([runner.slot for runner in self.runners.values()])
        return State(groups, slots, self.workload.hosts, {}, self.rules.policy, served=self.served)

    def _group(self, key: RunnerKey, queue: dict[int, Waiting]) -> Group:
        model = self.models[key]
        waiting = tuple([request for request, _ in queue.values()])
        load, turn = self.loads.get(key, 0.0), self.turns.get(key, 0.0)
        options = self.options[model.key]
        return Group(key, waiting, options, model.name, load_seconds=load, turn=turn)

    def _reconcile(self) -> None:
        for action in self.rules.plan(self._state(), self.now).make():
            match action:
                case Grant(RunnerId(key), requests):
                    for id in requests:
                        self._grant(self.runners[key], *self.waiting[key].pop(id))
                case Start(RunnerId(key), option):
                    self._start(key, option)
                case Stop(RunnerId(key), reason):
                    self.turns[key] = self.now
                    if self.runners[key].slot.leases:
                        self._change(key, phase=Phase.DRAINING, drain=reason)
                    else:
                        self._change(key, phase=Phase.STOPPING)
                        self._later(self.models[key].stop, partial(self._ended, key))
                case Forget(RunnerId(key)):
                    del self.runners[key]
                case WakeAt(at):
                    self._later(at - self.now + 1e-9, lambda: None)
                case Refuse(_, _, error):
                    raise error
                case Sleep():
                    raise AssertionError("no simulated engine sleeps")
                case _:
                    assert_never(action)

    def _change(self, key: RunnerKey, **fields: Any) -> None:
        runner = self.runners[key]
        runner.slot = runner.slot._replace(**fields)

    def _start(self, key: RunnerKey, option: RunOption) -> None:
        self.outcome.loads += 1
        model = self.models[key]
        capacity = self.rules.capacity(model.parallel)
        slot = Slot(key, Phase.STARTING, option.memory, last_used=self.now, option=option, parallel=capacity)
        runner = self.runners[key] = SimulatedRunner(slot)
        self._later(model.load, lambda: self._ready(runner, model))

    def _ended(self, key: RunnerKey) -> None:
        self._change(key, phase=Phase.ENDED)

    def _ready(self, runner: SimulatedRunner, model: Model) -> None:
        if runner.slot.phase is Phase.STARTING:
            self.loads[runner.slot.key] = model.load
            times = {"ready_at": self.now, "last_used": self.now, "load_seconds": model.load}
            self._change(runner.slot.key, phase=Phase.READY, **times)

    def _grant(self, runner: SimulatedRunner, request: Request, client: Client) -> None:
        key = runner.slot.key
        self.turns[key] = self.now
        note_turn(self.served, (request.caller, request.batch), self.now)
        interactive = runner.slot.interactive + (not request.batch)
        self._change(key, leases=runner.slot.leases + 1, interactive=interactive, last_used=self.now)
        if client.watched and not self.workload.first_token:
            self.outcome.waits.append(self.now - request.since)
        runner.inside.append((client, request.since))
        self._work(runner)

    def _work(self, runner: SimulatedRunner) -> None:
        """The engine takes the next requests into its free sequences."""
        model = self.models[runner.slot.key]
        while runner.inside and runner.working < model.parallel:
            client, since = runner.inside.pop(0)
            runner.working += 1
            busy = max(1.0, sum(self._load_of(other) for other in self.runners.values() if _share(runner, other)))
            crowd = 1 + _CROWDING * (runner.working - 1)
            seconds = model.work * crowd * busy * self.random.uniform(0.9, 1.1)
            if client.watched and self.workload.first_token:
                self.outcome.waits.append(self.now - since + _FIRST_TOKEN * seconds)
            self._later(seconds, partial(self._answered, runner, client))

    def _load_of(self, runner: SimulatedRunner) -> float:
        """Of the processors: a load takes one of the two."""
        return 1.0 if runner.working else 0.5 if runner.slot.phase is Phase.STARTING else 0.0

    def _answered(self, runner: SimulatedRunner, client: Client) -> None:
        runner.working -= 1
        self.outcome.answers += 1
        interactive = runner.slot.interactive - (not client.batch)
        self._change(runner.slot.key, leases=runner.slot.leases - 1, interactive=interactive, last_used=self.now)
        self._work(runner)
        self._later(self._pause(client) if client.think else 0.0, lambda: self._ask(client))


def _share(one: SimulatedRunner, other: SimulatedRunner) -> bool:
    """True if both compute on one device, or on the processors of one host."""
    here, there = one.slot.option.place, other.slot.option.place
    return here == there or (here.host == there.host and not set(here.devices).isdisjoint(there.devices))
