"""Hosts that are alike for a question are looked at once, and those that cannot be the cheapest are not priced. What is
chosen must be what the rule of `placement` says when each option is looked at by itself."""

import math
from collections.abc import Collection, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from modelrunner.errors import EngineFailed, OutOfMemory
from modelrunner.scheduler import placement
from modelrunner.scheduler.allocation import Allocations, allocations, covers, raised
from modelrunner.scheduler.eviction import Eviction
from modelrunner.scheduler.state import (
    Failure,
    Failures,
    Group,
    Options,
    Phase,
    Policy,
    Request,
    RunnerId,
    RunOption,
    RunPlace,
    Slot,
)
from modelrunner.types import RequiredMemory
from tests.scheduler.states import NOW, key

HOSTS = ["", "b", "c", "d", "e"]
Memory = Allocations
Most = dict[str, tuple[int, ...]]


@st.composite
def memories(draw: st.DrawFn) -> RequiredMemory:
    """Of few values, so that many are equal."""
    ram = draw(st.sampled_from([2, 3, 4]))
    devices = draw(st.sampled_from([(), (2,), (0, 2), (3, 3), (0, 4)]))
    return RequiredMemory(ram, devices, draw(st.sampled_from([0, 2])))


@st.composite
def slots(draw: st.DrawFn) -> Slot:
    memory = draw(memories())
    phase = draw(st.sampled_from([Phase.READY, Phase.READY, Phase.SLEEPING, Phase.STARTING, Phase.STOPPING]))
    leases = draw(st.sampled_from([0, 0, 1])) if phase is Phase.READY else 0
    return Slot(
        key(draw(st.sampled_from(["m", "m", "n", "o"]))),
        phase,
        memory,
        leases,
        NOW - draw(st.sampled_from([0.5, 5.0, 50.0])),
        pinned=draw(st.sampled_from([False, False, False, True])),
        load_seconds=draw(st.sampled_from([0.0, 1.0, 3.0])),
        ready_at=NOW - draw(st.sampled_from([1.0, 100.0])),
        option=RunOption(memory, place=RunPlace(memory.devices, draw(st.sampled_from(HOSTS)))),
        interactive=draw(st.integers(0, leases)),
        number=draw(st.integers(0, 1000)),
    )


@st.composite
def offers(draw: st.DrawFn) -> Options:
    """Most hosts offer the same."""
    kinds = draw(
        st.lists(st.lists(st.tuples(memories(), st.integers(0, 1)), min_size=1, max_size=3), max_size=2, min_size=1)
    )
    found: list[RunOption] = []
    for host in HOSTS:
        fetches = draw(st.sampled_from([False, False, True]))
        for memory, rank in draw(st.sampled_from(kinds)):
            found.append(RunOption(memory, rank, RunPlace(memory.devices, host), len(found), fetches))
    return Options(sorted(found, key=lambda option: option.rank))


failing = st.builds(
    Failure,
    st.just(1),
    st.sampled_from([NOW - 1.0, NOW + 1.0, NOW + 2.0]),
    st.sampled_from([EngineFailed("died"), OutOfMemory(-9)]),
    floor=st.sampled_from([None, 0, 1]),
)


def one_by_one(
    runner: RunnerId, options: Sequence[RunOption], failures: Failures, memory: Memory, most: Most
) -> tuple[list[RunOption], Failure | None]:
    """The options of the best rank that can ever fit, without a pause; else the pause that ends first."""
    last, known = max(option.rank for option in options), []
    for option in options:
        failure = failures.get((runner.key, option.place))
        if option.place.host in most and (failure is None or failure.floor is None):
            known.append(option)
        elif option.place.host in most and failure is not None and option.rank >= min(failure.floor or 0, last):
            known.append(option._replace(memory=raised(option.memory, [most[option.place.host]])))
    fitting = [o for o in known if covers(most[o.place.host], memory[o.place.host].total(runner, o.memory))]
    fitting = [o for o in fitting if o.rank == min(option.rank for option in fitting)]
    paused = [f for o in fitting if (f := failures.get((runner.key, o.place))) and f.until > NOW]
    ready = [o for o in fitting if not ((f := failures.get((runner.key, o.place))) and f.until > NOW)]
    return ready, None if ready or not paused else min(paused, key=lambda failure: failure.until)


def best_of(group: Group, options: Sequence[RunOption], memory: Memory, eviction: Eviction) -> placement.Placement:
    rooms = [(option, room := memory[option.place.host], room.need(group.runner, option.memory)) for option in options]
    free = []
    for option, room, need in rooms:
        if room.has(need):
            there = (
                sum(room.left[1 + device] for device in option.place.devices) if option.place.devices else room.left[0]
            )
            free.append((-beside(group, option, eviction.slots), not option.fetches, there, option))
    if free:
        return placement.Placement(max(free, key=lambda each: each[:3])[3])
    coming = [option for option, room, need in rooms if not any(room.shortage(need))]
    if coming:
        return placement.Placement(coming[0])
    ways = [(o, eviction.propose(room.shortage(need), eviction.may_go(group, o.place.host))) for o, room, need in rooms]
    option, proposal = min(ways, key=lambda way: way[1].cost)
    return placement.Placement(option, proposal.victims, proposal.again)


def beside(group: Group, option: RunOption, present: Collection[Slot]) -> int:
    """How many runners of the model stay where the option computes."""
    mine = [s.option.place for s in present if s.key == group.key and s.phase is not Phase.STOPPING]
    there = [set(place.devices) for place in mine if place.host == option.place.host]
    devices = set(option.place.devices)
    return sum(bool(devices & other) if devices else not other for other in there)


@settings(max_examples=300)
@given(
    st.lists(
        st.sampled_from([RequiredMemory(5, (4, 4)), RequiredMemory(12, (4, 8)), RequiredMemory(4)]),
        min_size=1,
        max_size=5,
    ),
    st.lists(slots(), min_size=2, max_size=9, unique_by=lambda slot: slot.id),
    st.lists(offers(), min_size=1, max_size=4),
    st.dictionaries(st.tuples(st.sampled_from(HOSTS), st.sampled_from([(), (0,), (1,), (0, 1)])), failing, max_size=3),
    st.sampled_from([0.0, 10.0]),
)
def test_each_choice_is_that_of_the_rule(
    budgets: list[RequiredMemory],
    present: list[Slot],
    offered: list[Options],
    failed: dict[tuple[str, tuple[int, ...]], Failure],
    waited: float,
) -> None:
    """Several models one after the other, each beside what those before it got."""
    hosts = dict(zip(HOSTS, budgets, strict=False))
    memory = allocations(hosts, present, [option.memory for options in offered for option in options])
    most = {host: memory[host].budget for host in hosts}
    eviction = Eviction(present, {key("n")}, {key("m"), key("w1")}, memory, Policy(), NOW)
    for number, options in enumerate(offered):
        asked = key(f"w{number}" if number else "m")  # the files of m are mapped by runners
        group = Group(asked, (Request(number, NOW - waited),), options, number=2000)
        failures = {(asked, RunPlace(devices, host)): failure for (host, devices), failure in failed.items()}
        expected, pause = one_by_one(group.runner, options, failures, memory, most)
        found = placement.candidates(group.runner, options, failures, memory, most, NOW)
        assert sorted(found.each(), key=lambda o: o.number) == sorted(expected, key=lambda o: o.number)
        assert bool(found.kinds) == bool(expected)
        assert (found.pause and found.pause.until) == (pause and pause.until)
        if not expected:
            continue
        chosen = placement.place(group, found.kinds, memory, eviction)
        assert chosen == best_of(group, expected, memory, eviction)
        assert chosen.victims or chosen.again == math.inf or chosen.again > NOW
        eviction.take(chosen.victims)
        room = memory[chosen.option.place.host]
        for victim in chosen.victims:
            room.release(victim)
        need = room.need(group.runner, chosen.option.memory)
        if not room.start(group.runner, chosen.option.memory):
            room.reserve(need)
