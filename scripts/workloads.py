"""The workloads of the simulated scheduler: which clients ask for which models, in how much memory."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, cycle

from modelrunner.scheduler.state import RunOption, RunPlace
from modelrunner.types import Mode, RequiredMemory, RunnerKey

MIB = 1 << 20


@dataclass(frozen=True)
class Model:
    """`size` in bytes, `files` of them mapped; on a machine with devices it lies on `on` of them, which may be any.
    `load`, `stop` and `work` (one answer of an idle machine) in seconds."""

    name: str
    size: int
    load: float
    work: float
    stop: float = 0.1
    parallel: int = 4
    files: int = 0
    on: int = 1

    def options(self, devices: int, machines: Sequence[str] = ("",)) -> tuple[RunOption, ...]:
        if not devices:
            memory = RequiredMemory(self.size, shared=self.files)
            return tuple(RunOption(memory, place=RunPlace(host=host)) for host in machines)
        return tuple(
            RunOption(RequiredMemory(0, tuple(self.size * (i in chosen) for i in range(devices))), 0, RunPlace(chosen))
            for chosen in combinations(range(devices), self.on)
        )

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
    """`seconds` of clients that ask for `models` in `budget` bytes of each of the `machines`, or on `devices` with so
    many each. With `first_token` the waits end with the first token of the answer, else with the lease."""

    name: str
    about: str
    models: Sequence[Model]
    budget: int
    clients: Sequence[Client]
    seconds: float = 300.0
    first_token: bool = False
    devices: tuple[int, ...] = ()
    machines: Sequence[str] = ("",)

    @property
    def hosts(self) -> dict[str, RequiredMemory]:
        return dict.fromkeys(self.machines, RequiredMemory(self.budget, self.devices))

    @property
    def places(self) -> int:
        """The equal places, devices or machines, of which each model takes one whole; 0 where it is not so simple."""
        rooms = self.devices or [self.budget] * len(self.machines)
        each = [model.on == 1 and max(rooms) < 2 * model.size <= 2 * min(rooms) for model in self.models]
        return len(rooms) if all(each) else 0


FIRST_MACHINE = (
    Model("smollm2", 311 * MIB, load=0.28, work=0.17, stop=0.07),
    Model("gemma", 497 * MIB, load=0.57, work=0.2, stop=0.07),
    Model("minilm", 133 * MIB, load=0.08, work=0.02, stop=0.02),
)
SECOND_MACHINE = (
    Model("smollm2", 311 * MIB, load=0.45, work=0.17, stop=0.08),
    Model("gemma", 497 * MIB, load=0.9, work=0.29, stop=0.08),
    Model("minilm", 133 * MIB, load=0.13, work=0.0065, stop=0.02),
)
"""As measured on the two machines of docs/performance.md, whose processors differ."""


def contention(name: str, about: str, models: Sequence[Model]) -> Workload:
    names = [model.name for model in models]
    clients = [Client(lambda r: r.choice(names)) for _ in range(64)]
    return Workload(name, about, models, 874 * MIB, clients)


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


def its_own_batch() -> Workload:
    models = [Model("smollm2", 311 * MIB, load=0.28, work=0.29, stop=0.07, files=101 * MIB)]
    alone = Client(lambda r: "smollm2", think=2.0)
    lines = [Client(lambda r: "smollm2", count=1, batch=True, watched=False) for _ in range(400)]
    about = "one client that thinks for 2 s beside 400 requests of a batch for its own model, 60 s; its first token"
    return Workload("its own batch", about, models, 400 * MIB, [alone, *lines], seconds=60.0, first_token=True)


def poller() -> Workload:
    models = [Model("lone", 300 * MIB, load=0.5, work=0.05), Model("crowd", 300 * MIB, load=0.5, work=0.17)]
    lone = Client(lambda r: "lone", think=2.0)
    crowd = [Client(lambda r: "crowd", watched=False) for _ in range(24)]
    about = "a client that asks a small question every 2 s beside 24 of another model, room for one; its waits"
    return Workload("poller", about, models, 400 * MIB, [lone, *crowd])


def slow_loads() -> Workload:
    models = [Model(name, 300 * MIB, load=42.8, work=2.0) for name in ("a", "b")]
    clients = [Client(lambda r, name=name: name, think=1.0) for name in ("a", "b") for _ in range(6)]
    about = "two models that load as long as vLLM did (42.8 s), six clients each, room for one, 600 s"
    return Workload("slow loads", about, models, 400 * MIB, clients, seconds=600.0)


def swap() -> Workload:
    models = [Model("a", 300 * MIB, load=0.28, work=0.1), Model("b", 300 * MIB, load=0.57, work=0.1)]
    turns = cycle("ab")
    client = Client(lambda r: next(turns))
    about = "a client that asks two models in turn, room for one; its waits"
    return Workload("swap", about, models, 400 * MIB, [client])


def workloads() -> Iterator[Workload]:
    """Four by which rules are kept or dropped, then those that show a promise."""
    about = "64 clients ask for three models, of which two fit, as `scripts/bench contention` does"
    yield contention("contention", about, FIRST_MACHINE)
    about = "the same with the times of a machine where Gemma takes 1.7 times as long as SmolLM2, and MiniLM hardly any"
    yield contention("second machine", about, SECOND_MACHINE)
    yield zipf()
    yield beside("batch", "200 requests with `X-Priority: batch`", batch=True)
    yield beside("flood", "200 requests like its own", batch=False)
    yield slow_loads()
    yield poller()
    yield its_own_batch()
    yield swap()


def _devices(name: str, about: str, sizes: Sequence[int], devices: Sequence[int], on: Sequence[int]) -> Workload:
    """`sizes` of the models on each of their devices, and of the `devices`, in GiB; a model loads in 2 s and a quarter
    of a second for each GiB."""
    models = [
        Model(f"model-{i}", size << 30, load=2 + size / 4, work=0.5, on=count)
        for i, (size, count) in enumerate(zip(sizes, on, strict=True))
    ]
    names, weights = [model.name for model in models], [1 / (i + 1) for i in range(len(models))]
    clients = [Client(lambda r: r.choices(names, weights)[0], think=4.0) for _ in range(len(devices) + 4)]
    return Workload(name, about, models, 1 << 40, clients, 900.0, devices=tuple(size << 30 for size in devices))


def device_workloads() -> Iterator[Workload]:
    """Machines with devices, and two hosts, by which the rule of places was chosen."""
    turns = cycle(("a", "b"))
    models = [Model(name, 17 << 30, load=5.0, work=0.5) for name in "ab"]
    client = Client(lambda r: next(turns), think=20.0, count=60)
    about = "two models on two equal devices with room for one each, asked in turn 60 times"
    yield Workload("two in turn", about, models, 1 << 40, [client], 3600.0, devices=(22 << 30, 22 << 30))
    yield Workload(
        "two hosts", about.replace("devices", "hosts"), models, 22 << 30, [client], 3600.0, machines=("", "b")
    )
    yield _devices("four equal", "six models of one device each, by a Zipf law", [20] * 6, [22] * 4, [1] * 6)
    halves = [10, 20, 10, 20, 10]
    yield _devices("two equal", "five models of half a device or one", halves, [22] * 2, [1] * 5)
    sizes = [20, 40, 7, 20, 7, 12, 20, 5]
    yield _devices("four unequal", "eight models, some for one device alone", sizes, [24, 48, 8, 24], [1] * 8)
    sizes, on = [10, 20, 20, 10, 20, 10, 20, 10, 20, 10, 20, 20], [1, 1, 2, 1, 2, 1, 1, 1, 2, 1, 1, 4]
    yield _devices("eight equal", "twelve models of half a device, one, two and four", sizes, [22] * 8, on)
