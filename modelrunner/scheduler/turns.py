"""How many requests an engine gets at once, and which come next. Pure."""

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from modelrunner.scheduler.state import Group, Request
from modelrunner.types import RunnerKey

# A caller takes turns with others; its batch requests stand in a line of their own.
Line = tuple[str, bool]

_MAX_LINES = 1024


def capacity(parallel: int) -> int:
    """Leases that a runner gives out at once: one for each of the engine's `parallel` sequences, and a quarter more, so
    that a sequence which ends finds the next request inside the engine. All others wait in the scheduler's queue: there
    they take turns, cost nothing when they leave, and do not prolong a drain."""
    return parallel + max(1, parallel // 4)


def yields(request: Request, served: Mapping[Line, float], ageing: float, now: float) -> bool:
    """True if the request lets interactive ones go first: it is of a batch whose caller got a turn, or which came, less
    than `ageing` seconds ago. So a flood of batch requests has one turn in `ageing` seconds beside interactive ones."""
    return request.batch and now < ages_at(request, served, ageing)


def ages_at(request: Request, served: Mapping[Line, float], ageing: float) -> float:
    """When a batch request yields no longer, if its caller's batch gets no turn before."""
    return max(request.since, served.get((request.caller, True), -math.inf)) + ageing


def urgent(groups: Iterable[Group], served: Mapping[Line, float], ageing: float, now: float) -> set[RunnerKey]:
    """The keys for which a request waits that does not yield."""
    return {g.key for g in groups if any(not yields(request, served, ageing, now) for request in g.waiting)}


def in_turn(
    waiting: Sequence[Request], count: int, served: Mapping[Line, float], ageing: float, now: float
) -> tuple[Request, ...]:
    """The `count` requests whose turn it is: interactive ones before a batch, then in rounds with one of each caller.
    Within a round the caller served longest ago comes first (`served` has the times), then the older request. The first
    request of an aged batch takes part in the rounds."""
    if count >= len(waiting):
        return tuple(waiting)
    turns: Counter[Line] = Counter()
    candidates = []
    for position, request in enumerate(waiting):
        line = (request.caller, request.batch)
        turn = turns[line]
        if turn < count:
            turns[line] = turn + 1
            later = request.batch and (turn > 0 or yields(request, served, ageing, now))
            candidates.append((later, turn, served.get(line, -math.inf), position))
    return tuple(waiting[position] for *_, position in sorted(candidates)[:count])


def in_line(groups: Iterable[Group], leaving: Container[RunnerKey], served: Mapping[Line, float]) -> list[Group]:
    """The groups in the order in which they get memory: in rounds with one model of each caller as in `in_turn`; then
    the group that got no lease for longest. Those whose old runner is still `leaving` come last."""
    turns: Counter[Line] = Counter()
    ranked = []
    for position, group in enumerate(sorted(groups, key=lambda g: (g.since, g.waiting[0].id))):
        interactive = {(request.caller, False) for request in group.waiting if not request.batch}
        lines = interactive or {(request.caller, True) for request in group.waiting}
        turn, last = min((turns[line], served.get(line, -math.inf)) for line in lines)
        turns.update(lines)
        ranked.append((group.key in leaving, turn, last, position, group))
    return [group for *_, group in sorted(ranked, key=lambda r: r[:4])]


def note_turn(served: dict[Line, float], line: Line, now: float) -> None:
    """Records that the line was served at `now`. Keeps the 1,024 lines served last."""
    served.pop(line, None)
    served[line] = now
    if len(served) > _MAX_LINES:
        del served[next(iter(served))]
