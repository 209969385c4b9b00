"""Whose requests a runner is loaded for, and whose its engine gets."""

import asyncio

import pytest

from modelrunner.scheduler import Lease, Scheduler
from tests.scheduler.fakes import Engine, World, settle, target, virtual


def asking(scheduler: Scheduler, owner: str | None, name: str = "a") -> asyncio.Task[Lease]:
    return asyncio.create_task(scheduler.acquire(target(name), owner=owner))


@pytest.mark.parametrize(
    ("waiting", "loaded_for"),
    [
        (["kim"], "kim"),
        (["kim", "kim", None], "kim"),
        (["kim", "lee"], None),
        (["kim", ""], None),
        ([""], ""),
        ([None], "nobody asked"),
    ],
)
def test_a_load_is_for_the_owner_of_all_that_wait(waiting: list[str | None], loaded_for: str | None) -> None:
    @virtual
    async def run() -> None:
        world = World(10, {"a": Engine(6)})
        scheduler = world.scheduler(unasked=lambda: "nobody asked")
        for task in [asking(scheduler, owner) for owner in waiting]:
            (await task).release()
        assert world.runner("a").loaded_for == loaded_for
        assert world.runner("a").owners == {owner for owner in waiting if owner is not None}
        await scheduler.close(0)

    run()


@virtual
async def test_who_left_before_the_load_was_done_does_not_count() -> None:
    world = World(10, {"a": Engine(6, load_seconds=2.0)})
    scheduler = world.scheduler()
    gone, stays = asking(scheduler, "kim"), asking(scheduler, "lee")
    await asyncio.sleep(1.0)
    gone.cancel()
    (await stays).release()
    assert (world.runner("a").loaded_for, world.runner("a").owners) == ("lee", {"lee"})
    await scheduler.close(0)


@virtual
async def test_every_lease_counts() -> None:
    world = World(10, {"a": Engine(6)})
    scheduler = world.scheduler()
    (await asking(scheduler, "kim")).release()
    runner = world.runner("a")
    scheduler.warm(target("a")).release()  # type: ignore[union-attr]
    assert runner.owners == {"kim"}
    scheduler.warm(target("a"), owner="lee").release()  # type: ignore[union-attr]
    scheduler.lease_runner(runner.id, "sam").release()
    leases = [await asking(scheduler, "kim") for _ in range(2)]
    waiting = asking(scheduler, "pat")
    await settle()
    assert runner.owners == {"kim", "lee", "sam"}, "one that waits for a place has asked nothing yet"
    for lease in leases:
        lease.release()
    (await waiting).release()
    assert runner.owners == {"kim", "lee", "sam", "pat"}
    await scheduler.close(0)


@virtual
async def test_who_waits_for_the_next_runner_has_not_used_the_one_that_ends() -> None:
    world = World(10, {"a": Engine(6, stop_seconds=1.0)})
    scheduler = world.scheduler()
    held = await asking(scheduler, "kim")
    first = world.runner("a")
    unloading = asyncio.create_task(scheduler.unload(model_ids=["a"]))
    await settle()
    waiting = asking(scheduler, "lee")
    await settle()
    held.release()
    (await waiting).release()
    await unloading
    assert first.owners == {"kim"}
    assert (world.runner("a").loaded_for, world.runner("a").owners) == ("lee", {"lee"})
    await scheduler.close(0)
