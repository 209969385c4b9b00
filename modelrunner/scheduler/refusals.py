"""The errors that a plan answers with."""

from modelrunner.errors import BackingOff, InsufficientMemory, ShuttingDown, TimedOut
from modelrunner.scheduler.room import Vector
from modelrunner.scheduler.state import Failure, Group, Phase


def backing_off(group: Group, failure: Failure, now: float) -> BackingOff:
    pause = max(0.0, failure.until - now)
    often = f" {failure.count} times in a row" if failure.count > 1 else ""
    return BackingOff(
        f"{_name(group)} failed{often}, last with: {failure.error}; it is tried again in {pause:.1f} s",
        retry_after=pause,
    )


def timed_out(group: Group, max_wait: float, phase: Phase | None, paused: bool) -> TimedOut:
    """`phase` is its runner's, if there is one."""
    if paused:
        what = "being resumed: it is paused"
    elif phase is Phase.READY:
        what = "its turn: the requests before it take that long"
    else:
        what = "its load" if phase is Phase.STARTING else "room in memory"
    return TimedOut(f"{_name(group)} was not free within {max_wait:g} s (it waited for {what}); try again later")


def too_large(group: Group, budget: Vector, free: Vector) -> InsufficientMemory:
    what = "more than there is: choose a smaller model or context, or raise the budget"
    if budget[0] == 0:
        what = "and the budget is 0: raise memory_budget, or free memory that other programs hold"
    return _no_room(group, what, budget, free)


def pinned_out(group: Group, budget: Vector, free: Vector) -> InsufficientMemory:
    return _no_room(group, "and pinned models hold the rest: unpin one, or raise the budget", budget, free)


def out_of_memory(group: Group, error: BaseException, budget: Vector, free: Vector) -> InsufficientMemory:
    what = (
        "by the estimate, and memory ran out when it was loaded, again with more room and in the next smaller variant "
        f"if there is one ({error}): choose a smaller model or context, or free memory that other programs hold"
    )
    return _no_room(group, what, budget, free)


def shutting_down() -> ShuttingDown:
    return ShuttingDown("modelrunner is shutting down")


def _no_room(group: Group, why: str, budget: Vector, free: Vector) -> InsufficientMemory:
    smallest = group.needs[-1]
    lines = []
    for i, need in enumerate((smallest.ram, *smallest.vram)):
        what = "main memory" if i == 0 else f"device {i - 1}"
        lines.append(f"{what}: needed {need}, free {max(0, free[i])}, budget {budget[i]} bytes")
    return InsufficientMemory(f"{_name(group)} needs {smallest}, {why} ({'; '.join(lines)})")


def _name(group: Group) -> str:
    return group.name or str(group.key)
