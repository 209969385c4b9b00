"""Decides which requests a runner serves next, which model gets memory next, and which batches get a runner of their
own. Pure."""

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from modelrunner.scheduler.state import Group, Line, Phase, Request, Slot
from modelrunner.types import RunnerKey

KEPT_FREE = 60.0
"""A runner keeps one of its places free of batches for this many seconds after its last client, so that the next client
waits for no line to end."""
_MAX_LINES = 1024


def has_clients(slot: Slot, now: float) -> bool:
    """True if the runner answers a client, or did lately."""
    return slot.interactive > 0 or now < slot.interactive_at + KEPT_FREE


def batch_places(slot: Slot, now: float) -> int:
    """The number of further requests of batches that may get a lease of the runner."""
    if slot.parallel < 2 or not has_clients(slot, now):
        return slot.free
    return max(0, min(slot.free, slot.parallel - 1 - (slot.leases - slot.interactive)))


def batches_part(group: Group, slot: Slot | None, now: float) -> bool:
    """True if the group's batches are to get a runner of their own, which can stand still while the clients' runner
    `slot` computes: they would fill that. It must be ready, run as it is configured (a smaller variant shows that
    memory is scarce), and have had a client lately."""
    if slot is None or slot.phase is not Phase.READY or slot.option.rank or not has_clients(slot, now):
        return False
    return sum([request.batch for request in group.waiting]) >= slot.parallel


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

    def in_turn(self, waiting: Sequence[Request], count: int, batches: float = math.inf) -> tuple[Request, ...]:
        """The `count` requests whose turn it is, which is counted: interactive ones before a batch, then in rounds with
        one of each caller. Within a round the caller served longest ago comes first, then the older request. The first
        request of an aged batch takes part in the rounds. No more than `batches` of them are from batches."""
        chosen = list(waiting)
        if not len(waiting) <= count <= batches:
            turns: Counter[Line] = Counter()
            ranked = []
            for position, request in enumerate(waiting):
                line = (request.caller, request.batch)
                turn = turns[line]
                if turn < count:
                    turns[line] = turn + 1
                    later = request.batch and (turn > 0 or self._now < self.yields_until(request))
                    ranked.append((later, turn, self._served.get(line, -math.inf), position))
            in_rounds = [waiting[position] for *_, position in sorted(ranked)]
            excess = {r.id for r in [r for r in in_rounds if r.batch][int(min(batches, count)) :]}
            chosen = [request for request in in_rounds if request.id not in excess][:count]
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
