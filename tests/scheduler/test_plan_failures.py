"""Variants, memory that runs out, crashes and the breaker: decisions as values."""

import math

import pytest

from modelrunner.errors import BackingOff, EngineFailed, HostLost, InsufficientMemory, OutOfMemory
from modelrunner.scheduler.allocation import raised
from modelrunner.scheduler.failures import BREAKER, HEALTHY, MAX_BACKOFF, REMEMBERED, after, is_past
from modelrunner.scheduler.state import (
    Action,
    Failure,
    Forget,
    Phase,
    Reason,
    Refuse,
    RunOption,
    Slot,
    Stop,
    WakeAt,
)
from modelrunner.types import RequiredMemory
from tests.scheduler.states import (
    HERE,
    NOW,
    decide,
    ended,
    everything,
    group,
    key,
    known,
    option,
    refusal,
    runner,
    slot,
    start,
)

ONE, THREE, NINE = ([RunOption(RequiredMemory(5), rank) for rank in range(count)] for count in (1, 3, 9))
FULL = OutOfMemory(-9, message="the engine was killed by the system because memory ran out")


# Variants


def test_the_preferred_variant_is_started_where_it_fits() -> None:
    assert decide(group("a", 8, smaller=(5, 2))) == [start("a", 8)]


def test_room_is_made_for_the_preferred_variant_though_a_smaller_one_fits_now() -> None:
    waiting = group("a", 8, NOW - 49, smaller=(5, 2))
    assert decide(waiting, slot("b", 5)) == [Stop(runner("b"), Reason.ROOM)]
    assert decide(waiting, slot("b", 5, leases=1)) == [Stop(runner("b"), Reason.ROOM)]
    assert decide(group("a", 8, NOW - 1, smaller=(5, 2)), slot("b", 5, leases=1)) == [], "nor is it settled for"


def test_the_largest_variant_that_can_ever_fit_is_taken() -> None:
    assert decide(group("a", 12, smaller=(8, 5))) == [start("a", 8, rank=1)]
    assert decide(group("a", 12, smaller=(8, 5)), slot("b", 4, pinned=True)) == [start("a", 5, rank=2)]


def test_where_none_can_ever_fit_the_smallest_is_told() -> None:
    error = refusal(decide(group("a", 20, smaller=(15, 11))))
    assert isinstance(error, InsufficientMemory)
    assert "needed 11, free 10, budget 10 bytes" in error.message


# Memory that runs out


def tried(rank: int, before: Failure | None, *sizes: int) -> tuple[Failure, list[Action]]:
    """A load of that `rank` has run out of memory; what is remembered of it, and what comes after it was forgotten."""
    waiting = group("a", sizes[0], smaller=sizes[1:])
    *answers, forget = decide(waiting, ended("a", FULL, rank=rank), failures=known(before))[:2]
    if isinstance(forget, Forget):
        assert forget.failure is not None
        return forget.failure, answers
    [forgotten] = answers
    assert isinstance(forgotten, Forget)
    assert forgotten.failure is not None
    return forgotten.failure, [forget]


def test_memory_that_ran_out_is_tried_again_with_more_then_smaller_then_told() -> None:
    first, then = tried(0, None, 8, 4, 2)
    assert then == [start("a", 10)], "a quarter more"
    second, then = tried(0, first, 8, 4, 2)
    assert then == [start("a", 5, rank=1)], "of the next smaller one, too"
    third, then = tried(1, second, 8, 4, 2)
    [refused] = then
    assert isinstance(refused, Refuse)
    assert isinstance(refused.error, InsufficientMemory)
    assert "memory ran out" in str(refused.error)
    assert third.until - NOW == 4.0, "it is no restart storm"
    later = {(key("a"), HERE): Failure(third.count, NOW, third.error, third.waits, third.floor)}
    assert decide(group("a", 8, smaller=(4, 2)), failures=later) == [start("a", 2, rank=2)], "from where that ended"


def test_without_a_smaller_variant_it_is_told_after_the_second_time() -> None:
    first, then = tried(0, None, 8)
    assert then == [start("a", 10)]
    _, then = tried(0, first, 8)
    assert isinstance(then[0], Refuse)


def test_more_room_is_made_for_the_second_try() -> None:
    waiting, full = group("a", 5), ended("a", FULL)
    assert decide(waiting, full, slot("b", 5))[1:] == [Stop(runner("b"), Reason.ROOM)]
    assert decide(waiting, full, slot("b", 5, leases=1))[1:] == [], "busy ones have their time"


def test_more_than_there_is_is_not_asked_for() -> None:
    assert raised(RequiredMemory(9, (4, 4)), [(10, 100, 2)]) == RequiredMemory(10, (5, 4))
    assert decide(group("a", 9), ended("a", FULL))[1:] == [start("a", 10)]


# Crashes


def test_a_model_that_crashes_is_restarted_ever_later_and_then_given_up() -> None:
    pauses, failure, now = [], None, NOW
    for _ in range(BREAKER + 2):
        crash = Slot(key("a"), Phase.ENDED, RequiredMemory(5), error=EngineFailed("signal 11"), ready_at=now - 1)
        failure = after(known(failure), crash, ONE, now)
        pauses.append((failure.until - now, failure.waits))
        now = failure.until + 1
    assert pauses == [(0, True), (1, True), (2, True), (4, True), (60, False), (60, False), (60, False)]


def test_who_asks_during_a_short_pause_waits_and_who_asks_the_broken_is_told_its_last_words() -> None:
    fault = EngineFailed("signal 11")
    pausing = {(key("a"), HERE): Failure(3, NOW + 2.0, fault, waits=True)}
    assert everything(group("a", 5), failures=pausing) == [WakeAt(NOW + 2.0)]
    assert decide(group("b", 10, first=2), group("a", 5), failures=pausing) == [start("b", 10)]
    open_breaker = {(key("a"), HERE): Failure(5, NOW + 30.0, fault)}
    error = refusal(decide(group("a", 5), failures=open_breaker))
    assert isinstance(error, BackingOff)
    assert error.retry_after == 30.0
    assert "5 times in a row, last with: signal 11" in error.message


def test_the_fifth_crash_answers_those_who_wait() -> None:
    failures = {(key("a"), HERE): Failure(4, NOW - 10, EngineFailed("x"), waits=True)}
    actions = decide(group("a", 5), ended("a", EngineFailed("signal 11"), True), failures=failures)
    assert [type(a) for a in actions] == [Forget, Refuse]


def test_after_the_pause_one_start_is_tried() -> None:
    failures = {(key("a"), HERE): Failure(5, NOW, EngineFailed("x"))}
    assert decide(group("a", 5, *[NOW] * 50), failures=failures) == [start("a", 5)]


@pytest.mark.parametrize(("ready", "count"), [(HEALTHY - 1, 5), (HEALTHY, 1)])
def test_a_healthy_time_clears_the_model(ready: float, count: int) -> None:
    before = Failure(4, NOW - 100, EngineFailed("x"), waits=True, floor=2)
    failure = after(known(before), ended("a", EngineFailed("x"), True, ready=ready), THREE, NOW)
    assert failure.count == count
    assert failure.floor == (2 if count > 1 else None)


def test_an_old_failure_is_forgotten() -> None:
    before = Failure(4, NOW - REMEMBERED, EngineFailed("x"))
    assert is_past(before, NOW)
    assert not is_past(before, NOW - 1)
    assert after(known(before), ended("a", EngineFailed("x")), ONE, NOW).count == 1


def test_memory_that_runs_out_in_use_has_more_made_for_it_the_next_time() -> None:
    actions = decide(group("a", 8), ended("a", FULL, True))
    assert actions == [Forget(runner("a"), Failure(1, NOW, FULL, True, 0)), start("a", 10)]


@pytest.mark.parametrize("error", [EngineFailed("x"), FULL])
@pytest.mark.parametrize("was_ready", [True, False])
def test_however_it_fails_it_is_started_at_most_seven_times_a_minute(error: EngineFailed, was_ready: bool) -> None:
    failure, now, starts = None, NOW, []
    for _ in range(40):
        starts.append(now)
        fallen = Slot(
            key("a"), Phase.ENDED, RequiredMemory(5), error=error, ready_at=now if was_ready else -math.inf,
            option=RunOption(RequiredMemory(5), rank=(failure and failure.floor) or 0),
        )  # fmt: skip
        failure = after(known(failure), fallen, NINE, now)
        now = failure.until
    assert all(sum(begin <= s < begin + MAX_BACKOFF for s in starts) <= 7 for begin in starts)


# Hosts that are lost


@pytest.mark.parametrize("was_ready", [True, False])
def test_a_lost_host_is_no_fault_of_the_model(was_ready: bool) -> None:
    """Its requests get another runner at once, however often that happens. Once the host is back, it is a fault."""
    there = ended("a", HostLost("b does not answer"), was_ready)._replace(option=option(RequiredMemory(5), host="b"))
    assert decide(group("a", 5), there) == [Forget(runner("a")), start("a", 5)]
    back = decide(group("a", 5), there, others={"b": RequiredMemory(0)})
    assert any(isinstance(action, Forget) and action.failure is not None for action in back)
