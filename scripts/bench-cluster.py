"""The first part of `scripts/bench cluster`: the plan with many hosts, without engines.

The time of one plan: each host has 8 devices of 24 GiB, and of 500 models 50 are waited for by 2,000 requests each. A
model needs one device, and may run on any of any host. Four columns: every second device holds a model, and the others
are free; all hold one that nobody uses, and whose time has come; all are in use, and some may be drained; all are in
use, and none may go yet.

Then a minute in virtual time, with a plan each second: half as many models as hosts, each with up to 20 runners of
four sequences, all devices taken at first. 100 requests wait for each host, of 100 callers; who is answered, after 5 to
15 s, asks again. A load takes as long. One model of ten has no runner when its five requests come, so others go for it.
Six hosts die; their requests are asked again, and they return after 10 s.

--hosts N,N,...  (1,4,16,64,250,1000)  --rounds N (3) of which the fastest counts. The times are the processor's.
"""

import argparse
import heapq
import itertools
import math
import random
import resource
import statistics
import sys
import time
import timeit
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from modelrunner.errors import HostLost
from modelrunner.scheduler.plan import plan
from modelrunner.scheduler.state import (
    Action,
    Forget,
    Grant,
    Group,
    Options,
    Phase,
    Refuse,
    Request,
    RunnerId,
    RunOption,
    RunPlace,
    Slot,
    Start,
    State,
    Stop,
)
from modelrunner.types import Mode, RequiredMemory, RunnerKey

GIB = 1 << 30
NOW = 10_000.0
DEVICES = 8
MODELS, WAITED_FOR, REQUESTS = 500, 50, 2_000
SECONDS, TICK = 60.0, 1.0  # of a simulation, and between two of its plans
WAITING, MOST, SEQUENCES, DEATHS = 100, 20, 4, 6


def key(model: int) -> RunnerKey:
    return RunnerKey("engine", f"model-{model}", Mode.COMPLETION)


def on(device: int) -> RequiredMemory:
    return RequiredMemory(GIB, tuple(20 * GIB if number == device else 0 for number in range(DEVICES)))


class Case(NamedTuple):
    """Of all devices each `taken`-th holds a model, which has so many `leases`. Requests have waited for `waited` s."""

    taken: int
    leases: int
    waited: float


CASES = {"free": Case(2, 0, 0.0), "idle": Case(1, 0, 0.0), "busy": Case(1, 1, 30.0), "none may go": Case(1, 1, 0.0)}


def state(hosts: int, case: Case) -> State:
    names = [f"host-{number}" for number in range(hosts)]
    places = [(name, device) for name in names for device in range(DEVICES)]
    slots = [
        Slot(
            key(WAITED_FOR + number % (MODELS - WAITED_FOR)),
            Phase.READY,
            on(device),
            case.leases,
            last_used=NOW - 10.0 - number % 100,
            keep_alive=300.0,
            load_seconds=2.0 + number % 7,
            ready_at=0.0,
            interactive=case.leases,
            option=RunOption(on(device), place=RunPlace((device,), name)),
            number=number // (MODELS - WAITED_FOR),
        )
        for number, (name, device) in enumerate(places[:: case.taken])
    ]
    options = [RunOption(on(device), 0, RunPlace((device,), name), i) for i, (name, device) in enumerate(places)]
    groups = tuple(
        Group(
            key(model),
            tuple(Request(model * REQUESTS + i, NOW - case.waited) for i in range(REQUESTS)),
            Options(options),
            f"model-{model}",
        )
        for model in range(WAITED_FOR)
    )
    return State(groups, tuple(slots), {name: RequiredMemory(256 * GIB, (24 * GIB,) * DEVICES) for name in names})


class Fleet:
    """Hosts in virtual time, whose runners come and go as the plan decides."""

    def __init__(self, hosts: int, seed: int) -> None:
        self.random, self.now = random.Random(seed), 0.0
        self.names = [f"host-{number}" for number in range(hosts)]
        self.hosts = dict.fromkeys(self.names, RequiredMemory(256 * GIB, (24 * GIB,) * DEVICES))
        places = [RunPlace((device,), name) for name in self.names for device in range(DEVICES)]
        needs = [on(device) for device in range(DEVICES)]
        self.options = [
            Options([RunOption(needs[place.devices[0]], 0, place, number) for number, place in enumerate(places)])
            for _ in range(hosts // 2)
        ]
        self.slots: dict[RunnerId, Slot] = {}
        self.inside: dict[RunnerId, dict[int, Request]] = {}
        self.waiting: list[dict[int, Request]] = [{} for _ in self.options]
        self.turns = [-math.inf] * len(self.options)
        self.loads = 0
        self.waits: list[list[float]] = [[] for _ in self.options]
        self.back: dict[str, float] = {}  # hosts that returned and are not used yet
        self.used: list[float] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ids = itertools.count()
        warm = [model for model in range(len(self.options)) if model % 10]
        for number in range(len(places)):
            model = warm[number % len(warm)]
            option = self.options[model][number]
            self._begin(RunnerId(key(model), number // len(warm)), option, ready_at=self.random.uniform(-60.0, 0.0))
        for _ in range((WAITING + SEQUENCES * DEVICES) * hosts):
            self.ask(self.random.choice(warm))
        for model in range(0, len(self.options), 10):  # these come with a few requests each, and have no runner
            for _ in range(5):
                self._later(self.random.uniform(0.0, SECONDS / 2), partial(self.ask, model))
        for number in range(DEATHS):
            name = self.random.choice(self.names)
            self._later((number + 1) * SECONDS / (DEATHS + 2), partial(self.die, name))

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._ids), act))

    def ask(self, model: int) -> None:
        request = Request(next(self._ids), self.now, f"caller-{self.random.randrange(100)}")
        self.waiting[model][request.id] = request

    def die(self, name: str) -> None:
        """Its requests are asked again. It returns after 10 s."""
        if self.hosts.pop(name, None) is None:
            return
        for id, slot in self.slots.items():
            if slot.host == name:
                error = HostLost("the host does not answer")
                self.slots[id] = slot._replace(phase=Phase.ENDED, leases=0, interactive=0, error=error)
                queue = {**self.waiting[model_of(id)], **self.inside.pop(id)}
                self.waiting[model_of(id)] = dict(sorted(queue.items()))  # the numbers follow the time
        self._later(10.0, partial(self._return, name))

    def _return(self, name: str) -> None:
        self.hosts[name] = RequiredMemory(256 * GIB, (24 * GIB,) * DEVICES)
        self.back[name] = self.now

    def state(self) -> State:
        groups = [
            Group(key(model), tuple(queue.values()), self.options[model], f"model-{model}", False, 10.0, turn, 1, MOST)
            for model, (queue, turn) in enumerate(zip(self.waiting, self.turns, strict=True))
        ]
        return State(tuple(groups), tuple(self.slots.values()), self.hosts)

    def step(self) -> float:
        """Goes on by a tick. Returns the processor seconds of its plan."""
        self.now += TICK
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()
        state = self.state()
        began = time.process_time()
        actions = plan(state, self.now)
        took = time.process_time() - began
        for action in actions:
            self._carry_out(action)
        return took

    def _carry_out(self, action: Action) -> None:
        match action:
            case Grant(id, requests):
                self._grant(id, requests)
            case Start(id, option):
                self.loads += 1
                self._begin(id, option)
                self._later(self.random.uniform(5.0, 15.0), partial(self._ready, self.slots[id]))
            case Stop(id):
                slot = self.slots[id]
                self.turns[model_of(id)] = self.now
                phase = Phase.DRAINING if slot.leases else Phase.STOPPING
                self.slots[id] = slot._replace(phase=phase)
                if not slot.leases:
                    self._later(1.0, partial(self._ended, slot))
            case Forget(id):
                del self.slots[id]
            case Refuse(_, requests, error):
                raise SystemExit(f"{len(requests)} requests were refused: {error}")

    def _begin(self, id: RunnerId, option: RunOption, ready_at: float = -math.inf) -> None:
        phase = Phase.READY if ready_at > -math.inf else Phase.STARTING
        self.slots[id] = Slot(
            id.key, phase, option.memory, 0, self.now, load_seconds=10.0, ready_at=ready_at, option=option,
            parallel=SEQUENCES, number=id.number,
        )  # fmt: skip
        self.inside[id] = {}

    def _ready(self, begun: Slot) -> None:
        slot = self.slots.get(begun.id)
        if slot is not None and slot.phase is Phase.STARTING and slot.option is begun.option:
            self.slots[begun.id] = slot._replace(phase=Phase.READY, ready_at=self.now, last_used=self.now)

    def _ended(self, stopped: Slot) -> None:
        slot = self.slots.get(stopped.id)
        if slot is not None and slot.phase is Phase.STOPPING:
            self.slots[slot.id] = slot._replace(phase=Phase.ENDED)

    def _grant(self, id: RunnerId, requests: Sequence[int]) -> None:
        model, slot = model_of(id), self.slots[id]
        leases = slot.leases + len(requests)
        self.slots[id] = slot._replace(leases=leases, interactive=leases, last_used=self.now)
        self.turns[model] = self.now
        if slot.host in self.back:
            self.used.append(self.now - self.back.pop(slot.host))
        for number in requests:
            request = self.inside[id][number] = self.waiting[model].pop(number)
            self.waits[model].append(self.now - request.since)
            self._later(self.random.uniform(5.0, 15.0), partial(self._answered, id, number))

    def _answered(self, id: RunnerId, number: int) -> None:
        """The client asks again at once. A host that died has lost it."""
        if self.inside.get(id, {}).pop(number, None) is None:
            return
        slot = self.slots[id]
        leases = slot.leases - 1
        self.slots[id] = slot._replace(leases=leases, interactive=leases, last_used=self.now)
        if model_of(id) % 10:
            self.ask(model_of(id))


def model_of(id: RunnerId) -> int:
    return int(id.key.files.partition("-")[2])


def simulate(hosts: int) -> None:
    """A line of the second table."""
    fleet = Fleet(hosts, seed=1)
    took = [fleet.step() for _ in range(int(SECONDS / TICK))]
    ranked, asked = sorted(took), [waits for model, waits in enumerate(fleet.waits) if model % 10]
    means, cold = sorted(map(statistics.fmean, asked)), sorted(itertools.chain(*fleet.waits[::10]))
    state, held = fleet.state(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tracemalloc.start()
    plan(state, fleet.now)
    most = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    figures = [
        hosts,
        len(fleet.slots),
        sum(map(len, fleet.waiting)),
        " ".join(f"{1000 * ranked[int((len(ranked) - 1) * share)]:.0f}" for share in (0.5, 0.99, 1.0)),
        f"{1000 * took[0]:.0f}",
        f"{most:.0f}, {held:.0f} MiB",
        sum(map(len, fleet.waits)),
        fleet.loads,
        f"{means[0]:.1f} {statistics.median(means):.1f} {means[-1]:.1f} s",
        f"{statistics.median(cold):.1f} {cold[-1]:.1f} s ({sum(map(len, fleet.waiting[::10]))} left)",
        f"{max(fleet.used, default=math.nan):.0f} s ({len(fleet.used)})",
    ]
    print(*figures, sep=" | ", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="1,4,16,64,250,1000")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(f"{'hosts':>6}" + "".join(f"{name:>14}, ms" for name in CASES))
    counts = [int(hosts) for hosts in given.hosts.split(",")]
    for hosts in counts:
        print(f"{hosts:>6}", end="")
        for case in CASES.values():
            made = state(hosts, case)
            seconds = min(
                timeit.repeat(partial(plan, made, NOW), timer=time.process_time, number=1, repeat=given.rounds)
            )
            print(f"{1000 * seconds:>18.1f}", end="", flush=True)
        print()
    print(
        "\nhosts | runners | waiting | plan, ms: p50 p99 most | the first | memory of a plan, of all | answers | loads"
        " | mean wait of a model: least, median, most | without a runner: median, most | a host that returns answers"
    )
    for hosts in counts:
        if hosts >= 16:
            simulate(hosts)


if __name__ == "__main__":
    main()
