"""A request that is cancelled in any turn of the loop leaves nothing behind."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from modelrunner.scheduler import Lease, Scheduler
from tests.scheduler.fakes import Engine, VirtualLoop, World, gathered, settle, target, virtual


async def cold(scheduler: Scheduler) -> None:
    """The model is not there yet."""


async def joined(scheduler: Scheduler) -> None:
    """Somebody else waits for the same load."""
    asyncio.create_task(scheduler.acquire(target("a"))).add_done_callback(_release)
    await asyncio.sleep(0.5)


async def evicting(scheduler: Scheduler) -> None:
    """Another model has to go first."""
    (await scheduler.acquire(target("b"))).release()


async def warm(scheduler: Scheduler) -> None:
    """The runner is ready."""
    (await scheduler.acquire(target("a"))).release()


def _release(task: "asyncio.Task[Lease]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().release()


def make() -> tuple[World, Scheduler]:
    world = World(6, {"a": Engine(4), "b": Engine(4)})
    return world, world.scheduler()


async def cancelled_in_turn(begin: Callable[[Scheduler], Awaitable[None]], turn: int) -> bool:
    """False if the request had ended before that turn."""
    world, scheduler = make()
    await begin(scheduler)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    task = asyncio.create_task(scheduler.acquire(target("a")))
    loop.interrupt, loop.interrupt_at = task.cancel, loop.turns + turn
    [outcome] = await gathered([task])
    loop.interrupt_at = None
    if isinstance(outcome, Lease):
        outcome.release()
    await asyncio.sleep(3.0)
    assert [r.leases + r.queued for r in scheduler.runners()] == [0] * len(world.running), turn
    with await scheduler.acquire(target("a")):
        assert world.resident() == ["a"]
    await scheduler.close(0)
    return isinstance(outcome, asyncio.CancelledError)


@pytest.mark.parametrize("begin", [cold, joined, evicting, warm])
def test_cancelled_in_any_turn_it_leaves_nothing_behind(begin: Callable[[Scheduler], Awaitable[None]]) -> None:
    @virtual
    async def test() -> None:
        turn = 1
        while await cancelled_in_turn(begin, turn):
            turn += 1
        assert turn > (1 if begin is warm else 5), "every turn of the wait was tried"

    test()


@virtual
async def test_a_request_that_leaves_before_its_load_begins_loads_nothing() -> None:
    world, scheduler = make()
    with await scheduler.acquire(target("b")):
        waiting = asyncio.create_task(scheduler.acquire(target("a")))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await settle()
    await asyncio.sleep(20.0)
    assert world.started == ["b"]
    assert world.resident() == ["b"]
    await scheduler.close(0)
