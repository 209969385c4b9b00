"""States as values: what plans are made from in tests."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from modelrunner.errors import ModelRunnerError
from modelrunner.scheduler.plan import plan
from modelrunner.scheduler.state import (
    Action,
    Failure,
    Failures,
    Group,
    Phase,
    Policy,
    Reason,
    Refuse,
    Request,
    RunnerId,
    RunOption,
    RunPlace,
    Slot,
    Start,
    State,
    WakeAt,
)
from modelrunner.types import Mode, RequiredMemory, RunnerKey

NOW = 1000.0
HERE = RunPlace()
POLICY = Policy(max_wait=100.0, patience=5.0)


def key(name: str) -> RunnerKey:
    return RunnerKey("fake", name, Mode.COMPLETION)


def runner(name: str, number: int = 0) -> RunnerId:
    return RunnerId(key(name), number)


def group(
    name: str,
    need: int | None,
    *since: float,
    first: int = 1,
    vram: tuple[int, ...] = (),
    smaller: tuple[int, ...] = (),
    caller: str = "",
    batch: bool = False,
    load: float = 0.0,
    elsewhere: tuple[tuple[int, ...], ...] = (),
    pinned: bool = False,
) -> Group:
    """Requests that came at these times, from `first` on; `smaller` are the needs of higher ranks, and `elsewhere` is
    what the first one takes of the devices in other places."""
    waiting = tuple(Request(first + i, at, caller, batch) for i, at in enumerate(since or (NOW,)))
    ranked = [] if need is None else [(0, RequiredMemory(need, sizes)) for sizes in (vram, *elsewhere)]
    ranked += enumerate(map(RequiredMemory, smaller), 1)
    options = tuple(option(memory, rank, number) for number, (rank, memory) in enumerate(ranked))
    return Group(key(name), waiting, options, name, pinned, load_seconds=load)


def start(name: str, ram: int, vram: tuple[int, ...] = (), *, rank: int = 0) -> Start:
    """Where each rank has one option."""
    return Start(runner(name), option(RequiredMemory(ram, vram), rank, rank))


def option(memory: RequiredMemory, rank: int = 0, number: int = 0, host: str = "") -> RunOption:
    return RunOption(memory, rank, RunPlace(memory.devices, host), number)


def over(*parts: tuple[str, RequiredMemory], rank: int = 0, number: int = 0) -> RunOption:
    """Over several hosts, each with what it takes there."""
    (host, memory), *rest = parts
    others = tuple([RunPlace(part.devices, where) for where, part in rest])
    place = RunPlace(memory.devices, host, others)
    return RunOption(replace(memory, others=tuple([part for _, part in rest])), rank, place, number)


def slot(
    name: str,
    size: int,
    phase: Phase = Phase.READY,
    *,
    idle: float = 10.0,
    leases: int = 0,
    keep_alive: float = 300.0,
    pinned: bool = False,
    drain: Reason | None = None,
    vram: tuple[int, ...] = (),
    load: float = 1.0,
    ready: float = 1e6,
    parallel: int = 64,
    interactive: int | None = None,
) -> Slot:
    """Used `idle` seconds ago and ready for `ready` seconds; all leases are interactive unless it is said how many."""
    return Slot(
        key(name),
        phase,
        RequiredMemory(size, vram),
        leases,
        NOW - idle,
        keep_alive,
        pinned,
        load,
        drain,
        ready_at=NOW - ready if phase is not Phase.STARTING else -math.inf,
        option=option(RequiredMemory(size, vram)),
        parallel=parallel,
        interactive=leases if interactive is None else interactive,
    )


def ended(
    name: str, error: BaseException | None, was_ready: bool = False, *, ready: float = 1.0, rank: int = 0
) -> Slot:
    return Slot(
        key(name),
        Phase.ENDED,
        RequiredMemory(5),
        error=error,
        ready_at=NOW - ready if was_ready else -math.inf,
        option=RunOption(RequiredMemory(5), rank, number=rank),
    )


def known(failure: Failure | None) -> Failures:
    """What is remembered of the model a."""
    return {} if failure is None else {(key("a"), HERE): failure}


def decide(*parts: Group | Slot, **more: Any) -> list[Action]:
    """The plan of `everything`, without its wake-up."""
    return [action for action in everything(*parts, **more) if not isinstance(action, WakeAt)]


def everything(
    *parts: Group | Slot,
    budget: int = 10,
    vram: tuple[int, ...] = (),
    others: Mapping[str, RequiredMemory] = MappingProxyType({}),
    **more: object,
) -> list[Action]:
    """The plan of a machine with this memory, and with `others` beside it."""
    groups = tuple(p for p in parts if isinstance(p, Group))
    slots = tuple(p for p in parts if isinstance(p, Slot))
    state = State(groups, slots, {"": RequiredMemory(budget, vram), **others}, **({"policy": POLICY} | more))  # type: ignore[arg-type]
    return plan(state, NOW)


def refusal(actions: list[Action]) -> ModelRunnerError:
    [action] = actions
    assert isinstance(action, Refuse)
    assert isinstance(action.error, ModelRunnerError)
    return action.error


def wake(actions: list[Action]) -> float:
    [at] = [a.time for a in actions if isinstance(a, WakeAt)]
    return at
