"""Whose turn it is, how long a runner is spared, and what is paused: decisions as values."""

from dataclasses import replace

import pytest

from modelrunner.scheduler.order import capacity, in_line, in_turn, note_turn
from modelrunner.scheduler.state import (
    Admit,
    Drain,
    Grant,
    Group,
    Phase,
    Policy,
    Reason,
    Refuse,
    Request,
    Start,
    Stop,
    WakeAt,
)
from modelrunner.types import RequiredMemory
from tests.scheduler.states import NOW, decide, everything, group, key, slot

POLICY = Policy(max_wait=100.0, patience=5.0, residency=3.0, linger=3.0, ageing=20.0)


def turns(*waiting: Request, count: int = 1, served: dict[tuple[str, bool], float] | None = None) -> list[int]:
    return [r.id for r in in_turn(waiting, count, served or {}, ageing=20.0, now=NOW)]


def line(*groups: Group, served: dict[tuple[str, bool], float] | None = None) -> list[str]:
    return [g.name for g in in_line(groups, served or {}, ageing=20.0, now=NOW)]


# Among those who wait for one runner


@pytest.mark.parametrize(("parallel", "leases"), [(1, 2), (4, 5), (8, 10), (256, 320)])
def test_an_engine_gets_a_quarter_more_than_it_works_on(parallel: int, leases: int) -> None:
    assert capacity(parallel) == leases


def test_a_runner_gives_out_no_more_leases_than_it_has_left() -> None:
    waiting = group("a", 4, NOW, NOW, NOW)
    assert decide(waiting, slot("a", 4, leases=3, capacity=5)) == [Grant(key("a"), (1, 2))]
    assert decide(group("a", 4), slot("a", 4, leases=5, capacity=5)) == []
    assert decide(group("a", 4), slot("a", 4, leases=7, capacity=5)) == []


def test_who_waits_for_a_turn_too_long_is_told_so() -> None:
    [refused] = decide(group("a", 4, NOW - 100), slot("a", 4, leases=5, capacity=5))
    assert isinstance(refused, Refuse)
    assert "its turn" in str(refused.error)


def test_callers_take_turns_whoever_came_first() -> None:
    many = [Request(i, NOW - 10, "many") for i in range(1, 9)]
    one, two = Request(9, NOW - 1, "one"), Request(10, NOW, "two")
    assert turns(*many, one, two, count=5) == [1, 9, 10, 2, 3]
    assert turns(*many, one, two, count=2, served={("many", False): 7.0, ("one", False): 6.0}) == [10, 9]


def test_who_says_nothing_is_one_caller_and_served_by_age() -> None:
    assert turns(Request(1, NOW - 3), Request(2, NOW - 2), Request(3, NOW - 1), count=2) == [1, 2]


def test_a_batch_lets_interactive_requests_go_first_until_it_is_old() -> None:
    young, old = Request(1, NOW - 19, batch=True), Request(1, NOW - 20, batch=True)
    now = [Request(2, NOW), Request(3, NOW)]
    assert turns(young, *now, count=2) == [2, 3]
    assert turns(old, *now, count=2) == [1, 2]
    assert turns(old, *now, served={("", True): 2.0, ("", False): 1.0}) == [2], "then they take turns"


# Among those who wait for room


def test_the_oldest_is_first_in_line_where_all_are_alike() -> None:
    assert line(group("b", 1, NOW - 1), group("a", 1, NOW - 2)) == ["a", "b"]


def test_a_caller_of_many_models_does_not_keep_another_from_its_one() -> None:
    greedy = [group(name, 1, NOW - 10, caller="greedy") for name in ("m1", "m2", "m3")]
    assert line(*greedy, group("x", 1, NOW - 1, caller="modest")) == ["m1", "x", "m2", "m3"]
    served = {("greedy", False): 5.0}
    assert line(*greedy, group("x", 1, NOW - 1, caller="modest"), served=served) == ["x", "m1", "m2", "m3"]


def test_a_model_that_two_callers_wait_for_has_the_better_turn_of_both() -> None:
    greedy = [group(name, 1, NOW - 10, caller="greedy") for name in ("m1", "m2", "m3")]
    shared = Group(key("m3"), (*greedy[2].waiting, Request(9, NOW, "modest")), greedy[2].needs, "m3")
    assert line(*greedy[:2], shared) == ["m1", "m3", "m2"]


def test_batches_come_last_and_what_is_old_first_whoever_asks() -> None:
    batch, chat = group("batch", 1, NOW - 19, batch=True), group("chat", 1, NOW)
    assert line(batch, chat) == ["chat", "batch"]
    old = group("batch", 1, NOW - 20, batch=True)
    assert line(chat, old) == ["batch", "chat"]
    mixed = Group(key("mixed"), (Request(1, NOW - 19, batch=True), Request(2, NOW)), (), "mixed")
    assert line(group("batch", 1, NOW - 19.5, batch=True), mixed) == ["mixed", "batch"]


def test_somebody_looks_again_when_a_batch_is_old_enough_to_come_first() -> None:
    batch, chat = group("batch", 6, NOW - 19, batch=True), group("chat", 6, NOW - 1, first=2)
    leaving = slot("a", 10, Phase.STOPPING)
    assert WakeAt(NOW + 1) in everything(batch, chat, leaving, policy=POLICY)


def test_the_room_goes_by_that_order() -> None:
    batch, chat = group("batch", 6, NOW - 2, batch=True), group("chat", 6, NOW - 1, first=2)
    assert decide(batch, chat) == [Start(key("chat"), RequiredMemory(6))]


# Residency


def test_a_busy_runner_stays_for_a_while_after_its_load() -> None:
    waiting = group("x", 6, NOW - 30)
    runner = slot("a", 6, leases=1, load=4.0, ready=11.0)
    assert everything(waiting, runner, policy=POLICY) == [WakeAt(NOW + 1)], "three times its load"
    assert decide(waiting, slot("a", 6, leases=1, load=4.0, ready=12.0), policy=POLICY) == [
        Drain(key("a"), Reason.ROOM)
    ]
    short = slot("a", 6, leases=1, load=1.0, ready=4.0)
    assert everything(waiting, short, policy=POLICY) == [WakeAt(NOW + 1)], "at least the patience of others"


def test_it_stays_for_a_quarter_of_the_maximum_wait_at_most() -> None:
    waiting = group("x", 6, NOW - 30)
    assert decide(waiting, slot("a", 6, leases=1, load=60.0, ready=24.0), policy=POLICY) == []
    assert decide(waiting, slot("a", 6, leases=1, load=60.0, ready=25.0), policy=POLICY) == [
        Drain(key("a"), Reason.ROOM)
    ]


@pytest.mark.parametrize(
    ("queued", "seconds", "max_wait"),
    [
        (0, 5.0, 1000),
        (1, 7.5, 1000),
        (4, 15.0, 1000),
        (10, 30.0, 1000),
        (11, 30.0, 1000),
        (40, 25.0, 100),
        (0, 4.0, 16),
    ],
)
def test_the_more_queue_for_busy_runners_the_longer_they_are_served_first(
    queued: int, seconds: float, max_wait: float
) -> None:
    """Half of the patience more for each who queues for the sixteen that are served, at most six times the patience and
    a quarter of the maximum wait."""
    busy, policy = slot("a", 6, leases=16, capacity=16), replace(POLICY, max_wait=max_wait)
    younger = [group("a", 6, *[NOW - 1] * queued, first=2)] if queued else []
    assert decide(group("x", 6, NOW - seconds + 0.1), *younger, busy, policy=policy) == []
    assert decide(group("x", 6, NOW - seconds), *younger, busy, policy=policy) == [Drain(key("a"), Reason.ROOM)]


def test_no_room_is_made_of_a_runner_that_somebody_before_in_line_waits_for() -> None:
    runner = slot("a", 6, leases=2, capacity=2)
    older, younger = group("a", 6, NOW - 27, first=2), group("a", 6, NOW - 25, first=2)
    assert decide(group("x", 6, NOW - 26), older, runner) == []
    assert decide(group("x", 6, NOW - 26), younger, runner) == [Drain(key("a"), Reason.ROOM)]


def test_a_drain_is_taken_back_for_who_came_before_and_not_begun_again_for_who_came_after() -> None:
    draining = slot("a", 6, Phase.DRAINING, leases=2, capacity=2, drain=Reason.ROOM)
    assert decide(group("x", 6, NOW - 8), group("a", 6, NOW - 9, first=2), draining) == [Admit(key("a"))]


def test_a_drain_that_is_taken_back_late_in_a_plan_serves_its_queue_at_once() -> None:
    draining = slot("p", 4, Phase.DRAINING, leases=1, drain=Reason.ROOM)
    older, its_own = group("x", 5, NOW - 9), group("p", 4, NOW - 8, first=2)
    assert decide(older, its_own, draining, slot("m", 9), budget=14) == [
        Stop(key("m"), Reason.ROOM),
        Admit(key("p")),
        Grant(key("p"), (2,)),
    ]


def test_while_others_are_served_an_idle_runner_stays_that_may_be_used_again() -> None:
    """For three times its load after its last use, at most for the patience."""
    waiting, busy = group("x", 6, NOW - 1), slot("b", 4, leases=1)
    used = slot("a", 6, idle=2.0, load=1.0)
    assert everything(waiting, used, busy, policy=POLICY) == [WakeAt(NOW + 1)]
    assert decide(waiting, slot("a", 6, idle=3.0, load=1.0), busy, policy=POLICY) == [Stop(key("a"), Reason.ROOM)]
    slow = slot("a", 6, idle=4.9, load=40.0)
    assert decide(waiting, slow, busy, policy=POLICY) == []
    assert decide(waiting, slow._replace(last_used=NOW - 5), busy, policy=POLICY) == [Stop(key("a"), Reason.ROOM)]
    assert decide(waiting, used, policy=POLICY) == [Stop(key("a"), Reason.ROOM)], "where nobody else is served, at once"
    leaving = slot("b", 4, Phase.DRAINING, leases=1, drain=Reason.UNLOAD)
    assert decide(waiting, used, leaving, policy=POLICY) == [Stop(key("a"), Reason.ROOM)]
    patient = group("x", 6, NOW - 5)
    assert decide(patient, used._replace(last_used=NOW), busy, policy=POLICY) == [Stop(key("a"), Reason.ROOM)]


def test_an_idle_runner_stays_while_more_queue_than_wait_for_its_room() -> None:
    """At most for the patience."""
    waiting, busy = group("x", 6, NOW - 1), slot("b", 4, leases=2, capacity=2)
    one, two = group("b", 4, NOW, first=2), group("b", 4, NOW, NOW, first=2)
    used = slot("a", 6, idle=4.5, load=1.0)
    assert decide(waiting, used, busy, one, policy=POLICY) == [Stop(key("a"), Reason.ROOM)]
    assert everything(waiting, used, busy, two, policy=POLICY)[-1] == WakeAt(NOW + 0.5)
    assert decide(waiting, slot("a", 6, idle=5.0, load=1.0), busy, two, policy=POLICY) == [Stop(key("a"), Reason.ROOM)]


def test_the_more_wait_for_its_room_the_sooner_an_idle_runner_goes() -> None:
    """When together they have waited for three times its load."""
    three, busy = group("x", 6, NOW - 1, NOW - 1, NOW), slot("b", 4, leases=1)
    used = slot("a", 6, idle=0.5, load=1.0)
    assert everything(three, used, busy, policy=POLICY) == [WakeAt(NOW + 0.5)]
    assert decide(three, slot("a", 6, idle=1.0, load=1.0), busy, policy=POLICY) == [Stop(key("a"), Reason.ROOM)]


def test_of_busy_runners_one_goes_that_nobody_waits_for() -> None:
    """It may be dearer to load: the other one would have to be loaded again at once."""
    queue = group("queued", 5, NOW - 1, first=2)
    queued, dear = slot("queued", 5, leases=1, capacity=1, load=0.1), slot("dear", 5, leases=1, load=20.0)
    assert decide(group("x", 5, NOW - 30), queue, queued, dear) == [Drain(key("dear"), Reason.ROOM)]


def test_nobody_is_spared_for_a_request_that_has_waited_for_half_of_the_maximum() -> None:
    runner = slot("a", 6, leases=1, load=60.0, ready=1.0)
    assert everything(group("x", 6, NOW - 49), runner, policy=POLICY) == [WakeAt(NOW + 1)]
    assert decide(group("x", 6, NOW - 50), runner, policy=POLICY) == [Drain(key("a"), Reason.ROOM)]


def test_another_runner_goes_while_one_is_spared() -> None:
    fresh, settled = slot("fresh", 6, idle=0.1, load=4.0, ready=1.0), slot("settled", 4, idle=0.2, load=4.0)
    assert decide(group("x", 4, NOW - 1), fresh, settled, policy=POLICY) == [Stop(key("settled"), Reason.ROOM)]


# Pause


def test_a_paused_model_goes_when_it_is_unused_and_takes_nothing_new() -> None:
    paused = frozenset({"a"})
    assert decide(group("a", 4), slot("a", 4, pinned=True), paused=paused) == [Stop(key("a"), Reason.PAUSED)]
    assert decide(group("a", 4), slot("a", 4, leases=1), paused=paused) == [Drain(key("a"), Reason.PAUSED)]
    assert decide(group("a", 4), slot("a", 4, Phase.STARTING), paused=paused) == [Stop(key("a"), Reason.PAUSED)]


def test_requests_for_a_paused_model_wait_without_holding_up_others() -> None:
    waiting, other = group("a", 10, NOW - 10), group("b", 10, NOW, first=2)
    assert decide(waiting, other, paused=frozenset({"a"})) == [Start(key("b"), RequiredMemory(10))]
    [refused] = decide(group("a", 4, NOW - 100), paused=frozenset({"a"}))
    assert isinstance(refused, Refuse)
    assert "it is paused" in str(refused.error)


def test_resumed_before_its_last_request_has_ended_it_goes_on() -> None:
    draining = slot("a", 4, Phase.DRAINING, leases=1, drain=Reason.PAUSED)
    assert decide(draining, paused=frozenset({"a"})) == []
    assert decide(group("a", 4), draining) == [Admit(key("a")), Grant(key("a"), (1,))]


def test_a_paused_model_that_is_drained_for_room_is_not_taken_back() -> None:
    draining = slot("a", 4, Phase.DRAINING, leases=1, drain=Reason.ROOM)
    assert decide(draining, paused=frozenset({"a"})) == []


def test_turns_are_remembered_of_so_many_callers_and_the_oldest_forgotten() -> None:
    served: dict[tuple[str, bool], float] = {}
    for turn in range(3000):
        note_turn(served, (f"caller {turn}", False), turn)
        note_turn(served, ("regular", False), turn + 0.5)
    assert served[("regular", False)] == 2999.5
    assert len(served) == 1024
    assert ("caller 2999", False) in served
