"""Engines that only batches use stand still while a client waits for an answer of another."""

import asyncio

from modelrunner.scheduler.standstill import LONGEST, SHARE
from tests.scheduler.fakes import Engine, World, settle, target, virtual


def world() -> World:
    return World(10, {"batch": Engine(1), "chat": Engine(1), "other": Engine(1)})


@virtual
async def test_a_batch_stands_still_until_the_client_has_its_answer() -> None:
    scheduler = (machine := world()).scheduler()
    line = await scheduler.acquire(target("batch"), batch=True)
    first = await scheduler.acquire(target("chat"))
    assert machine.runner("batch").is_held()
    assert not machine.runner("chat").is_held()
    second = await scheduler.acquire(target("chat"))
    first.release()
    assert machine.runner("batch").is_held(), "another client waits"
    second.release()
    assert not machine.runner("batch").is_held()
    line.release()
    await scheduler.close(0)


@virtual
async def test_a_line_that_begins_while_a_client_waits_waits_with_it() -> None:
    scheduler = (machine := world()).scheduler()
    (await scheduler.acquire(target("batch"))).release()
    client = await scheduler.acquire(target("chat"))
    assert not machine.runner("batch").is_held()
    line = await scheduler.acquire(target("batch"), batch=True)
    assert machine.runner("batch").is_held()
    line.release()
    assert not machine.runner("batch").is_held(), "an engine without work disturbs nobody"
    client.release()
    await scheduler.close(0)


@virtual
async def test_an_engine_that_a_client_uses_never_stands_still() -> None:
    scheduler = (machine := world()).scheduler()
    line = await scheduler.acquire(target("batch"), batch=True)
    other = await scheduler.acquire(target("chat"))
    assert machine.runner("batch").is_held()
    mine = await scheduler.acquire(target("batch"))
    assert not machine.runner("batch").is_held()
    assert not machine.runner("chat").is_held()
    mine.release()
    assert machine.runner("batch").is_held()
    for lease in (other, line):
        lease.release()
    await scheduler.close(0)


@virtual
async def test_an_engine_that_a_client_waits_for_never_stands_still() -> None:
    scheduler = (machine := world()).scheduler()
    line = await scheduler.acquire(target("batch", parallel=1), batch=True)
    other = await scheduler.acquire(target("chat"))
    assert machine.runner("batch").is_held()
    waiting = asyncio.create_task(scheduler.acquire(target("batch", parallel=1)))
    await settle()
    assert not machine.runner("batch").is_held()
    line.release()
    for lease in (other, await waiting):
        lease.release()
    await scheduler.close(0)


@virtual
async def test_an_engine_that_computes_elsewhere_goes_on() -> None:
    """A batch on a device beside a client on the processors or on another device."""
    engines = {
        "batch": Engine(1, vram=(1, 0)),
        "cpu": Engine(1),
        "far": Engine(1, vram=(0, 1)),
        "near": Engine(1, vram=(1, 1)),
    }
    scheduler = (machine := World(10, engines, vram=(4, 4))).scheduler()
    line = await scheduler.acquire(target("batch"), batch=True)
    for name, is_held in (("cpu", False), ("far", False), ("near", True)):
        client = await scheduler.acquire(target(name))
        assert machine.runner("batch").is_held() is is_held, name
        client.release()
    line.release()
    await scheduler.close(0)


@virtual
async def test_batches_alone_never_stand_still() -> None:
    scheduler = (machine := world()).scheduler()
    lines = [await scheduler.acquire(target(name), batch=True) for name in ("batch", "other")]
    await asyncio.sleep(10)
    assert not machine.runner("batch").is_held()
    assert not machine.runner("other").is_held()
    for line in lines:
        line.release()
    await scheduler.close(0)


@virtual
async def test_a_batch_has_a_fifth_of_a_machine_whose_clients_never_pause() -> None:
    scheduler = (machine := world()).scheduler()
    line = await scheduler.acquire(target("batch"), batch=True)
    client = await scheduler.acquire(target("chat"))
    held, longest, together = 0, 0, 0
    for step in range(10_000):  # 100 s; the clients take turns in its middle
        if 3000 < step < 6000 and not step % 7:
            client.release()
            client = await scheduler.acquire(target("chat"))
        await asyncio.sleep(0.01)
        together = together + 1 if machine.runner("batch").is_held() else 0
        held, longest = held + bool(together), max(longest, together)
    assert 7800 <= held <= 8100, f"{SHARE:g} s for each second of work"
    assert longest <= LONGEST * 100 + 1
    client.release()
    line.release()
    await scheduler.close(0)


@virtual
async def test_an_engine_that_is_to_end_goes_on() -> None:
    """It has to end its requests first, and to hear that it shall end."""
    scheduler = (machine := world()).scheduler()
    line = await scheduler.acquire(target("batch"), batch=True)
    client = await scheduler.acquire(target("chat"))
    engine = machine.runner("batch")
    assert engine.is_held()
    unloaded = asyncio.create_task(scheduler.unload(model_ids=["batch"]))
    await settle()
    assert not engine.is_held()
    line.release()
    await unloaded
    client.release()
    await scheduler.close(0)


@virtual
async def test_the_daemon_ends_while_an_engine_stands_still() -> None:
    scheduler = (machine := world()).scheduler()
    await scheduler.acquire(target("batch"), batch=True)
    await scheduler.acquire(target("chat"))
    engine = machine.runner("batch")
    assert engine.is_held()
    await scheduler.close(0)
    assert not engine.is_held()
    assert not machine.running
