"""Decides how a runner that ended by itself delays the next start of its model, and makes a plan's errors. Pure.

A failed start answers all requests that waited for it. Requests that come during the pause after it (1, 2, 4 ... 60 s)
are refused. After a crash the waiting requests get a new runner: at once the first time, then after 1, 2, 4 s. The
fifth crash or failed start in a row opens the breaker: for 60 s every request is refused with the engine's last words,
then one start is tried. Either way there are at most seven starts in any minute.

All of this holds for a model in one place: while one is paused, another may be tried.

A load that ran out of memory is tried again at once: first with more memory counted for it, then elsewhere or as the
next smaller run. The third in a row in one place counts as a failed start; the next start continues from there.
"""

from collections.abc import Sequence

from modelrunner.errors import BackingOff, InsufficientMemory, OutOfMemory, ShuttingDown, TimedOut
from modelrunner.scheduler.allocation import Allocations, covers
from modelrunner.scheduler.state import Failure, Failures, Group, Phase, RunOption, Slot

# The longest pause, in seconds. A runner that was ready for HEALTHY seconds clears its model of earlier failures; a
# failure is remembered for REMEMBERED seconds after its pause.
MAX_BACKOFF = 60.0
HEALTHY = 60.0
REMEMBERED = 600.0
# So many crashes or failed starts in a row open the breaker; so many starts in a row that run out of memory are an
# error.
BREAKER = 5
MEMORY_TRIES = 3
_SHOWN_HOSTS = 4  # in the error of a model that fits nowhere: those with the most free memory


def is_past(failure: Failure, now: float) -> bool:
    """True once the failure no longer affects the next start."""
    return now >= failure.until + REMEMBERED


def after(failures: Failures, slot: Slot, options: Sequence[RunOption], now: float) -> Failure:
    """Returns the failure to remember for `slot`, which ended by itself; its model has these `options`, and `failures`
    are those before."""
    assert slot.error is not None
    previous = failures.get((slot.key, slot.option.place))
    healthy = slot.was_ready and now - slot.ready_at >= HEALTHY
    if previous is None or healthy or is_past(previous, now):
        previous = Failure(0, now, slot.error)
    count, floor, waits = previous.count + 1, previous.floor, slot.was_ready and previous.count + 1 < BREAKER
    pause = min(MAX_BACKOFF, 2.0 ** (count - 1))
    if isinstance(slot.error, OutOfMemory):
        rank = slot.option.rank
        tried_with_more, smaller = floor is not None and rank >= floor, [o.rank for o in options if o.rank > rank]
        elsewhere = [o for o in options if o.rank == rank and o.place != slot.option.place]
        elsewhere = [o for o in elsewhere if (f := failures.get((slot.key, o.place))) is None or f.until <= now]
        waits = count < MEMORY_TRIES and (not tried_with_more or bool(smaller) or bool(elsewhere))
        floor = min(smaller, default=rank) if tried_with_more else rank
        pause = 0.0 if waits else pause
    elif slot.was_ready:
        pause = MAX_BACKOFF if not waits else pause / 2 if count > 1 else 0.0
    return Failure(count, now + pause, slot.error, waits, floor)


def backing_off(group: Group, failure: Failure, now: float) -> BackingOff:
    pause = max(0.0, failure.until - now)
    often = f" {failure.count} times in a row" if failure.count > 1 else ""
    what = f"{group.name} failed{often}, last with: {failure.error}; it is tried again in {pause:.1f} s"
    return BackingOff(what, retry_after=pause)


def timed_out(group: Group, max_wait: float, phase: Phase | None, paused: bool) -> TimedOut:
    """`phase` is the phase of the model's runner, None without one."""
    waits_for = {Phase.READY: "its turn behind other requests", Phase.STARTING: "its load", None: "memory"}
    what = "it to be resumed: it is paused" if paused else waits_for.get(phase, "memory")
    if phase is Phase.READY and any(request.suspect for request in group.waiting):
        what = "its turn: its engine crashed twice, and the requests that it had are asked again one at a time"
    return TimedOut(f"{group.name} timed out after {max_wait:g} s waiting for {what}; try again later")


def never_fits(group: Group, memory: Allocations) -> InsufficientMemory:
    """No host has more than the smallest variant needs, or pinned models hold too much of it."""
    hosts = [(memory[o.place.site], o.memory) for o in group.options if memory.keys() >= {*o.place.hosts}]
    fits = [covers(room.budget, room.total(group.runner, need)) for room, need in hosts]
    if not any(room.budget[0] for room in memory.values()):
        why = "and the budget is 0: raise memory_budget, or free memory that other programs hold"
    elif not any(fits):
        why = "more than there is: choose a smaller model or context, or raise the budget"
    else:
        why = "and pinned models hold the rest: unpin one, or raise the budget"
    return _no_room(group, why, memory)


def explained(error: BaseException, group: Group, memory: Allocations) -> BaseException:
    """Returns the error for the requests that waited for a start that failed with `error`."""
    if not isinstance(error, OutOfMemory) or not group.options:
        return error
    why = (
        "by the estimate, and memory ran out when it was loaded, again with more room and in the next smaller variant "
        f"if there is one ({error}): choose a smaller model or context, or free memory that other programs hold"
    )
    return _no_room(group, why, memory)


def shutting_down() -> ShuttingDown:
    return ShuttingDown("modelrunner is shutting down")


def _no_room(group: Group, why: str, memory: Allocations) -> InsufficientMemory:
    smallest, lines = group.options[-1].memory, dict[str, None]()
    last = {o.place.site: o for o in group.options if memory.keys() >= {*o.place.hosts}}  # the smallest on each
    shown = sorted(last.values(), key=lambda o: memory[o.place.site].free, reverse=True)[:_SHOWN_HOSTS]
    for place, needed in [pair for o in shown for pair in zip(o.place.each, o.memory.each, strict=True)]:
        room, host = memory[place.host], f" of {place.host}" if place.host else ""
        for i, need in enumerate((needed.ram, *needed.vram)):
            what = "main memory" if i == 0 else f"device {i - 1}"
            free, budget = max(0, room.free[i]), room.budget[i]
            lines[f"{what}{host}: needed {need}, free {free}, budget {budget} bytes"] = None
    if len(last) > len(shown):
        lines[f"and {len(last) - len(shown)} other places"] = None
    return InsufficientMemory(f"{group.name} needs {smallest}, {why} ({'; '.join(lines)})")
