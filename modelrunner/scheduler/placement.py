"""Decides where a model gets its runner. A plan asks it, and so does everybody who wants to know what a plan would do.
Pure.

The rule: of the best rank that can ever fit, the option that is free now, else the one that room already comes for,
else the one whose eviction costs least. So a model waits for a rank, never for a place.

- *Free*: of several first those whose host has the files; of these the one whose devices have the most free memory, or
  whose host has, for a run on processors. Models that need little then lie apart, and compute apart;
  docs/scheduling.md has what other orders are worth.
- *Costs least*: first those without a busy runner, then the least seconds of loading.
- *Can ever fit*: if everything were evicted that may be. A runner outlives the request that started it by far, and a
  smaller run would be slower for all of that time.
- *A fault in one place* (`Failure`) takes that place out until its pause is over. It never leads to a smaller run,
  except where memory ran out: then the place is tried with more room, and then with a smaller run.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from modelrunner.scheduler.allocation import Allocation, Vector, covers, raised
from modelrunner.scheduler.eviction import Eviction
from modelrunner.scheduler.state import Failure, Failures, Group, RunnerId, RunOption, Slot
from modelrunner.types import RunnerKey

Memory = Mapping[str, Allocation]
"""The allocation of each host."""
Most = Mapping[str, Vector]
"""What eviction could give on each host that answers."""


class Candidates(NamedTuple):
    """The options of the best rank that can ever fit."""

    options: tuple[RunOption, ...] = ()
    """Those that may be tried now; none if all places are paused, or if nothing can ever fit."""
    pause: Failure | None = None
    """If all places of that rank are paused: the failure whose pause ends first."""


class Placement(NamedTuple):
    """The decision for one group."""

    option: RunOption
    victims: tuple[Slot, ...] = ()
    """The runners that go for it."""
    again: float = float("inf")
    """The time at which some runner may go, if none may yet and some must."""


def candidates(
    runner: RunnerId, options: Sequence[RunOption], failures: Failures, memory: Memory, most: Most, now: float
) -> Candidates:
    """The options of the best rank that fits into `most`."""
    known = after_faults(runner.key, options, failures, most)
    fitting = [o for o in known if covers(most[o.place.host], memory[o.place.host].total(runner, o.memory))]
    best = min([option.rank for option in fitting], default=0)
    fitting = [option for option in fitting if option.rank == best]
    pauses = {o.place: f for o in fitting if (f := failures.get((runner.key, o.place))) is not None and now < f.until}
    ready = tuple([option for option in fitting if option.place not in pauses])
    return Candidates(ready, None if ready else min(pauses.values(), key=lambda f: f.until, default=None))


def after_faults(key: RunnerKey, options: Sequence[RunOption], failures: Failures, most: Most) -> list[RunOption]:
    """The options on hosts that answer, without those that ran out of memory in their place. The others of such a place
    count for more, if eviction could give it."""
    last, found = max([option.rank for option in options], default=0), []
    for option in options:
        failure = failures.get((key, option.place))
        if option.place.host not in most:
            continue
        if failure is None or failure.floor is None:
            found.append(option)
        elif option.rank >= min(failure.floor, last):
            found.append(option._replace(memory=raised(option.memory, most[option.place.host])))
    return found


def free_now(runner: RunnerId, options: Iterable[RunOption], memory: Memory) -> RunOption | None:
    """The option that is free, None if none is."""
    free = [o for o in options if (room := memory[o.place.host]).has(room.need(runner, o.memory))]

    def room_there(option: RunOption) -> tuple[bool, int]:
        left, devices = memory[option.place.host].left, option.place.devices
        return not option.fetches, sum([left[1 + device] for device in devices]) if devices else left[0]

    return max(free, key=room_there) if free else None


def place(group: Group, options: Sequence[RunOption], memory: Memory, eviction: Eviction) -> Placement:
    """The decision of the rule for these candidates, of which there is one at least."""
    if (free := free_now(group.runner, options, memory)) is not None:
        return Placement(free)
    ways = []
    for option in options:
        room = memory[option.place.host]
        shortage = room.shortage(room.need(group.runner, option.memory))
        if not any(shortage):
            return Placement(option)  # room comes for it
        ways.append((option, eviction.propose(shortage, group, option.place.host)))
    option, proposal = min(ways, key=lambda way: way[1].cost)
    return Placement(option, proposal.victims, proposal.again)
