"""Whose turn it is, how long a runner is spared, and what is paused: decisions as values."""

from dataclasses import replace

import pytest

from modelrunner.scheduler.fairness import Turns, note_turn
from modelrunner.scheduler.state import (
    Grant,
    Group,
    Phase,
    Policy,
    Reason,
    Refuse,
    Request,
    Stop,
    WakeAt,
)
from tests.scheduler.states import NOW, decide, everything, group, key, runner, slot, start

POLICY = Policy(max_wait=100.0, patience=6.0, loads=8.0, spare=1.0, ageing=20.0)


def turns(*waiting: Request, count: int = 1, served: dict[tuple[str, bool], float] | None = None) -> list[int]:
    return [r.id for r in Turns(served or {}, 20.0, NOW).in_turn(waiting, count)]


def line(*groups: Group, served: dict[tuple[str, bool], float] | None = None) -> list[str]:
    order = Turns(served or {}, 20.0, NOW)
    return [g.name for g in order.in_line(groups, order.urgent(groups))]


# Among those who wait for one runner


def test_a_runner_gives_out_no_more_leases_than_it_has_left() -> None:
    waiting = group("a", 4, NOW, NOW, NOW)
    assert decide(waiting, slot("a", 4, leases=3, parallel=5)) == [Grant(runner("a"), (1, 2))]
    assert decide(group("a", 4), slot("a", 4, leases=5, parallel=5)) == []
    assert decide(group("a", 4), slot("a", 4, leases=4, parallel=5)._replace(abandoned=1)) == []


def test_who_waits_for_a_turn_too_long_is_told_so() -> None:
    [refused] = decide(group("a", 4, NOW - 100), slot("a", 4, leases=5, parallel=5))
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
    assert turns(old, *now, served={("", True): NOW - 19.0, ("", False): 1.0}) == [2], "it ages from its last turn on"


def test_an_aged_batch_has_one_turn_however_many_its_requests_are() -> None:
    flood = [Request(i, NOW - 30, batch=True) for i in range(1, 9)]
    assert turns(*flood, Request(9, NOW), Request(10, NOW), count=3) == [1, 9, 10]


# Among those who wait for room


def test_the_oldest_is_first_in_line_where_all_are_alike() -> None:
    assert line(group("b", 1, NOW - 1), group("a", 1, NOW - 2)) == ["a", "b"]


def test_a_caller_of_many_models_does_not_keep_another_from_its_one() -> None:
    greedy = [group(name, 1, NOW - 10, caller="greedy") for name in ("m1", "m2", "m3")]
    assert line(*greedy, group("x", 1, NOW - 1, caller="modest")) == ["m1", "x", "m2", "m3"]
    served = {("greedy", False): 5.0}
    assert line(*greedy, group("x", 1, NOW - 1, caller="modest"), served=served) == ["x", "m1", "m2", "m3"]


def test_a_load_counts_as_a_turn_of_its_caller() -> None:
    """Two plans in a row form one line."""
    first, second = (group(name, 4, NOW - 10, caller="greedy", first=id) for id, name in ((1, "m1"), (2, "m2")))
    modest = group("x", 5, NOW - 1, caller="modest", first=3)
    busy = slot("b", 2, leases=1)
    starts = [start("m1", 4)]
    assert decide(first, second, modest, busy) == starts
    assert decide(first, second, modest, busy, slot("m1", 4, Phase.STARTING)) == []


def test_a_model_that_two_callers_wait_for_has_the_better_turn_of_both() -> None:
    greedy = [group(name, 1, NOW - 10, caller="greedy") for name in ("m1", "m2", "m3")]
    shared = Group(key("m3"), (*greedy[2].waiting, Request(9, NOW, "modest")), greedy[2].options, "m3")
    assert line(*greedy[:2], shared) == ["m1", "m3", "m2"]


def test_the_model_that_got_no_lease_for_longest_comes_first() -> None:
    """However old the requests are that still wait for another one: models take turns."""
    flood = replace(group("flood", 1, NOW - 50), turn=NOW - 1)
    assert line(flood, group("lone", 1, NOW - 2)) == ["lone", "flood"]
    assert line(flood, group("lone", 1, NOW)) == ["flood", "lone"]


def test_batches_come_last_until_they_are_old() -> None:
    batch, chat = group("batch", 1, NOW - 19, batch=True), group("chat", 1, NOW)
    assert line(batch, chat) == ["chat", "batch"]
    old = group("batch", 1, NOW - 20, batch=True)
    assert line(chat, old) == ["batch", "chat"]
    assert line(chat, old, served={("", True): NOW - 19, ("", False): NOW}) == ["chat", "batch"]
    mixed = Group(key("mixed"), (Request(1, NOW - 19, batch=True), Request(2, NOW)), (), "mixed")
    assert line(group("batch", 1, NOW - 19.5, batch=True), mixed) == ["mixed", "batch"]


def test_the_plan_is_made_again_when_a_batch_is_old_enough() -> None:
    batch, chat = group("batch", 6, NOW - 19, batch=True), group("chat", 6, NOW - 1, first=2)
    leaving = slot("a", 10, Phase.STOPPING)
    assert WakeAt(NOW + 1) in everything(batch, chat, leaving, policy=POLICY)


def test_the_room_goes_by_that_order() -> None:
    batch, chat = group("batch", 6, NOW - 2, batch=True), group("chat", 6, NOW - 1, first=2)
    assert decide(batch, chat) == [start("chat", 6)]


# How long a runner is spared


@pytest.mark.parametrize(
    ("load", "own", "seconds"), [(0.1, 0.1, 1.6), (0.2, 0.3, 4.0), (1.0, 1.0, 6.0), (60.0, 60.0, 6.0)]
)
def test_a_busy_runner_is_drained_after_a_wait_in_proportion_to_the_switch(
    load: float, own: float, seconds: float
) -> None:
    """Eight times both loads, at most six seconds."""
    busy = slot("a", 6, leases=1, load=own)
    early, late = group("x", 6, NOW - seconds + 0.01, load=load), group("x", 6, NOW - seconds, load=load)
    assert decide(early, busy, policy=POLICY) == []
    [again] = everything(early, busy, policy=POLICY)
    assert isinstance(again, WakeAt)
    assert again.time == pytest.approx(NOW + 0.01)
    assert decide(late, busy, policy=POLICY) == [Stop(runner("a"), Reason.ROOM)]


def test_a_queue_does_not_protect_its_runner() -> None:
    """Also where its requests are older."""
    busy = slot("a", 6, leases=2, parallel=2, load=0.1)
    flood = group("a", 6, *[NOW - 50] * 40, first=2)
    assert decide(group("x", 6, NOW - 2, load=0.1), flood, busy, policy=POLICY) == [Stop(runner("a"), Reason.ROOM)]


def test_a_busy_runner_serves_for_as_long_as_both_loads_take() -> None:
    waiting = group("x", 6, NOW - 30, load=10.0)
    fresh = slot("a", 6, leases=1, load=40.0, ready=49.0)
    assert everything(waiting, fresh, policy=POLICY)[-1] == WakeAt(NOW + 1)
    served = slot("a", 6, leases=1, load=40.0, ready=50.0)
    assert decide(waiting, served, policy=POLICY) == [Stop(runner("a"), Reason.ROOM)]


def test_a_wait_for_memory_begins_anew_with_each_turn_of_the_model() -> None:
    busy = slot("x", 6, leases=1, load=1.0)
    before = replace(group("a", 6, NOW - 50, load=1.0), turn=NOW - 2)
    assert decide(before, busy, policy=POLICY) == []
    assert decide(replace(before, turn=NOW - 6), busy, policy=POLICY) == [Stop(runner("x"), Reason.ROOM)]


def test_an_idle_runner_stays_for_as_long_as_its_load_took() -> None:
    """For a request that came before its last answer ended; at most until that has waited as for a busy one."""
    waiting = group("x", 6, NOW - 2, load=1.0)
    used = slot("a", 6, idle=0.5, load=1.0)
    assert everything(waiting, used, policy=POLICY)[-1] == WakeAt(NOW + 0.5)
    assert decide(waiting, slot("a", 6, idle=1.0, load=1.0), policy=POLICY) == [Stop(runner("a"), Reason.ROOM)]
    slow = slot("a", 6, idle=1.0, load=40.0)
    assert everything(waiting, slow, policy=POLICY)[-1] == WakeAt(NOW + 4)
    assert decide(group("x", 6, NOW - 6, load=1.0), slow, policy=POLICY) == [Stop(runner("a"), Reason.ROOM)]


@pytest.mark.parametrize("idle", [1.0, 1.5])
def test_an_idle_runner_goes_at_once_for_a_request_that_came_later(idle: float) -> None:
    """Nobody has shown that two want the room in turn: a client may have changed its model."""
    late = group("x", 6, NOW - 1, load=1.0)
    assert decide(late, slot("a", 6, idle=idle, load=40.0), policy=POLICY) == [Stop(runner("a"), Reason.ROOM)]


def test_an_idle_runner_that_others_wait_for_keeps_its_rest() -> None:
    """Its engine may still be at work for a client that has left."""
    used = slot("a", 6, idle=0.5, load=1.0, parallel=1)._replace(abandoned=1)
    first, late = group("a", 6, NOW - 1), group("x", 6, NOW - 0.1, load=1.0)
    assert decide(first, late, used, policy=POLICY) == []


def test_another_runner_goes_while_one_is_spared() -> None:
    fresh, settled = slot("fresh", 6, idle=3.0, load=4.0), slot("settled", 4, idle=2.0, load=1.0)
    assert decide(group("x", 4, NOW - 4), fresh, settled, policy=POLICY) == [Stop(runner("settled"), Reason.ROOM)]


def test_the_defaults_keep_the_promise_of_ten_seconds() -> None:
    """A lone request behind models that load in half a second and answer within three seconds."""
    usual = Policy()
    busy = slot("a", 6, leases=1, load=0.5)
    began = NOW - (10.0 - 0.5 - 3.0)
    assert decide(group("x", 6, began, load=0.5), busy, policy=usual) == [Stop(runner("a"), Reason.ROOM)]


# Batches


def test_a_batch_gives_way_at_once() -> None:
    batch = slot("b", 6, leases=2, interactive=0, parallel=2, load=1.0, ready=0.1)
    queue = group("b", 6, *[NOW - 50] * 40, first=2, batch=True)
    served = {("", True): NOW}
    assert decide(group("x", 6), batch, queue, policy=POLICY, served=served) == [Stop(runner("b"), Reason.ROOM)]
    mixed = batch._replace(interactive=1)
    assert decide(group("x", 6), mixed, queue, policy=POLICY, served=served) == []


def test_a_load_that_only_a_batch_waits_for_gives_way() -> None:
    loading, queue = slot("b", 6, Phase.STARTING), group("b", 6, NOW - 1, first=2, batch=True)
    assert decide(group("x", 6), loading, queue, policy=POLICY) == [Stop(runner("b"), Reason.ROOM)]
    aged = group("b", 6, NOW - 20, first=2, batch=True)
    assert decide(group("x", 6), loading, aged, policy=POLICY) == [], "but one that is due is finished"
    interactive = group("b", 6, NOW - 1, first=2)
    assert decide(group("x", 6), loading, interactive, policy=POLICY) == []


def test_a_batch_takes_idle_runners_and_no_busy_ones_until_it_is_old() -> None:
    young, old = group("b", 6, NOW - 19, batch=True), group("b", 6, NOW - 20, batch=True)
    assert decide(young, slot("a", 6), policy=POLICY) == [Stop(runner("a"), Reason.ROOM)]
    assert decide(young, slot("a", 6, leases=1), policy=POLICY) == []
    assert decide(young, slot("a", 6, leases=1, interactive=0), policy=POLICY) == [Stop(runner("a"), Reason.ROOM)]
    assert decide(old, slot("a", 6, leases=1), policy=POLICY) == [Stop(runner("a"), Reason.ROOM)]


# Pause


def test_a_paused_model_goes_when_it_is_unused_and_takes_nothing_new() -> None:
    paused = frozenset({"a"})
    assert decide(group("a", 4), slot("a", 4, pinned=True), paused=paused) == [Stop(runner("a"), Reason.PAUSED)]
    assert decide(group("a", 4), slot("a", 4, leases=1), paused=paused) == [Stop(runner("a"), Reason.PAUSED)]
    assert decide(group("a", 4), slot("a", 4, Phase.STARTING), paused=paused) == [Stop(runner("a"), Reason.PAUSED)]


def test_requests_for_a_paused_model_wait_without_holding_up_others() -> None:
    waiting, other = group("a", 10, NOW - 10), group("b", 10, NOW, first=2)
    assert decide(waiting, other, paused=frozenset({"a"})) == [start("b", 10)]
    [refused] = decide(group("a", 4, NOW - 100), paused=frozenset({"a"}))
    assert isinstance(refused, Refuse)
    assert "it is paused" in str(refused.error)


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
