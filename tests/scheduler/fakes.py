"""A loop in which hours pass in no time, and engines that do what they are told."""

import asyncio
import functools
import itertools
import math
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from modelrunner.backend import Backend, BackendContext, BackendState, BackendStatus
from modelrunner.engine.connections import UpstreamPool
from modelrunner.engine.runner import Runner
from modelrunner.engineapi import OPENAI
from modelrunner.errors import EngineFailed, OutOfMemory
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.scheduler import Held, Host, Replicas, Scheduler, Target
from modelrunner.scheduler.devices import Device
from modelrunner.scheduler.state import RunnerId
from modelrunner.scheduler.target import ONE
from modelrunner.types import (
    Bundle,
    Endpoint,
    KeepAlive,
    Launch,
    Mode,
    ModelFormat,
    ModelHeader,
    RequiredMemory,
    RunnerKey,
    RunSpec,
    Served,
    Variant,
)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time stands still while something can run, and jumps to the next timer when nothing can. `turns` counts the turns
    of the loop; in turn `interrupt_at` it calls `interrupt` first."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.turns = 0
        self.interrupt_at: int | None = None
        self.interrupt: Callable[[], object] = lambda: None
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        self._loop.turns += 1
        if self._loop.turns == self._loop.interrupt_at:
            self._loop.interrupt()
            return ready
        if not ready and timeout is None:
            raise RuntimeError("deadlock: nothing can run and no timer is set")
        if not ready and timeout:
            self._loop.now += timeout
        return ready


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test on a `VirtualLoop`."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


async def settle() -> None:
    """Lets everything happen that needs no time to pass."""
    loop = asyncio.get_running_loop()
    for _ in range(30):
        before = loop.time()
        await asyncio.sleep(0)
        assert loop.time() == before


@dataclass
class Engine:
    """How the engine of one model behaves. `smaller` are the sizes of higher ranks of its run; `ways` are all ways to
    run it, with their rank, in place of both. `holds` is what it really takes on a machine whose memory ends. Where it
    has a `sleep_level`, it holds `asleep` while it sleeps."""

    size: int
    load_seconds: float = 1.0
    stop_seconds: float = 0.1
    fails: BaseException | None = None
    measured: int | RequiredMemory | None = None
    smaller: tuple[int, ...] = ()
    holds: int | None = None
    sleep_level: int = 0
    sleep_seconds: float = 0.1
    wake_seconds: float = 0.2
    asleep: int = 1
    cannot_wake: BaseException | None = None
    cannot_sleep: BaseException | None = None
    vram: tuple[int, ...] = ()
    ways: tuple[tuple[int, RequiredMemory], ...] = ()

    def __post_init__(self) -> None:
        if not self.ways:
            self.ways = ((0, RequiredMemory(self.size, self.vram)), *enumerate(map(RequiredMemory, self.smaller), 1))


class FakeRunner:
    """What the scheduler knows of a `Runner`, with no process behind it."""

    def __init__(self, world: "World", key: RunnerKey, spec: RunSpec, id: str) -> None:
        self.key, self.spec, self.id = key, spec, id
        self.upstream = UpstreamPool(Endpoint(path=Path(f"/nowhere/{id}.sock")))
        self.api = OPENAI
        self.stage = ""
        self.process = None
        self.served = Served(spec.bundle.name, key.backend, id)
        self.ready_at: float | None = None
        self.failure: EngineFailed | None = None
        self.owners: set[str] = set()
        self.loaded_for: str | None = None
        self.orders: list[str] = []
        self.sleeps = False
        self.expected = RequiredMemory(0)
        self._world = world
        self._last_words = ""
        self._died = asyncio.Event()

    def expect(self, memory: RequiredMemory) -> None:
        self.expected = memory

    async def run(self, changed: Callable[[], None], loaded_for: Callable[[], str | None]) -> NoReturn:
        engine = self._world.engines[self.key.files]
        self._world.begun(self)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(engine.load_seconds):
                    await self._died.wait()
            if engine.fails is not None:
                raise engine.fails
            if self._world.held() > self._world.physical:
                raise OutOfMemory(-9, message="memory ran out")
            if not self._died.is_set():
                self.loaded_for = loaded_for()
                self.ready_at = asyncio.get_running_loop().time()
                changed()
            await self._died.wait()
            raise EngineFailed(self._last_words)
        except EngineFailed as error:
            self.failure = error
            raise
        except asyncio.CancelledError:
            await asyncio.sleep(engine.stop_seconds)
            raise
        finally:
            self._world.ended(self)

    def mark_stopping(self) -> None:
        self.stage = "stopping"

    @property
    def sleep_level(self) -> int:
        return self._world.engines[self.key.files].sleep_level

    async def sleep(self) -> None:
        engine = self._world.engines[self.key.files]
        self.orders.append("sleep")
        await asyncio.sleep(engine.sleep_seconds)
        if engine.cannot_sleep is not None:
            raise engine.cannot_sleep
        self.sleeps = True

    async def wake(self) -> None:
        engine = self._world.engines[self.key.files]
        self.orders.append("wake")
        assert self.sleeps, "it was awake"
        await asyncio.sleep(engine.wake_seconds)
        if engine.cannot_wake is not None:
            raise engine.cannot_wake
        self.sleeps = False
        assert self._world.taken().ram <= self._world.budget, "over the budget"

    async def memory(self) -> RequiredMemory | None:
        if self.sleeps:
            return RequiredMemory(self._world.engines[self.key.files].asleep)
        measured = self._world.engines[self.key.files].measured
        return RequiredMemory(measured) if isinstance(measured, int) else measured

    @property
    def dead(self) -> bool:
        return self._died.is_set()

    def die(self, message: str = "the engine was ended by signal 9") -> None:
        """By itself, as after a crash."""
        self._last_words = message
        self._died.set()


class FakeBackend(Backend):
    name = "fake"
    formats = frozenset({ModelFormat.GGUF})

    def __init__(self, engines: dict[str, Engine]) -> None:
        super().__init__(BackendContext(Path("/nowhere"), Path("/nowhere"), Path("/nowhere"), {}))
        self.engines = engines
        self.estimates = 0

    async def install(self, progress: Any, **options: Any) -> None: ...

    async def uninstall(self) -> None: ...

    async def run(self, spec: RunSpec, launch: Launch) -> NoReturn:
        raise NotImplementedError

    def status(self) -> BackendStatus:
        return BackendStatus(BackendState.RUNNING)

    async def disk_usage(self) -> int:
        return 0

    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        self.estimates += 1
        await asyncio.sleep(0)
        engine = self.engines[spec.model_id]
        return RequiredMemory(engine.size, engine.vram)

    async def variants(self, spec: RunSpec, budget: RequiredMemory) -> list[Variant]:
        """The number of each but the first stands in `gpu_layers`. Of a run that grows they have one sequence."""
        await self.required_memory(spec)
        return [
            Variant(
                replace(spec, gpu_layers=i or None, parallel=1 if i and spec.grows else spec.parallel),
                memory,
                f"variant {i}" if i else "",
                rank,
            )
            for i, (rank, memory) in enumerate(self.engines[spec.model_id].ways)
        ]


@dataclass
class World:
    """A machine with a memory budget, the engines on it, and what was seen there. `physical` is where its memory really
    ends."""

    budget: int
    engines: dict[str, Engine]
    physical: float = math.inf
    vram: tuple[int, ...] = ()
    started: list[str] = field(default_factory=list)
    running: dict[str, FakeRunner] = field(default_factory=dict)  # by ID
    most: Mapping[str, int] = field(default_factory=dict)  # runners of one model at once, by its name; 1 of others

    def __post_init__(self) -> None:
        self.backend = FakeBackend(self.engines)
        self._ids = itertools.count()

    def scheduler(self, **settings: Any) -> Scheduler:
        hosts = settings.pop("hosts", None) or [FakeHost(self)]
        usual = {"clock": asyncio.get_running_loop().time}
        return Scheduler(BackendRegistry({"fake": self.backend}), hosts, **usual | settings)

    def make_runner(self, key: RunnerKey, spec: RunSpec) -> Any:
        return FakeRunner(self, key, spec, f"{next(self._ids):08x}")

    def begun(self, runner: FakeRunner) -> None:
        same = [other for other in self.running.values() if other.key == runner.key]
        assert len(same) < self.most.get(runner.key.files, 1), "too many runners of one key"
        self.running[runner.id] = runner
        self.started.append(runner.key.files)
        assert self.taken().fits(RequiredMemory(self.budget, self.vram)), "over the budget"

    def ended(self, runner: FakeRunner) -> None:
        del self.running[runner.id]

    def taken(self) -> RequiredMemory:
        return sum(map(self.memory, self.running.values()), RequiredMemory(0))

    def held(self) -> int:
        """What the engines really hold of main memory together."""
        return sum(
            (not runner.spec.gpu_layers and self.engines[runner.key.files].holds) or self.memory(runner).ram
            for runner in self.running.values()
        )

    def memory(self, runner: FakeRunner) -> RequiredMemory:
        """Of the variant that it runs."""
        if runner.sleeps:
            return RequiredMemory(self.engines[runner.key.files].asleep)
        return self.engines[runner.key.files].ways[runner.spec.gpu_layers or 0][1]

    def resident(self) -> list[str]:
        return sorted(runner.key.files for runner in self.running.values())

    def runner(self, name: str) -> FakeRunner:
        return next(runner for runner in self.running.values() if runner.key.files == name)


class FakeHost:
    """A `Host` of that world."""

    def __init__(self, world: World, name: str = "") -> None:
        self.world, self.name = world, name

    def budget(self, runners: Iterable[Held]) -> RequiredMemory | None:
        return RequiredMemory(self.world.budget, self.world.vram)

    def kind(self, devices: tuple[int, ...]) -> str:
        return ""

    def devices(self) -> tuple[Device, ...]:
        return ()

    def numbers(self, backend: str) -> tuple[int, ...] | None:
        return None

    def has(self, model_id: str) -> bool:
        return True

    labels: Collection[str] = ()

    def lacks(self, backend: str) -> bool:
        return False

    is_joining = False

    def joins(self, model_id: str, devices: Collection[int]) -> bool:
        return self.is_joining

    def start(self, id: RunnerId, spec: RunSpec, others: Sequence[Host] = ()) -> Runner:
        runner: Runner = self.world.make_runner(id.key, spec)
        return runner

    async def log(self, runner: Runner, lines: int | None, ending: asyncio.Event | None) -> AsyncIterator[bytes]:
        yield b"fake"

    async def close(self) -> None: ...


def target(
    name: str,
    *,
    keep_alive: float = 300.0,
    pinned: bool = False,
    parallel: int = 2,
    replicas: Replicas = ONE,
    grows: bool = False,
) -> Target:
    header = ModelHeader({}, ())
    place = Path("/nowhere")
    bundle = Bundle(name, (name,), ModelFormat.GGUF, place, {}, header, 0, None, frozenset())
    spec = RunSpec(name, bundle, Mode.COMPLETION, 512, parallel, grows=grows)
    key = RunnerKey("fake", name, Mode.COMPLETION)
    return Target(key, spec, KeepAlive(keep_alive), pinned, replicas=replicas)


async def gathered(waiting: Iterable[Awaitable[Any]]) -> list[Any]:
    """Results and errors."""
    return list(await asyncio.gather(*waiting, return_exceptions=True))
