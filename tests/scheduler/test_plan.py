"""Decisions as values: a state in, actions out."""

import math
from dataclasses import replace

from modelrunner.errors import (
    BackendUnavailable,
    BackingOff,
    EngineFailed,
    InsufficientMemory,
    ShuttingDown,
    TimedOut,
)
from modelrunner.scheduler.failures import REMEMBERED, after, is_past
from modelrunner.scheduler.state import (
    REJOIN,
    Failure,
    Forget,
    Grant,
    Phase,
    Reason,
    Refuse,
    State,
    Stop,
    WakeAt,
)
from tests.scheduler.states import (
    HERE,
    NOW,
    decide,
    ended,
    everything,
    group,
    key,
    known,
    refusal,
    runner,
    slot,
    start,
    wake,
)

# Oldest first


def test_a_ready_runner_serves_everybody_who_waits_for_it() -> None:
    assert decide(group("a", 4, 1, 2, 3), slot("a", 4)) == [Grant(runner("a"), (1, 2, 3))]


def test_many_waiters_are_one_start() -> None:
    assert decide(group("a", 4, *[NOW] * 50)) == [start("a", 4)]


def test_a_load_in_progress_is_waited_for() -> None:
    assert decide(group("a", 4), slot("a", 4, Phase.STARTING)) == []


def test_nothing_is_started_before_the_estimate_is_known() -> None:
    assert decide(group("a", None)) == []


def test_two_that_fit_together_start_together() -> None:
    assert decide(group("a", 4, 1.0 + NOW - 10), group("b", 6, NOW - 1, first=2)) == [
        start("a", 4),
        start("b", 6),
    ]


def test_the_older_request_starts_first_whatever_the_order_of_the_queues() -> None:
    older, younger = group("old", 6, NOW - 2, first=9), group("young", 6, NOW - 1, first=1)
    assert decide(younger, older) == [start("old", 6)]


def test_small_models_do_not_take_the_room_that_an_older_request_waits_for() -> None:
    big, small = group("big", 9, NOW - 2), group("small", 3, NOW - 1, first=2)
    assert decide(big, small, slot("leaving", 6, Phase.STOPPING)) == []


def test_a_small_model_starts_in_the_room_that_the_older_request_leaves_over() -> None:
    big, small = group("big", 7, NOW - 2), group("small", 3, NOW - 1, first=2)
    assert decide(big, small, slot("leaving", 6, Phase.STOPPING)) == [start("small", 3)]


def test_never_a_second_runner_of_a_key_while_the_first_is_still_there() -> None:
    assert decide(group("a", 4), slot("a", 4, Phase.STOPPING)) == []
    assert decide(group("a", 4), slot("a", 4, Phase.DRAINING, leases=1, drain=Reason.UNLOAD)) == []


# Keep-alive


def test_an_unused_runner_stops_when_its_keep_alive_has_passed() -> None:
    assert decide(slot("a", 4, idle=300, keep_alive=300)) == [Stop(runner("a"), Reason.IDLE)]
    assert everything(slot("a", 4, idle=299, keep_alive=300)) == [WakeAt(NOW + 1)]


def test_a_used_runner_has_no_idle_timer() -> None:
    assert everything(slot("a", 4, idle=500, leases=1)) == []


def test_a_waiting_request_comes_before_the_idle_timer() -> None:
    assert decide(group("a", 4), slot("a", 4, idle=500)) == [Grant(runner("a"), (1,))]


def test_keep_alive_zero_stops_at_once_and_infinite_never() -> None:
    assert decide(slot("a", 4, idle=0, keep_alive=0)) == [Stop(runner("a"), Reason.IDLE)]
    assert everything(slot("a", 4, idle=1e9, keep_alive=math.inf)) == []


def test_a_pinned_runner_has_no_idle_timer() -> None:
    assert everything(slot("a", 4, idle=500, pinned=True)) == []


# Room


def test_memory_counts_until_the_process_is_gone() -> None:
    assert decide(group("b", 6), slot("a", 6, Phase.STOPPING)) == []
    assert decide(group("b", 6), slot("a", 6, Phase.ENDED)) == [Forget(runner("a")), start("b", 6)]


def test_the_least_recently_used_runner_goes_and_no_other() -> None:
    runners = [slot("new", 3, idle=1), slot("old", 3, idle=50), slot("middle", 3, idle=20)]
    assert decide(group("x", 4), *runners) == [Stop(runner("old"), Reason.ROOM)]


def test_an_idle_burst_evicts_just_enough() -> None:
    runners = [slot(f"m{i}", 2, idle=10 + i) for i in range(5)]
    assert decide(group("x", 4), *runners) == [Stop(runner("m4"), Reason.ROOM), Stop(runner("m3"), Reason.ROOM)]


def test_a_victim_that_turns_out_to_be_needless_stays() -> None:
    assert decide(group("x", 9), slot("small", 1, idle=100), slot("big", 9, idle=90)) == [
        Stop(runner("big"), Reason.ROOM)
    ]


def test_of_several_victims_none_is_needless() -> None:
    runners = [slot("small", 1, idle=100), slot("big", 4, idle=90), slot("large", 5, idle=80)]
    assert decide(group("x", 9), *runners) == [Stop(runner("big"), Reason.ROOM), Stop(runner("large"), Reason.ROOM)]


def test_a_runner_that_gives_nothing_of_what_is_missing_stays() -> None:
    runners = [slot("old", 0, vram=(8,), idle=100), slot("new", 5, vram=(0,), idle=50)]
    assert decide(group("x", 8, vram=(0,)), *runners, vram=(8,)) == [Stop(runner("new"), Reason.ROOM)]


def test_keep_alive_without_end_is_no_pin() -> None:
    assert decide(group("x", 6), slot("a", 6, keep_alive=math.inf)) == [Stop(runner("a"), Reason.ROOM)]


def test_a_load_that_everybody_left_may_be_evicted_but_no_other_load() -> None:
    abandoned = slot("a", 6, Phase.STARTING)
    assert decide(group("x", 6), abandoned) == [Stop(runner("a"), Reason.ROOM)]
    assert decide(group("x", 6, NOW - 50), group("a", 6, NOW, first=2), abandoned) == []


def test_room_that_is_on_its_way_is_not_made_twice() -> None:
    assert decide(group("x", 6), slot("a", 6, Phase.STOPPING), slot("b", 4)) == []


def test_one_victim_makes_room_for_one_request_only() -> None:
    first, second = group("x", 5, NOW - 2), group("y", 5, NOW - 1, first=2)
    assert decide(first, second, slot("a", 5, idle=20), slot("b", 5)) == [
        Stop(runner("a"), Reason.ROOM),
        Stop(runner("b"), Reason.ROOM),
    ]


def test_one_victim_makes_room_for_one_model_only_also_where_it_is_spared_differently() -> None:
    """While another is served, for how long depends on how many wait."""
    first, second = group("x", 5, NOW - 2), group("y", 5, NOW - 1, NOW - 1, first=2)
    busy = slot("c", 1, leases=1)
    assert decide(first, second, slot("a", 5, idle=20), slot("b", 5), busy, budget=11) == [
        Stop(runner("a"), Reason.ROOM),
        Stop(runner("b"), Reason.ROOM),
    ]


def test_what_one_victim_less_leaves_evicts_nobody_if_it_is_not_enough() -> None:
    first, second = group("x", 4, NOW - 2), group("y", 8, NOW - 1, first=2)
    busy = slot("c", 2, leases=1)
    assert decide(first, second, slot("a", 4, idle=20), slot("b", 4), busy) == [Stop(runner("a"), Reason.ROOM)]


def test_each_device_has_its_own_room() -> None:
    first, second = slot("a", 1, vram=(8, 0), idle=99), slot("b", 1, vram=(0, 8))
    actions = decide(group("x", 1, vram=(0, 8)), first, second, vram=(8, 8))
    assert actions == [Stop(runner("b"), Reason.ROOM)]
    assert decide(group("x", 1, vram=(0, 8)), first, vram=(8, 8)) == [start("x", 1, (0, 8))]


def test_a_start_does_not_wait_for_room_that_only_an_older_request_waits_for() -> None:
    big, small = group("big", 8, NOW - 2), group("small", 2, NOW - 1, first=2)
    loads = [slot("a", 3, Phase.STOPPING), slot("b", 1)]
    assert decide(big, small, *loads) == [Stop(runner("b"), Reason.ROOM), start("small", 2)]


def test_a_shortage_on_one_device_does_not_hold_up_another() -> None:
    first, second = group("x", 1, NOW - 2, vram=(8, 0)), group("y", 1, NOW - 1, first=2, vram=(0, 8))
    busy, idle = slot("a", 1, leases=1, vram=(8, 0)), slot("b", 1, vram=(0, 8))
    assert decide(first, second, busy, idle, vram=(8, 8)) == [Stop(runner("b"), Reason.ROOM)]


# Busy runners


def test_a_busy_runner_is_drained_only_after_the_patience_of_who_waits() -> None:
    busy = slot("a", 6, leases=1)
    assert everything(group("x", 6, NOW - 4), busy) == [WakeAt(NOW + 1)]
    assert decide(group("x", 6, NOW - 5), busy) == [Stop(runner("a"), Reason.ROOM)]


def test_idle_runners_go_before_busy_ones() -> None:
    assert decide(group("x", 4, NOW - 50), slot("a", 5, leases=1), slot("b", 5, idle=0)) == [
        Stop(runner("b"), Reason.ROOM)
    ]


def test_the_least_recently_used_busy_runner_is_drained_with_the_idle_one_that_it_takes() -> None:
    runners = [slot("a", 4, leases=1, idle=3), slot("b", 4, leases=1, idle=9), slot("c", 2)]
    assert decide(group("x", 6, NOW - 50), *runners) == [Stop(runner("c"), Reason.ROOM), Stop(runner("b"), Reason.ROOM)]


def test_what_a_drained_runner_gives_counts_once() -> None:
    drained = slot("a", 6, Phase.DRAINING, drain=Reason.ROOM)
    assert decide(group("x", 9), drained, slot("b", 4)) == [
        Stop(runner("a"), Reason.ROOM),
        Stop(runner("b"), Reason.ROOM),
    ]


def test_a_drained_runner_stops_after_its_last_lease() -> None:
    draining = slot("a", 6, Phase.DRAINING, leases=1, drain=Reason.ROOM)
    assert decide(group("x", 6, NOW - 50), draining) == []
    drained = slot("a", 6, Phase.DRAINING, drain=Reason.ROOM)
    assert decide(group("x", 6, NOW - 50), drained) == [Stop(runner("a"), Reason.ROOM)]


def test_a_drain_is_not_taken_back() -> None:
    draining = slot("a", 6, Phase.DRAINING, leases=1, drain=Reason.ROOM)
    assert decide(draining) == []
    assert decide(group("a", 6), draining) == []


def test_a_drain_that_an_older_request_needs_is_not_taken_back_for_the_runners_own_queue() -> None:
    draining = slot("a", 6, Phase.DRAINING, leases=1, drain=Reason.ROOM)
    assert decide(group("a", 6, NOW - 1, first=2), group("x", 6, NOW - 50), draining) == []


def test_one_plan_drains_for_the_older_and_evicts_for_the_younger() -> None:
    older, younger = group("x", 1, NOW - 50, vram=(8, 0)), group("y", 1, NOW - 40, first=2, vram=(0, 8))
    busy, idle = slot("a", 1, leases=1, vram=(8, 0)), slot("b", 1, vram=(0, 8))
    actions = decide(older, younger, busy, idle, vram=(8, 8))
    assert actions == [Stop(runner("a"), Reason.ROOM), Stop(runner("b"), Reason.ROOM)]


# Pins


def test_a_pinned_runner_is_never_evicted_and_who_needs_its_room_is_refused() -> None:
    error = refusal(decide(group("x", 6, NOW - 99), slot("a", 6, pinned=True, keep_alive=math.inf)))
    assert isinstance(error, InsufficientMemory)
    assert "pinned" in error.message


def test_a_pinned_runner_is_neither_evicted_nor_drained_where_another_can_go() -> None:
    pinned, other = slot("a", 5, pinned=True, idle=99), slot("b", 5, idle=1)
    assert decide(group("x", 5), pinned, other) == [Stop(runner("b"), Reason.ROOM)]
    pinned, other = pinned._replace(leases=1), other._replace(leases=1)
    assert decide(group("x", 5, NOW - 50), pinned, other) == [Stop(runner("b"), Reason.ROOM)]


def test_a_pinned_model_that_is_waited_for_counts_as_pinned_already() -> None:
    """So its start takes no memory that an older request counts on."""
    pinned = replace(group("p", 4, first=2), pinned=True)
    older = group("x", 8, NOW - 2, smaller=(5,))
    assert decide(older, pinned) == [start("p", 4), start("x", 5, rank=1)]
    started, refused = decide(group("x", 8, NOW - 2), pinned)
    assert isinstance(refused, Refuse)
    assert "pinned" in str(refused.error)
    assert started == start("p", 4)


def test_a_pinned_model_that_was_unloaded_gives_its_room() -> None:
    assert decide(group("x", 6), slot("a", 6, Phase.STOPPING, pinned=True)) == []


def test_what_can_never_fit_is_refused_with_the_figures_and_evicts_nothing() -> None:
    error = refusal(decide(group("x", 11), slot("a", 6)))
    assert isinstance(error, InsufficientMemory)
    assert "needed 11, free 4, budget 10 bytes" in error.message
    assert "more than there is" in error.message


def test_what_fits_nowhere_waits_for_hosts_that_may_come_and_no_longer() -> None:
    """Soon after one came or was lost, and for half of the longest wait (100 s) at most."""
    assert everything(group("x", 11), moved=NOW - 5) == [WakeAt(NOW - 5 + REJOIN)]
    assert everything(group("x", 11, NOW - 40, NOW), moved=NOW - 5) == [WakeAt(NOW + 10)]
    nobody = replace(group("x", 11), waiting=())
    assert State((nobody,), (), {}, moved=NOW).waits_for_hosts(nobody) < NOW
    for late in (decide(group("x", 11), moved=NOW - REJOIN), decide(group("x", 11, NOW - 50), moved=NOW)):
        assert isinstance(refusal(late), InsufficientMemory)


def test_a_device_that_is_too_small_is_named() -> None:
    error = refusal(decide(group("x", 1, vram=(9,)), vram=(8,)))
    assert "device 0: needed 9, free 8, budget 8 bytes" in error.message


# Failures


def test_a_failed_start_answers_everybody_once_and_starts_nothing() -> None:
    fault = EngineFailed("no such tensor")
    actions = decide(group("a", 5, *[NOW] * 50), ended("a", fault))
    assert actions == [Refuse(key("a"), tuple(range(1, 51)), fault), Forget(runner("a"), Failure(1, NOW + 1.0, fault))]
    assert isinstance(actions[0], Refuse)
    assert actions[0].error is fault


def test_who_comes_during_the_pause_is_told_how_long_it_lasts() -> None:
    failures = {(key("a"), HERE): Failure(2, NOW + 1.5, EngineFailed("no such tensor"))}
    error = refusal(decide(group("a", 5), failures=failures))
    assert isinstance(error, BackingOff)
    assert error.retry_after == 1.5
    assert "no such tensor" in error.message


def test_after_the_pause_it_is_tried_again() -> None:
    failures = {(key("a"), HERE): Failure(2, NOW, EngineFailed("x"))}
    assert decide(group("a", 5), failures=failures) == [start("a", 5)]


def test_the_pauses_double_up_to_a_limit_and_are_forgotten() -> None:
    failure, now, pauses = None, 0.0, []
    for _ in range(9):
        failure = after(known(failure), ended("a", EngineFailed("x")), (), now)
        assert not failure.waits
        pauses.append(failure.until - now)
        now = failure.until
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert failure is not None
    assert not is_past(failure, now + REMEMBERED - 1)
    assert after(known(failure), ended("a", EngineFailed("x")), (), now + REMEMBERED).count == 1


def test_an_engine_that_is_not_installed_is_no_failed_start() -> None:
    fault = BackendUnavailable("install it")
    assert decide(group("a", 5), ended("a", fault)) == [Refuse(key("a"), (1,), fault), Forget(runner("a"))]


def test_after_a_crash_the_waiting_get_a_new_runner() -> None:
    fault = EngineFailed("signal 11")
    assert decide(group("a", 5), ended("a", fault, was_ready=True)) == [
        Forget(runner("a"), Failure(1, NOW, fault, waits=True)),
        start("a", 5),
    ]


def test_a_runner_that_we_stopped_while_it_started_refuses_nobody() -> None:
    assert decide(group("a", 5), ended("a", None)) == [Forget(runner("a")), start("a", 5)]


# Time and closing


def test_who_waited_too_long_is_refused_alone() -> None:
    actions = everything(group("x", 6, NOW - 100, NOW - 90), slot("x", 6, Phase.STARTING))
    assert actions == [Refuse(key("x"), (1,), TimedOut("")), WakeAt(NOW + 10)]
    assert isinstance(actions[0], Refuse)
    assert isinstance(actions[0].error, TimedOut)
    assert "load" in str(actions[0].error)


def test_a_ready_runner_comes_before_the_limit() -> None:
    assert decide(group("x", 6, NOW - 100), slot("x", 6)) == [Grant(runner("x"), (1,))]


def test_the_earliest_time_is_the_wake_up() -> None:
    assert wake(everything(slot("a", 1, idle=295), slot("b", 1, idle=290))) == NOW + 5


def test_closing_refuses_stops_and_drains() -> None:
    runners = [slot("idle", 1), slot("busy", 1, leases=1), slot("loading", 1, Phase.STARTING)]
    actions = decide(group("idle", 1), group("new", 1, first=2), *runners, closing=True)
    refused = [a.error for a in actions if isinstance(a, Refuse)]
    assert [type(e) for e in refused] == [ShuttingDown, ShuttingDown]
    assert actions[:3] == [
        Stop(runner("idle"), Reason.SHUTDOWN),
        Stop(runner("busy"), Reason.SHUTDOWN),
        Stop(runner("loading"), Reason.SHUTDOWN),
    ]


def test_closing_takes_no_drain_back() -> None:
    assert decide(slot("a", 6, Phase.DRAINING, leases=1, drain=Reason.ROOM), closing=True) == []


# Memory that others take


SHRUNK = frozenset({""})


def test_a_runner_that_is_larger_than_its_estimate_stays() -> None:
    assert decide(slot("a", 12)) == []


def test_idle_runners_go_when_the_budget_falls_under_what_they_hold() -> None:
    runners = slot("new", 3, idle=1), slot("old", 3, idle=50), slot("busy", 3, idle=90, leases=1)
    assert decide(*runners, budget=9, shrunk=SHRUNK) == []
    assert decide(*runners, budget=8, shrunk=SHRUNK) == [Stop(runner("old"), Reason.MEMORY)]
    assert decide(*runners, budget=5, shrunk=SHRUNK) == [
        Stop(runner("old"), Reason.MEMORY),
        Stop(runner("new"), Reason.MEMORY),
    ]
    assert decide(slot("busy", 3, leases=1), slot("pinned", 3, pinned=True), budget=1, shrunk=SHRUNK) == []


def test_what_leaves_already_counts_and_only_the_short_device_is_helped() -> None:
    assert decide(slot("a", 3), slot("b", 3, Phase.STOPPING), budget=4, shrunk=SHRUNK) == []
    on_device, off = slot("a", 1, vram=(5,)), slot("b", 1, idle=99)
    assert decide(on_device, off, vram=(4,), shrunk=SHRUNK) == [Stop(runner("a"), Reason.MEMORY)]


def test_a_model_that_is_waited_for_is_granted_and_not_ended() -> None:
    assert decide(group("a", 3), slot("a", 3), budget=1, shrunk=SHRUNK) == [Grant(runner("a"), (1,))]
