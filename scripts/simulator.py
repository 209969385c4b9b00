"""A machine in virtual time, whose runners come and go as a plan decides: what a rule of the scheduler is worth,
without an engine and without waiting. `scripts/bench scheduler` prints the table; `scheduling_rules.py` has its rows.

Load times, sizes and answer times are those that `scripts/bench contention` measured on two processors
(docs/performance.md): an engine alone answers 8 requests a second one after another and 11.3 of four at once, and two
engines share the processors. An answer therefore takes `work` * (1 + 0.6 * (sequences beside it in the engine)) *
(engines that work) seconds. In 120 s the daemon, without the rule of crowds, gave 1,235 answers with 53 loads, and
llama-server's router 1,252 with 19; simulated 1,268 with 50 and 1,296 with 14.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

from modelrunner.scheduler.fairness import note_turn
from modelrunner.scheduler.plan import Plan
from modelrunner.scheduler.state import (
    Forget,
    Grant,
    Group,
    Line,
    Move,
    Phase,
    Policy,
    Refuse,
    Request,
    Sleep,
    Slot,
    Start,
    State,
    Stop,
    Wake,
    WakeAt,
)
from modelrunner.types import Mode, RequiredMemory, RunnerKey

MIB = 1 << 20
_CROWDING = 0.6


@dataclass(frozen=True)
class Model:
    """`size` in bytes; `load`, `stop` and `work` (one answer of an idle machine) in seconds."""

    name: str
    size: int
    load: float
    work: float
    stop: float = 0.1
    parallel: int = 4

    @property
    def key(self) -> RunnerKey:
        return RunnerKey("simulated", self.name, Mode.COMPLETION)


@dataclass(frozen=True)
class Client:
    """Asks `count` times, one request after another, with a pause of `think` seconds on average (exponential) between.
    `choose` names the next model. The waits of `watched` clients are reported."""

    choose: Callable[[random.Random], str]
    think: float = 0.0
    count: int = 1 << 60
    batch: bool = False
    watched: bool = True


@dataclass(frozen=True)
class Workload:
    """`seconds` of clients that ask for `models` in `budget` bytes."""

    name: str
    about: str
    models: Sequence[Model]
    budget: int
    clients: Sequence[Client]
    seconds: float = 300.0


@dataclass
class Outcome:
    """`waits` are the seconds that watched requests spent in the queue, loads included."""

    answers: int = 0
    loads: int = 0
    waits: list[float] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        ranked = sorted(self.waits)
        return ranked[min(len(ranked) - 1, int(len(ranked) * share))] if ranked else 0.0


@dataclass
class _Runner:
    """One simulated engine. `inside` are requests that hold a lease and wait for a sequence."""

    slot: Slot
    working: int = 0
    inside: list[tuple[Client, float]] = field(default_factory=list)


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
        self.random = random.Random(seed)
        self.now = 0.0
        self.outcome = Outcome()
        self.runners: dict[RunnerKey, _Runner] = {}
        self.waiting: dict[RunnerKey, dict[int, tuple[Request, Client]]] = {}
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
        key = self.by_name[client.choose(self.random)].key
        request = Request(next(self._ids), self.now, "", client.batch)
        self.waiting.setdefault(key, {})[request.id] = request, client

    def _state(self) -> State:
        groups = tuple([self._group(key, queue) for key, queue in self.waiting.items() if queue])
        slots = tuple([runner.slot for runner in self.runners.values()])
        return State(groups, slots, RequiredMemory(self.workload.budget), {}, self.rules.policy, served=self.served)

    def _group(self, key: RunnerKey, queue: Mapping[int, tuple[Request, Client]]) -> Group:
        model = self.models[key]
        waiting = tuple([request for request, _ in queue.values()])
        load, turn = self.loads.get(key, 0.0), self.turns.get(key, 0.0)
        needs = (RequiredMemory(model.size),)
        return Group(key, waiting, needs, model.name, load_seconds=load, turn=turn, parallel=model.parallel)

    def _reconcile(self) -> None:
        for action in self.rules.plan(self._state(), self.now).make():
            match action:
                case Grant(key, requests):
                    for id in requests:
                        self._grant(self.runners[key], *self.waiting[key].pop(id))
                case Start(key, memory):
                    self._start(self.models[key], memory)
                case Stop(key, reason):
                    self.turns[key] = self.now
                    if self.runners[key].slot.leases:
                        self._change(key, phase=Phase.DRAINING, drain=reason)
                    else:
                        self._change(key, phase=Phase.STOPPING)
                        self._later(self.models[key].stop, lambda key=key: self._change(key, phase=Phase.ENDED))
                case Forget(key):
                    del self.runners[key]
                case WakeAt(at):
                    self._later(at - self.now + 1e-9, lambda: None)
                case Refuse(_, _, error):
                    raise error
                case Sleep() | Wake():
                    raise AssertionError("no simulated engine sleeps")
                case Move():
                    raise AssertionError("no simulated batch asks for the client's model")
                case _:
                    assert_never(action)

    def _change(self, key: RunnerKey, **fields: Any) -> None:
        runner = self.runners[key]
        runner.slot = runner.slot._replace(**fields)

    def _start(self, model: Model, memory: RequiredMemory) -> None:
        self.outcome.loads += 1
        slot = Slot(model.key, Phase.STARTING, memory, last_used=self.now)
        runner = self.runners[model.key] = _Runner(slot._replace(parallel=self.rules.capacity(model.parallel)))
        self._later(model.load, lambda: self._ready(runner, model))

    def _ready(self, runner: _Runner, model: Model) -> None:
        if runner.slot.phase is Phase.STARTING:
            self.loads[model.key] = model.load
            times = {"ready_at": self.now, "last_used": self.now, "load_seconds": model.load}
            self._change(model.key, phase=Phase.READY, **times)

    def _grant(self, runner: _Runner, request: Request, client: Client) -> None:
        key = runner.slot.key
        self.turns[key] = self.now
        note_turn(self.served, (request.caller, request.batch), self.now)
        interactive = runner.slot.interactive + (not request.batch)
        self._change(key, leases=runner.slot.leases + 1, interactive=interactive, last_used=self.now)
        if client.watched:
            self.outcome.waits.append(self.now - request.since)
        runner.inside.append((client, self.now))
        self._work(runner)

    def _work(self, runner: _Runner) -> None:
        """The engine takes the next requests into its free sequences."""
        model = self.models[runner.slot.key]
        while runner.inside and runner.working < model.parallel:
            client, _ = runner.inside.pop(0)
            runner.working += 1
            busy = max(1.0, sum(self._load_of(other) for other in self.runners.values()))
            crowd = 1 + _CROWDING * (runner.working - 1)
            seconds = model.work * crowd * busy * self.random.uniform(0.9, 1.1)
            self._later(seconds, lambda client=client: self._answered(runner, client))

    def _load_of(self, runner: _Runner) -> float:
        """Of the processors: a load takes one of the two."""
        return 1.0 if runner.working else 0.5 if runner.slot.phase is Phase.STARTING else 0.0

    def _answered(self, runner: _Runner, client: Client) -> None:
        runner.working -= 1
        self.outcome.answers += 1
        interactive = runner.slot.interactive - (not client.batch)
        self._change(runner.slot.key, leases=runner.slot.leases - 1, interactive=interactive, last_used=self.now)
        self._work(runner)
        self._later(self._pause(client) if client.think else 0.0, lambda: self._ask(client))


# The workloads


def contention() -> Workload:
    models = [
        Model("smollm2", 311 * MIB, load=0.28, work=0.17, stop=0.07),
        Model("gemma", 497 * MIB, load=0.57, work=0.2, stop=0.07),
        Model("minilm", 133 * MIB, load=0.08, work=0.02, stop=0.02),
    ]
    names = [model.name for model in models]
    clients = [Client(lambda r: r.choice(names)) for _ in range(64)]
    about = "64 clients ask for three models, of which two fit, as `scripts/bench contention` does"
    return Workload("contention", about, models, 874 * MIB, clients)


def zipf() -> Workload:
    models = [Model(f"model-{i}", 100 * MIB, load=0.3 + 0.1 * (i % 5), work=0.2) for i in range(20)]
    names, weights = [m.name for m in models], [1 / (i + 1) for i in range(20)]
    clients = [Client(lambda r: r.choices(names, weights)[0], think=2.0) for _ in range(16)]
    about = "16 clients that think for 2 s ask for twenty small models by a Zipf law, of which five fit"
    return Workload("Zipf", about, models, 500 * MIB, clients)


def beside(name: str, about: str, *, batch: bool) -> Workload:
    models = [Model("chat", 300 * MIB, load=0.5, work=0.5), Model("bulk", 300 * MIB, load=0.5, work=1.5)]
    alone = Client(lambda r: "chat", think=3.0)
    bulk = [Client(lambda r: "bulk", count=1, batch=batch, watched=False) for _ in range(200)]
    about = (
        f"one client that thinks for 3 s, beside {about} for another model, room for one; the waits are that client's"
    )
    return Workload(f"beside a {name}", about, models, 400 * MIB, [alone, *bulk])


def slow_loads() -> Workload:
    models = [Model(name, 300 * MIB, load=42.8, work=2.0) for name in ("a", "b")]
    clients = [Client(lambda r, name=name: name, think=1.0) for name in ("a", "b") for _ in range(6)]
    about = "two models that load as long as vLLM did (42.8 s), six clients each, room for one, 600 s"
    return Workload("slow loads", about, models, 400 * MIB, clients, seconds=600.0)


def workloads() -> Iterator[Workload]:
    """Three by which rules are kept or dropped, then two that show a promise."""
    yield contention()
    yield zipf()
    yield beside("batch", "200 requests with `X-Priority: batch`", batch=True)
    yield beside("flood", "200 requests like its own", batch=False)
    yield slow_loads()
