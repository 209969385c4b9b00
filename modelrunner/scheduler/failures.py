"""How a runner that ended by itself delays the next start of its model, and the errors that a plan answers with. Pure.

A failed start is the answer to all who waited for it. Requests that come during the pause after it (1, 2, 4 ... 60 s)
are refused. After a crash the waiting requests get a new runner: at once the first time, then after 1, 2, 4 s. The
fifth crash or failed start in a row opens the breaker: for 60 s every request is refused with the engine's last words,
then one start is tried. Either way there are at most seven starts in any minute.

A load that ran out of memory is tried again at once: first with more memory counted for it, then in the next smaller
variant. The third in a row counts as a failed start; the next start continues from there.
"""

from modelrunner.errors import BackingOff, InsufficientMemory, OutOfMemory, ShuttingDown, TimedOut
from modelrunner.scheduler.room import Vector
from modelrunner.scheduler.state import Failure, Group, Phase, Slot

# Seconds: the longest pause; how long a runner must have been ready to clear its model of earlier failures; how long
# after its pause a failure is remembered.
MAX_BACKOFF = 60.0
HEALTHY = 60.0
REMEMBERED = 600.0
# Crashes or failed starts in a row that open the breaker; starts in a row that run out of memory before it is an error.
BREAKER = 5
MEMORY_TRIES = 3


def is_past(failure: Failure, now: float) -> bool:
    """True once the failure no longer affects the next start."""
    return now >= failure.until + REMEMBERED


def after(previous: Failure | None, slot: Slot, variants: int, now: float) -> Failure:
    """The failure to remember for `slot`, which ended by itself; its model has that many `variants`."""
    assert slot.error is not None
    healthy = slot.was_ready and now - slot.ready_at >= HEALTHY
    if previous is not None and (healthy or is_past(previous, now)):
        previous = None
    count = previous.count + 1 if previous is not None else 1
    floor, raised = (previous.floor, previous.raised) if previous is not None else (0, False)
    if isinstance(slot.error, OutOfMemory):
        return _out_of_memory(slot, count, floor, raised, variants, now)
    if not slot.was_ready:
        return Failure(count, now + _pause(count), slot.error, False, floor, raised)
    if count >= BREAKER:
        return Failure(count, now + MAX_BACKOFF, slot.error, False, floor, raised)
    return Failure(count, now + (_pause(count - 1) if count > 1 else 0.0), slot.error, True, floor, raised)


def _out_of_memory(slot: Slot, count: int, floor: int, raised: bool, variants: int, now: float) -> Failure:
    assert slot.error is not None
    tried_with_more = raised and slot.variant >= floor
    smaller = slot.variant + 1
    retry = count < MEMORY_TRIES and (not tried_with_more or smaller < variants)
    next_floor = min(smaller, max(variants - 1, slot.variant)) if tried_with_more else slot.variant
    until = now if retry else now + _pause(count)
    return Failure(count, until, slot.error, retry, next_floor, True)


def _pause(count: int) -> float:
    return min(MAX_BACKOFF, 2.0 ** (count - 1))


def backing_off(group: Group, failure: Failure, now: float) -> BackingOff:
    pause = max(0.0, failure.until - now)
    often = f" {failure.count} times in a row" if failure.count > 1 else ""
    return BackingOff(
        f"{_name(group)} failed{often}, last with: {failure.error}; it is tried again in {pause:.1f} s",
        retry_after=pause,
    )


def timed_out(group: Group, max_wait: float, phase: Phase | None, paused: bool) -> TimedOut:
    """`phase` is the phase of the model's runner, None without one."""
    if paused:
        what = "it to be resumed: it is paused"
    elif phase is Phase.READY:
        what = "its turn behind other requests"
    else:
        what = "its load" if phase is Phase.STARTING else "memory"
    return TimedOut(f"{_name(group)} timed out after {max_wait:g} s waiting for {what}; try again later")


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
