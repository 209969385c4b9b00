"""The errors that a plan answers with, and how long a failed start is held against a model."""

from modelrunner.errors import BackingOff, InsufficientMemory, ShuttingDown, TimedOut
from modelrunner.scheduler.room import Vector
from modelrunner.scheduler.state import Failure, Group

# Seconds: the longest pause between two starts of a model that fails, and how long after its pause a failure counts.
MAX_BACKOFF = 60.0


def next_failure(previous: Failure | None, error: BaseException, now: float) -> Failure:
    """Pauses of 1, 2, 4 ... seconds, from the first again when the last failure is long past."""
    recent = previous is not None and now < previous.until + MAX_BACKOFF
    count = previous.count + 1 if previous is not None and recent else 1
    return Failure(count, now + min(MAX_BACKOFF, 2.0 ** (count - 1)), error)


def backing_off(group: Group, failure: Failure, now: float) -> BackingOff:
    pause = failure.until - now
    return BackingOff(
        f"{_name(group)} failed to start a moment ago ({failure.error}); it is tried again in {pause:.1f} s",
        retry_after=pause,
    )


def timed_out(group: Group, max_wait: float, loading: bool) -> TimedOut:
    what = "its load" if loading else "room in memory"
    return TimedOut(f"{_name(group)} was not ready within {max_wait:g} s (it waited for {what}); try again later")


def too_large(group: Group, budget: Vector, free: Vector) -> InsufficientMemory:
    what = "more than there is: choose a smaller model or context, or raise the budget"
    return _no_room(group, what, budget, free)


def pinned_out(group: Group, budget: Vector, free: Vector) -> InsufficientMemory:
    return _no_room(group, "and pinned models hold the rest: unpin one, or raise the budget", budget, free)


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
