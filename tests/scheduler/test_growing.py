"""A model that begins with one sequence: when an engine with more comes, and how the first one goes."""

import asyncio
from dataclasses import replace

import pytest

from modelrunner.errors import EngineFailed
from modelrunner.scheduler import Replicas
from modelrunner.scheduler.state import Failure, Grant, Group, Phase, Reason, Slot, Start, Stop
from modelrunner.types import RequiredMemory
from tests.scheduler.fakes import Engine, World, settle, target, virtual
from tests.scheduler.states import HERE, NOW, decide, everything, group, key, option, runner, slot, wake

WIDE = option(RequiredMemory(6))._replace(sequences=4)
NARROW = option(RequiredMemory(3), 1, 1)


def asked(*since: float) -> Group:
    """A model whose engine takes 3 with one sequence and 6 with four."""
    return replace(group("a", None, *since), options=(NARROW,), wider=(WIDE, NARROW))


def one(*, leases: int = 1, phase: Phase = Phase.READY) -> Slot:
    return slot("a", 3, phase, leases=leases, parallel=1)._replace(grows=True)


def wide(phase: Phase = Phase.READY) -> Slot:
    return slot("a", 6, phase, parallel=4)._replace(number=1)


GROWN = Stop(runner("a"), Reason.GROWN)


def test_it_begins_with_one_sequence() -> None:
    assert decide(asked(NOW, NOW)) == [Start(runner("a"), NARROW)]


def test_more_come_beside_it_once_a_request_has_waited_for_a_place() -> None:
    assert wake(everything(asked(NOW - 1.9), one())) == pytest.approx(NOW + 0.1)
    assert decide(asked(NOW - 1.9), one()) == []
    assert decide(asked(NOW - 2.0), one()) == [Start(runner("a", 1), WIDE)]
    assert decide(asked(NOW - 9), one(), wide(Phase.STARTING)) == []


def test_it_goes_when_the_other_one_is_ready_and_keeps_its_answers() -> None:
    assert decide(one(leases=0), wide()) == [GROWN]
    assert decide(one(leases=1), wide()) == [GROWN]
    assert decide(asked(NOW), one(leases=1), wide()) == [GROWN, Grant(runner("a", 1), (1,))]


def test_without_room_for_both_it_goes_first() -> None:
    assert decide(asked(NOW - 9), one(), budget=8) == [GROWN]
    assert decide(asked(NOW - 9), one(), budget=5) == []  # more sequences never fit


def test_nothing_else_is_evicted_for_more_sequences() -> None:
    idle = slot("b", 3, idle=250)
    assert decide(asked(NOW - 9), one(), idle, budget=9) == [GROWN]
    assert decide(asked(NOW - 9), one(), idle, budget=8) == []


def test_a_place_where_more_failed_is_not_tried_during_its_pause() -> None:
    pause = {(key("a"), HERE): Failure(1, NOW + 5, EngineFailed("x"))}
    assert decide(asked(NOW - 9), one(), failures=pause) == []
    assert wake(everything(asked(NOW - 9), one(), failures=pause)) == NOW + 5


@virtual
async def test_a_lone_client_keeps_one_sequence_and_a_crowd_gets_more() -> None:
    world = World(10, {"a": Engine(6, smaller=(3,))}, most={"a": 2})
    scheduler, wanted = world.scheduler(), target("a", keep_alive=60.0, parallel=4, grows=True)
    for _ in range(3):
        with await scheduler.acquire(wanted):
            await asyncio.sleep(5)
    assert world.started == ["a"]
    first = await scheduler.acquire(wanted)
    waiting = [asyncio.create_task(scheduler.acquire(wanted)) for _ in range(5)]
    others = await asyncio.gather(*waiting[:4])
    assert {lease.runner.id for lease in others} != {first.runner.id}
    assert [view.leases for view in scheduler.runners()] == [1, 4]
    first.release()
    await asyncio.sleep(1)
    assert [view.leases for view in scheduler.runners()] == [4]
    assert world.started == ["a", "a"]
    others[0].release()
    for lease in [*others[1:], await waiting[4]]:
        lease.release()
    await asyncio.sleep(61)
    assert world.resident() == []
    with await scheduler.acquire(wanted):  # after an unload it begins anew
        assert world.taken().ram == 3
    await scheduler.close(0)


@virtual
async def test_one_sequence_is_no_smaller_way_to_fit() -> None:
    wanted = target("a", parallel=4, grows=True)
    for budget, fits in ((10, "now"), (4, "now"), (2, "split")):
        scheduler = World(budget, {"a": Engine(6, smaller=(3, 2))}).scheduler()
        assert (await scheduler.diagnostics.fit(wanted)).fits == fits
        await scheduler.close(0)


@virtual
async def test_without_room_for_both_the_waiting_are_answered_by_the_next() -> None:
    world = World(8, {"a": Engine(6, smaller=(3,))})
    scheduler, wanted = world.scheduler(), target("a", parallel=4, grows=True)
    first = await scheduler.acquire(wanted)
    waiting = [asyncio.create_task(scheduler.acquire(wanted)) for _ in range(3)]
    await asyncio.sleep(5)
    assert not any(task.done() for task in waiting)  # its answer goes on
    first.release()
    assert len({lease.runner.id for lease in await asyncio.gather(*waiting)}) == 1
    assert world.taken().ram == 6
    await scheduler.close(0)


@virtual
async def test_a_model_with_replicas_or_a_number_of_its_own_does_not_grow() -> None:
    world = World(20, {"a": Engine(6, smaller=(3,))}, most={"a": 2})
    scheduler = world.scheduler()
    for wanted in (target("a", parallel=4), target("a", parallel=4, grows=True, replicas=Replicas(1, 2))):
        (await scheduler.acquire(wanted)).release()
        assert world.taken().ram == 6
        await scheduler.unload(model_ids=["a"])
        await settle()
    await scheduler.close(0)
