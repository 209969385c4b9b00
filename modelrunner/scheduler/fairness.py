"""Decides which requests a runner serves next, and which model gets memory next. Pure."""

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from modelrunner.scheduler.state import Group, Line, Request
from modelrunner.types import RunnerKey

_MAX_LINES = 1024


class Turns:
    """Finds the requests and models whose turn it is at time `now`. `served` has the time of each line's last turn. A
    batch whose caller got nothing for `ageing` seconds counts as interactive until its next turn."""

    def __init__(self, served: Mapping[Line, float], ageing: float, now: float) -> None:
        self._served, self._ageing, self._now = dict(served), ageing, now

    def yields_until(self, request: Request) -> float:
        """The time until which the request lets interactive ones go first. A batch lets them for `ageing` seconds after
        its caller's last turn in a batch. So a flood of batch requests has one turn in `ageing` seconds."""
        if not request.batch:
            return -math.inf
        return max(request.since, self._served.get((request.caller, True), -math.inf)) + self._ageing

    def urgent(self, groups: Iterable[Group]) -> set[RunnerKey]:
        """The keys for which a request waits that does not let others go first."""
        return {g.key for g in groups if any(self._now >= self.yields_until(request) for request in g.waiting)}

    def in_turn(self, waiting: Sequence[Request], count: int) -> tuple[Request, ...]:
        """The `count` requests whose turn it is, which is counted: interactive ones before a batch, then in rounds with
        one of each caller. Within a round the caller served longest ago comes first, then the older request. The first
        request of an aged batch takes part in the rounds."""
        chosen = list(waiting)
        if len(waiting) > count:
            turns: Counter[Line] = Counter()
            ranked = []
            for position, request in enumerate(waiting):
                line = (request.caller, request.batch)
                turn = turns[line]
                if turn < count:
                    turns[line] = turn + 1
                    later = request.batch and (turn > 0 or self._now < self.yields_until(request))
                    ranked.append((later, turn, self._served.get(line, -math.inf), position))
            chosen = [waiting[position] for *_, position in sorted(ranked)[:count]]
        self._served.update({(request.caller, request.batch): self._now for request in chosen})
        return tuple(chosen)

    def in_line(self, groups: Iterable[Group], first: Container[RunnerKey]) -> list[Group]:
        """The groups in the order in which they get memory: those in `first` before the others, then in rounds with one
        model of each caller as in `in_turn`, then the group that got no lease for longest."""
        turns: Counter[Line] = Counter()
        ranked = []
        oldest_first = sorted(groups, key=lambda g: (g.key not in first, g.since, g.waiting[0].id))
        for position, group in enumerate(oldest_first):
            clients = {request.caller for request in group.waiting if not request.batch}
            lines = [(caller, False) for caller in clients] or {(request.caller, True) for request in group.waiting}
            turn, last = min((turns[line], self._served.get(line, -math.inf)) for line in lines)
            turns.update(lines)
            ranked.append((group.key not in first, turn, last, position, group))
        return [group for *_, group in sorted(ranked, key=lambda r: r[:4])]


def note_turn(served: dict[Line, float], line: Line, now: float) -> None:
    """Records that the line was served at `now`. Keeps the 1,024 lines served last."""
    served.pop(line, None)
    served[line] = now
    if len(served) > _MAX_LINES:
        del served[next(iter(served))]
