"""Decides where a model gets its runner. A plan asks it, and so does everybody who wants to know what a plan would do.
Pure.

The rule: of the best rank that can ever fit, the option that is free now, else the one that room already comes for,
else the one whose eviction costs least. So a model waits for a rank, never for a place.

- *Free*: of several first those with the fewest runners of the same model on their devices, or on the processors of
  their host: replicas compute apart. Then those whose host has the files; of these the one whose devices have the most
  free memory, or whose host has, for a run on processors. Models that need little then lie apart, and compute apart;
  docs/scheduling.md has what other orders are worth.
- *Costs least*: first those without a busy runner, then the least seconds of loading.
- *Can ever fit*: if everything were evicted that may be. A runner outlives the request that started it by far, and a
  smaller run would be slower for all of that time.
- *Several hosts*: an option over several of them has a place on each, and is one like any other: its room is theirs
  together (`JointAllocation`).
- *A fault in one place* (`Failure`) takes that place out until its pause is over. It never leads to a smaller run,
  except where memory ran out: then the place is tried with more room, and then with a smaller run.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from modelrunner.scheduler.allocation import Allocation, Allocations, Vector, covers, limit_of, raised
from modelrunner.scheduler.eviction import Eviction, Proposal
from modelrunner.scheduler.state import Failure, Failures, Group, Kind, Offer, RunnerId, RunOption, Site, Slot, kinds_of
from modelrunner.types import RunnerKey

Memory = Allocations
Most = Mapping[str, Vector]
"""What eviction could give on each host that answers."""


class Candidates(NamedTuple):
    """The options of the best rank that can ever fit."""

    kinds: Sequence[Kind] = ()
    """Those that may be tried now; none if all places are paused, or if nothing can ever fit."""
    pause: Failure | None = None
    """If all places of that rank are paused: the failure whose pause ends first."""

    @classmethod
    def only(cls, option: RunOption) -> "Candidates":
        return cls((((option.place.site, (option,)),),))

    def each(self) -> Iterator[RunOption]:
        return (option for kind in self.kinds for _, options in kind for option in options)


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
    """The options of the best rank that fits into `most`. Of hosts of one kind with as much, one is looked at."""
    kinds, faulty = kinds_of(options), {place.site for key, place in failures if key == runner.key}
    last = max([option.rank for kind in kinds for option in kind[0][1]], default=0)
    fitting: list[tuple[Sequence[Offer], Sequence[RunOption], list[int]]] = []
    for kind in kinds:
        alike: dict[object, list[Offer]] = {}
        for offer in kind:
            if not isinstance(site := offer[0], str):
                if most.keys() >= {*site}:
                    alike[site] = [offer]
            elif (there := most.get(site)) is not None:
                like = site if site in faulty else (id(there), memory[site].counted(runner))
                alike.setdefault(like, []).append(offer)
        for offers in alike.values():
            site, offered = offers[0]
            limit = limit_of(most, site)
            assert limit is not None
            if site in faulty:
                limits = [most[host] for host in ((site,) if isinstance(site, str) else site)]
                offered = after_faults(runner.key, offered, failures, limits, last)
                offers[:] = [(site, offered)]
            total = memory[site].total
            fits = [i for i, option in enumerate(offered) if covers(limit, total(runner, option.memory))]
            fitting.append((offers, offered, fits))
    best = min([offered[i].rank for _, offered, fits in fitting for i in fits], default=0)
    possible: list[Kind] = []
    pauses: list[Failure] = []
    for hosts, offered, fits in fitting:
        chosen = [i for i in fits if offered[i].rank == best]
        if hosts[0][0] in faulty:
            paused = {i: f for i in chosen if (f := failures.get((runner.key, offered[i].place))) and now < f.until}
            pauses += paused.values()
            chosen = [i for i in chosen if i not in paused]
        if chosen:
            all_of_them = len(chosen) == len(offered)
            possible.append(hosts if all_of_them else [(host, [theirs[i] for i in chosen]) for host, theirs in hosts])
    return Candidates(possible, None if possible else min(pauses, key=lambda f: f.until, default=None))


def after_faults(
    key: RunnerKey, options: Sequence[RunOption], failures: Failures, most: Sequence[Vector], last: int
) -> list[RunOption]:
    """The options of a site without those that ran out of memory in their place. The others of such a place count for
    more, if eviction could give it on each of its hosts. `last` is the highest rank of all hosts."""
    left = []
    for option in options:
        failure = failures.get((key, option.place))
        if failure is None or failure.floor is None:
            left.append(option)
        elif option.rank >= min(failure.floor, last):
            left.append(option._replace(memory=raised(option.memory, most)))
    return left


def free_now(runner: RunnerId, kinds: Sequence[Kind], memory: Memory) -> RunOption | None:
    """The option that is free, None if none is; the first of equal ones."""
    free: list[tuple[Allocation, RunOption]] = []
    for site, options in _unlike(runner, may_be_free(kinds, memory), memory):
        room = memory[site]
        free += [(room, option) for option in options if room.has(room.need(runner, option.memory))]

    def room_there(there: tuple[Allocation, RunOption]) -> tuple[int, bool, int, int]:
        room, option = there
        devices = option.place.devices
        most = sum([room.left[1 + device] for device in devices]) if devices else room.left[0]
        return -room.beside(runner.key, devices), not option.fetches, most, -option.number

    return max(free, key=room_there)[1] if free else None


def may_be_free(kinds: Sequence[Kind], memory: Memory) -> Sequence[Kind]:
    """The kinds without those of several hosts of which none is free, as is known without a look at each."""
    return [kind for kind in kinds if len(kind) == 1 or any(memory.may_be_free(o.memory) for o in kind[0][1])]


def _unlike(runner: RunnerId, kinds: Sequence[Kind], memory: Memory) -> Iterator[Offer]:
    """The first of all hosts that offer the same and have the same room for it."""
    for kind in kinds:
        seen = set()
        for offer in kind:
            if (like := memory[offer[0]].likeness(runner)) not in seen:
                seen.add(like)
                yield offer


def place(group: Group, kinds: Sequence[Kind], memory: Memory, eviction: Eviction) -> Placement:
    """The decision of the rule for these candidates, of which there is one at least."""
    if (free := free_now(group.runner, kinds, memory)) is not None:
        return Placement(free)

    def shortage(room: Allocation, option: RunOption) -> Vector:
        return room.shortage(room.need(group.runner, option.memory))

    coming: list[RunOption] = []
    for site, options in _unlike(group.runner, kinds, memory):
        room = memory[site]
        coming += [option for option in options if not any(shortage(room, option))]
    if coming:
        return Placement(min(coming, key=lambda option: option.number))  # room comes for it
    offered: dict[Site, list[RunOption]] = {}
    for kind in kinds:
        for site, options in kind:
            offered.setdefault(site, []).extend(options)
    best: tuple[tuple[float, ...], int, RunOption, Proposal] | None = None
    several = [site for kind in kinds if not isinstance(kind[0][0], str) for site, _ in kind]
    for least, site in eviction.cheapest_first(offered, several, group):
        if best is not None and least > best[0]:
            break
        options, may, room = offered[site], eviction.may_go(group, site), memory[site]
        for option in options if may.now else options[:1]:  # where none may go, all cost the same
            if best is not None and (least, option.number) >= best[:2]:
                continue
            proposal = eviction.propose(shortage(room, option), may)
            if best is None or (proposal.cost, option.number) < best[:2]:
                best = proposal.cost, option.number, option, proposal
    assert best is not None
    return Placement(best[2], best[3].victims, best[3].again)
