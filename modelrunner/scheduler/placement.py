"""Decides where a model gets its runner. A plan asks it, and so does everybody who wants to know what a plan would do.
Pure.

The rule: of the best rank that can ever fit, the option that is free now, else the one that room already comes for,
else the one whose eviction costs least. So a model waits for a rank, never for a place.

- *Free*: of several the one whose devices have the most free memory. Models that need little then lie apart, and
  compute apart; docs/scheduling.md has what other orders are worth.
- *Costs least*: first those without a busy runner, then the least seconds of loading.
- *Can ever fit*: if everything were evicted that may be. A runner outlives the request that started it by far, and a
  smaller run would be slower for all of that time.
- *A fault in one place* (`Failure`) takes that place out until its pause is over. It never leads to a smaller run,
  except where memory ran out: then the place is tried with more room, and then with a smaller run.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from modelrunner.scheduler.allocation import Allocation, Vector, covers, raised
from modelrunner.scheduler.eviction import Eviction
from modelrunner.scheduler.state import Failure, Group, RunOption, RunPlace, Slot
from modelrunner.types import RunnerKey

Failures = Mapping[tuple[RunnerKey, RunPlace], Failure]


class Candidates(NamedTuple):
    """The options of the best rank that can ever fit."""

    options: tuple[RunOption, ...] = ()
    """Those that may be tried now; none if all places are paused, or if nothing can ever fit."""
    pause: Failure | None = None
    """If all places of that rank are paused: the failure whose pause ends first."""


class Placement(NamedTuple):
    """The decision for one group."""

    option: RunOption
    need: Vector
    """The memory that it takes and that does not count yet."""
    victims: tuple[Slot, ...] = ()
    """The runners that go for it."""
    again: float = float("inf")
    """The time at which some runner may go, if none may yet and some must."""


def candidates(
    key: RunnerKey, options: Sequence[RunOption], failures: Failures, memory: Allocation, most: Vector, now: float
) -> Candidates:
    """The options of the best rank that fits into `most`."""
    known = after_faults(key, options, failures, most) if failures else options
    fitting = [option for option in known if covers(most, memory.total(key, option.memory))]
    if len(fitting) > 1:
        best = min([option.rank for option in fitting])
        fitting = [option for option in fitting if option.rank == best]
    if not failures:
        return Candidates(tuple(fitting))
    pauses = {o.place: f for o in fitting if (f := failures.get((key, o.place))) is not None and now < f.until}
    ready = tuple([option for option in fitting if option.place not in pauses])
    return Candidates(ready, None if ready else min(pauses.values(), key=lambda f: f.until, default=None))


def after_faults(key: RunnerKey, options: Sequence[RunOption], failures: Failures, most: Vector) -> list[RunOption]:
    """The options without those that ran out of memory in their place. The others of such a place count for more, if
    eviction could give it."""
    last, found = max([option.rank for option in options], default=0), []
    for option in options:
        failure = failures.get((key, option.place))
        if failure is None or failure.floor is None:
            found.append(option)
        elif option.rank >= min(failure.floor, last):
            found.append(option._replace(memory=raised(option.memory, most)))
    return found


def place(group: Group, options: Sequence[RunOption], memory: Allocation, eviction: Eviction) -> Placement:
    """The decision of the rule for these candidates, of which there is one at least."""
    needs = [(option, memory.need(group.key, option.memory)) for option in options]
    if free := [way for way in needs if memory.has(way[1])]:
        option, need = free[0] if len(free) == 1 else max(free, key=lambda way: _left(way[0], memory))
        return Placement(option, need)
    ways = []
    for option, need in needs:
        shortage = memory.shortage(need)
        if not any(shortage):
            return Placement(option, need)  # room comes for it
        ways.append((option, need, eviction.propose(shortage, group)))
    option, need, proposal = ways[0] if len(ways) == 1 else min(ways, key=lambda way: way[2].cost)
    return Placement(option, need, proposal.victims, proposal.again)


def _left(option: RunOption, memory: Allocation) -> int:
    """Bytes that are left on the option's devices."""
    return sum([memory.left[1 + device] for device in option.place.devices])
