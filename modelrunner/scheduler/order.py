"""How many requests an engine gets at once, and whose turn it is. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from modelrunner.scheduler.state import Group, Request

# Who takes turns: a caller, whose batch requests stand in a line of their own.
Line = tuple[str, bool]

_MAX_LINES = 1024


def capacity(parallel: int) -> int:
    """Leases that a runner has at once: one for each of the engine's sequences, and a quarter more, so that a sequence
    which ends finds the next request inside the engine. The others wait in our queue: there they take turns, cost
    nothing when they leave, and a drain has little to wait for."""
    return parallel + max(1, parallel // 4)


def in_turn(
    waiting: Sequence[Request], count: int, served: Mapping[Line, float], ageing: float, now: float
) -> tuple[Request, ...]:
    """The `count` requests whose turn it is: interactive ones before a batch, then in rounds with one of each caller,
    of whom the one served longest ago (the least figure in `served`) comes first, then by age. A batch request that has
    waited for `ageing` seconds takes part in the rounds: its line gets at least every second turn of one other."""
    if count >= len(waiting):
        return tuple(waiting)
    turns: Counter[Line] = Counter()
    candidates = []
    for position, request in enumerate(waiting):
        line = (request.caller, request.batch)
        turn = turns[line]
        if turn < count:
            turns[line] = turn + 1
            later = request.batch and now - request.since < ageing
            candidates.append((later, turn, served.get(line, -math.inf), position))
    return tuple(waiting[position] for *_, position in sorted(candidates)[:count])


def in_line(groups: Iterable[Group], served: Mapping[Line, float], ageing: float, now: float) -> list[Group]:
    """The groups in the order in which they get room: first, by age, those whose oldest request has waited for `ageing`
    seconds, so that nobody is overtaken for ever; then those that somebody waits for interactively, in rounds with one
    model of each caller as in `in_turn`; then batches."""
    turns: Counter[Line] = Counter()
    ranked = []
    for position, group in enumerate(sorted(groups, key=age)):
        if now - group.waiting[0].since >= ageing:
            ranked.append((0, 0, 0.0, position, group))
            continue
        callers = {request.caller for request in group.waiting if not request.batch}
        batch = not callers
        lines = [(c, batch) for c in callers or {request.caller for request in group.waiting}]
        turn, last = min((turns[line], served.get(line, -math.inf)) for line in lines)
        turns.update(lines)
        ranked.append((2 if batch else 1, turn, last, position, group))
    return [group for *_, group in sorted(ranked, key=lambda r: r[:4])]


def note_turn(served: dict[Line, float], line: Line, turn: float) -> None:
    """The line's last turn; of many lines those are forgotten that were served longest ago."""
    served.pop(line, None)
    served[line] = turn
    if len(served) > _MAX_LINES:
        del served[next(iter(served))]


def age(group: Group) -> tuple[float, int]:
    """Of the oldest request in the group."""
    return group.waiting[0].since, group.waiting[0].id
