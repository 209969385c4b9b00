"""Several runners of one model: when another one comes, which one answers, and when one goes."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from modelrunner.errors import EngineFailed
from modelrunner.scheduler import Lease, Replicas, RetainedSettings, Scheduler, Target
from modelrunner.scheduler.state import Failure, Grant, Group, Phase, Reason, Request, Slot, Start, Stop
from modelrunner.types import KeepAlive, Mode
from tests.scheduler.fakes import Engine, World, settle, target, virtual
from tests.scheduler.states import HERE, NOW, decide, everything, group, key, runner, slot, start, wake

CROWD = Replicas(1, 3)


def crowd(name: str, need: int, *since: float, least: int = 1, most: int = 3) -> Group:
    return replace(group(name, need, *since), least=least, most=most)


def nth(number: int, *arguments: Any, least: int = 1, **more: Any) -> Slot:
    return slot(*arguments, **more)._replace(number=number, least=least)


def full(number: int, **more: Any) -> Slot:
    return nth(number, "a", 2, leases=2, parallel=2, **more)


def another(number: int) -> Start:
    return Start(runner("a", number), start("a", 2).option)


# When another one comes


def test_another_one_starts_once_a_request_has_waited_for_a_place() -> None:
    assert wake(everything(crowd("a", 2, NOW - 1.9), full(0))) == pytest.approx(NOW + 0.1)
    assert decide(crowd("a", 2, NOW - 1.9), full(0)) == []
    assert decide(crowd("a", 2, NOW - 2.0), full(0)) == [another(1)]


def test_they_come_one_at_a_time_and_not_beyond_the_most() -> None:
    assert decide(crowd("a", 2, NOW - 9), full(0), nth(1, "a", 2, Phase.STARTING)) == []
    assert decide(crowd("a", 2, NOW - 9), full(0), full(1)) == [another(2)]
    assert decide(crowd("a", 2, NOW - 9), full(0), full(1), full(2)) == []
    assert decide(group("a", 2, NOW - 9), full(0)) == []


def test_nothing_is_evicted_for_another_one() -> None:
    idle = slot("b", 7, idle=250)
    assert decide(crowd("a", 2, NOW - 9), full(0), idle) == []
    assert decide(crowd("a", 2, NOW - 9), full(0), idle, budget=11) == [another(1)]


def test_a_model_that_waits_for_memory_comes_first() -> None:
    first = group("b", 8, NOW - 1, first=9)
    assert decide(crowd("a", 2, NOW - 9), full(0), first) == [start("b", 8)]


def test_the_least_are_there_without_a_wait_where_there_is_room() -> None:
    nobody = replace(crowd("a", 2, least=2), waiting=())
    assert decide(nobody, nth(0, "a", 2, least=2)) == [another(1)]
    assert decide(nobody, nth(0, "a", 2, least=2), budget=3) == []
    assert decide(nobody, nth(0, "a", 2, Phase.STARTING, least=2)) == []


def test_a_place_where_one_failed_is_not_tried_during_its_pause() -> None:
    pause = {(key("a"), HERE): Failure(1, NOW + 5, EngineFailed("x"))}
    assert decide(crowd("a", 2, NOW - 9), full(0), failures=pause) == []
    assert wake(everything(crowd("a", 2, NOW - 9), full(0), failures=pause)) == NOW + 5


def test_a_failed_start_of_another_one_refuses_nobody() -> None:
    fallen = Slot(key("a"), Phase.ENDED, start("a", 2).option.memory, error=EngineFailed("x"), number=1)
    actions = decide(crowd("a", 2, NOW - 9), full(0), fallen)
    assert [type(action).__name__ for action in actions] == ["Forget"]


# Which one answers


def test_the_one_with_the_fewest_leases_answers() -> None:
    slots = nth(0, "a", 2, leases=2, parallel=4), nth(1, "a", 2, leases=1, parallel=4)
    assert decide(crowd("a", 2, *[NOW] * 3), *slots) == [
        Grant(runner("a", 0), (2,)),
        Grant(runner("a", 1), (1, 3)),
    ]


def test_the_one_that_knows_the_conversation_answers_while_it_has_a_place() -> None:
    waiting = tuple(Request(id, NOW, prefers=0) for id in (1, 2))
    asked = replace(crowd("a", 2), waiting=waiting)
    slots = nth(0, "a", 2, leases=3, parallel=4), nth(1, "a", 2, parallel=4)
    assert decide(asked, *slots) == [Grant(runner("a", 0), (1,)), Grant(runner("a", 1), (2,))]


# When one goes


def test_the_others_go_when_they_were_idle_and_the_first_stays_while_one_is_used() -> None:
    first, second = nth(0, "a", 2, idle=400), nth(1, "a", 2, idle=20)
    assert decide(first, second) == []
    assert decide(nth(0, "a", 2, idle=20), nth(1, "a", 2, idle=400)) == [Stop(runner("a", 1), Reason.IDLE)]
    assert decide(first, nth(1, "a", 2, idle=400)) == [
        Stop(runner("a", 0), Reason.IDLE),
        Stop(runner("a", 1), Reason.IDLE),
    ]


def test_a_pin_keeps_the_least_and_not_those_that_came_for_a_crowd() -> None:
    first, second = nth(0, "a", 4, pinned=True, idle=500), nth(1, "a", 4, pinned=True, idle=250)
    assert decide(group("b", 6), first, second) == [Stop(runner("a", 1), Reason.ROOM)]
    assert decide(first, second._replace(last_used=NOW - 500)) == [Stop(runner("a", 1), Reason.IDLE)]


def test_after_the_first_has_gone_a_pin_keeps_the_next() -> None:
    assert decide(nth(1, "a", 4, pinned=True, idle=500)) == []


# The scheduler


def machine(**engines: Engine) -> World:
    return World(10, engines, most={"a": 3})


async def fill(scheduler: Scheduler, wanted: Target, count: int) -> list[Lease]:
    return [await scheduler.acquire(wanted) for _ in range(count)]


async def load(scheduler: Scheduler, wanted: Target) -> None:
    """The first runner, and the others of the least."""
    (await scheduler.acquire(wanted)).release()
    await asyncio.sleep(5)


@virtual
async def test_a_crowd_gets_more_runners_and_they_go_after_it() -> None:
    world = machine(a=Engine(3, load_seconds=1.0))
    scheduler, wanted = world.scheduler(), target("a", keep_alive=60.0, replicas=CROWD)
    leases = await asyncio.gather(*[asyncio.create_task(scheduler.acquire(wanted)) for _ in range(6)])
    assert len({lease.runner.id for lease in leases}) == 3
    assert [view.leases for view in scheduler.runners()] == [2, 2, 2]
    for lease in leases:
        lease.release()
    await asyncio.sleep(59)
    with await scheduler.acquire(wanted):  # keeps the first
        pass
    await asyncio.sleep(2)
    assert [view.leases for view in scheduler.runners()] == [0]
    await scheduler.close(0)
    assert world.resident() == []


@virtual
async def test_a_conversation_comes_back_to_its_runner() -> None:
    world = machine(a=Engine(3))
    scheduler, wanted = world.scheduler(), target("a", replicas=Replicas(2, 2))
    await load(scheduler, wanted)
    used: dict[int, str] = {}
    for prefix in (1, 2, 1, 2, 2, 1):
        with await scheduler.acquire(wanted, prefix=prefix) as lease:
            assert used.setdefault(prefix, lease.runner.id) == lease.runner.id
            with await scheduler.acquire(wanted) as other:  # the fewest leases
                assert other.runner.id != lease.runner.id
    await scheduler.close(0)


@virtual
async def test_one_that_crashes_takes_only_its_own_requests_along() -> None:
    world = machine(a=Engine(3))
    scheduler, wanted = world.scheduler(), target("a", replicas=Replicas(2, 2))
    await load(scheduler, wanted)
    one, other = await fill(scheduler, wanted, 2)
    assert one.runner.id != other.runner.id
    next(r for r in world.running.values() if r.id == one.runner.id).die()
    await settle()
    assert one.slot.gone.is_set()
    assert not other.slot.gone.is_set()
    one.release()
    with await scheduler.acquire(wanted) as again:
        assert again.runner.id == other.runner.id
    await asyncio.sleep(10)  # beyond the pause after the crash, and a load
    assert len(scheduler.runners()) == 2
    await scheduler.close(0)


@virtual
async def test_a_changed_number_applies_to_the_present_runners() -> None:
    world = machine(a=Engine(3))
    scheduler, wanted = world.scheduler(), target("a", keep_alive=30.0, replicas=Replicas(2, 2))
    await load(scheduler, wanted)
    assert len(scheduler.runners()) == 2
    scheduler.retain("a", Mode.COMPLETION, RetainedSettings(KeepAlive(30.0)))
    await asyncio.sleep(20)
    (await scheduler.acquire(target("a", keep_alive=30.0))).release()
    await asyncio.sleep(20)
    assert len(scheduler.runners()) == 1
    await scheduler.close(0)


@virtual
async def test_unload_and_pause_mean_all_of_them() -> None:
    world = machine(a=Engine(3))
    scheduler, wanted = world.scheduler(), target("a", replicas=Replicas(2, 2))
    await load(scheduler, wanted)
    assert len((await scheduler.unload(model_ids=["a"])).models) == 2
    assert world.resident() == []
    await load(scheduler, wanted)
    await scheduler.pause("a", "a")
    assert world.resident() == []
    await scheduler.close(0)
