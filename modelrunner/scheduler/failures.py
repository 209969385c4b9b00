"""What runners that ended by themselves mean for the next start: pauses, a breaker, and more room or a smaller variant
where memory ran out. Pure.

A start that failed answers those who waited for it; who comes during the pause that follows (1, 2, 4 ... 60 s) is told
so. After a crash the waiting get a new runner, at once the first time, then after 1, 2, 4 s; the fifth crash or failed
start in a row opens the breaker: for 60 s everybody is refused with the engine's last words, then one start is tried.
Either way there are at most seven starts in any minute.

A load that ran out of memory is tried again at once, first with more room made for it, then in the next smaller
variant; the third in a row is told like any failed start, and the next one begins where that ended.
"""

from modelrunner.errors import OutOfMemory
from modelrunner.scheduler.state import Failure, Slot

# Seconds: the longest pause, how long a runner has to be ready to clear its model of earlier failures, and how long
# after its pause a failure is remembered.
MAX_BACKOFF = 60.0
HEALTHY = 60.0
REMEMBERED = 600.0
# Failures in a row after which a model that crashes is given up for a pause; starts in a row that run out of memory.
BREAKER = 5
MEMORY_TRIES = 3


def is_past(failure: Failure, now: float) -> bool:
    """It says nothing about the next start any more."""
    return now >= failure.until + REMEMBERED


def after(previous: Failure | None, slot: Slot, variants: int, now: float) -> Failure:
    """What to remember of `slot`, which ended by itself, where its model has so many variants."""
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
