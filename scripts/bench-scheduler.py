"""Prints the time of a warm grant (target: at most 5 microseconds) and of one full plan at 1,000 queued requests for 20
models and 50 runners (target: at most 1 ms). `python scripts/bench-scheduler.py`; exit code 1 if a target is missed."""

import asyncio
import math
import sys
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from modelrunner.backend import NoSettings
from modelrunner.registry import BackendRegistry
from modelrunner.scheduler import Scheduler, Target
from modelrunner.scheduler.plan import plan
from modelrunner.scheduler.state import Group, Phase, Request, Slot, State
from modelrunner.types import (
    Bundle,
    Endpoint,
    KeepAlive,
    Mode,
    ModelFormat,
    ModelHeader,
    ProcessOptions,
    RequiredMemory,
    RunnerKey,
    RunSpec,
    Variant,
)

GIB = 1 << 30
NOW = 10_000.0


class Ready:
    """A runner that is ready at once and needs no process."""

    def __init__(self, spec: RunSpec) -> None:
        self.id, self.spec, self.stage, self.pid, self.sleep_level = "00000000", spec, "", None, 0
        self.endpoint = Endpoint(path=Path("/nowhere.sock"))
        self.ready_at: float | None = None

    async def run(self, changed: Callable[[], None]) -> None:
        self.ready_at = time.monotonic()
        changed()
        await asyncio.Event().wait()

    def mark_stopping(self) -> None: ...

    def measured_memory(self) -> None: ...


class Engine:
    """As much of a backend as a grant needs."""

    name = "fake"
    settings = NoSettings()

    def version(self) -> str:
        return ""

    async def variants(self, spec: RunSpec, budget: RequiredMemory) -> list[Variant]:
        return [Variant(spec, RequiredMemory(GIB))]


def target() -> Target:
    place = Path("/nowhere")
    bundle = Bundle("m", ("m",), ModelFormat.GGUF, place, {}, ModelHeader({}, ()), 0, None, frozenset())
    spec = RunSpec("m", bundle, Mode.COMPLETION, 4096, 4, ProcessOptions(place))
    return Target(RunnerKey("fake", "m", Mode.COMPLETION), spec, KeepAlive(300))


async def warm_grant() -> float:
    """Seconds of taking a lease and giving it back."""
    engines: Any = {"fake": Engine()}
    make_runner: Any = lambda key, spec: Ready(spec)  # noqa: E731
    scheduler = Scheduler(
        BackendRegistry(engines),
        runtime_dir=lambda: Path("/nowhere"),
        probe=lambda pids: RequiredMemory(8 * GIB),
        make_runner=make_runner,
    )
    wanted = target()
    held = await scheduler.acquire(wanted)

    def grant() -> None:
        scheduler.warm(wanted)

    best = min(timeit.repeat(grant, number=50, repeat=10)) / 50  # fewer than the model's queue holds
    held.release()
    await scheduler.close(0)
    return best


def key(i: int) -> RunnerKey:
    return RunnerKey("fake", f"model-{i}", Mode.COMPLETION)


def state(runners_leased: int, waited: float, size: int) -> State:
    """20 models without a runner, 50 requests each; 50 runners that fill the budget, some of them leased."""
    groups = tuple(
        Group(
            key(i), tuple(Request(50 * i + j, NOW - waited) for j in range(50)), (RequiredMemory(size),), f"model-{i}"
        )
        for i in range(20)
    )
    slots = tuple(
        Slot(key(100 + i), Phase.READY, RequiredMemory(GIB), int(i < runners_leased), NOW - i, 300.0) for i in range(50)
    )
    return State(groups, slots, RequiredMemory(50 * GIB))


def main() -> int:
    warm = asyncio.run(warm_grant())
    print(f"warm grant: {warm * 1e6:.2f} microseconds")
    examples = {
        "evict for each of 20 models": state(0, 1.0, GIB),
        "evict for as many as can": state(0, 1.0, 7 * GIB),
        "wait for 50 busy runners": state(50, 1.0, GIB),
        "drain busy runners": state(50, 60.0, 7 * GIB),
        "half of them busy": state(25, 60.0, 2 * GIB),
    }
    best = dict.fromkeys(examples, math.inf)
    for _ in range(100):  # in turn: a slow moment of the machine falls on all of them
        for name, example in examples.items():
            best[name] = min(best[name], timeit.timeit(partial(plan, example, NOW), number=5) / 5)
    for name, seconds in best.items():
        print(f"plan at 1,000 requests, 20 models, 50 runners, {name}: {seconds * 1e3:.3f} ms")
    return int(warm > 5e-6 or max(best.values()) > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
