"""What the scheduler promises a request that waits beside others, in virtual time."""

import asyncio

import pytest

from modelrunner.scheduler import Scheduler
from tests.scheduler.fakes import Engine, World, gathered, settle, target, virtual


async def answer(scheduler: Scheduler, name: str, seconds: float, *, batch: bool = False) -> float:
    """Asks and answers. Returns how long the request waited."""
    with await scheduler.acquire(target(name), batch=batch) as lease:
        await asyncio.sleep(seconds)
        return lease.waited


async def flood(scheduler: Scheduler, name: str, seconds: float, *, batch: bool = False) -> "list[asyncio.Task[float]]":
    """Requests for minutes; the model has served some of them when this returns."""
    requests = [asyncio.create_task(answer(scheduler, name, seconds, batch=batch)) for _ in range(400)]
    await asyncio.sleep(50.0)
    return requests


async def stop(scheduler: Scheduler, requests: "list[asyncio.Task[float]]") -> None:
    for request in requests:
        request.cancel()
    await gathered(requests)
    await scheduler.close(0)


@pytest.mark.parametrize(("load", "patience"), [(0.1, 1.6), (0.2, 3.2), (0.4, 6.4), (5.0, 6.5)])
def test_a_lone_request_waits_in_proportion_to_its_load(load: float, patience: float) -> None:
    """For eight times both loads, at most 6.5 s; then for the two answers that the other engine has, and its
    load."""

    @virtual
    async def test() -> None:
        world = World(10, {"flooded": Engine(6, load_seconds=load), "lone": Engine(6, load_seconds=load)})
        scheduler = world.scheduler()
        requests = await flood(scheduler, "flooded", 1.0)
        await answer(scheduler, "lone", 0.0)  # so that its load is known
        await asyncio.sleep(50.0)
        waited = await answer(scheduler, "lone", 0.0)
        assert waited <= patience + 2 * 1.0 + 0.1 + load + 1e-6
        assert waited >= patience
        await stop(scheduler, requests)

    test()


@virtual
async def test_a_lone_request_waits_less_than_ten_seconds_by_default() -> None:
    """Where models load in half a second and answer in one and a half."""
    world = World(10, {"flooded": Engine(6, load_seconds=0.5), "lone": Engine(6, load_seconds=0.5)})
    scheduler = world.scheduler()
    requests = await flood(scheduler, "flooded", 1.5)
    for _ in range(5):
        assert await answer(scheduler, "lone", 1.0) < 10.0
        await asyncio.sleep(2.0)
    await stop(scheduler, requests)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_a_lone_client_that_polls_takes_little_of_a_crowds_answers_and_waits_little(load: float) -> None:
    """24 clients of one model, and one that asks another for a moment every 2 s; room for one."""

    async def answers(polls: bool) -> tuple[int, list[float]]:
        engines = {"crowd": Engine(6, load_seconds=load), "lone": Engine(6, load_seconds=load)}
        scheduler = World(10, engines).scheduler()
        count, waits = 0, []

        async def work() -> float:
            nonlocal count
            while True:
                await answer(scheduler, "crowd", 0.2)
                count += 1

        async def poll() -> float:
            while True:
                waits.append(await answer(scheduler, "lone", 0.05))
                await asyncio.sleep(2.0)

        clients = [asyncio.create_task(client()) for client in [work] * 24 + [poll] * polls]
        await asyncio.sleep(300.0)
        await stop(scheduler, clients)
        return count, waits

    @virtual
    async def test() -> None:
        undisturbed, _ = await answers(False)
        count, waits = await answers(True)
        assert count >= 0.8 * undisturbed
        assert len(waits) > 20
        assert max(waits) < 10.0

    test()


@virtual
async def test_a_flood_of_batch_requests_delays_nobody_by_more_than_the_answers_that_run() -> None:
    world = World(10, {"batch": Engine(6, load_seconds=2.0), "chat": Engine(6, load_seconds=0.5)})
    scheduler = world.scheduler()
    requests = await flood(scheduler, "batch", 3.0, batch=True)
    for _ in range(8):
        assert await answer(scheduler, "chat", 1.0) <= 2 * 3.0 + 0.1 + 0.5 + 1e-6
        await asyncio.sleep(4.0)
    done = sum(request.done() for request in requests)
    assert done > 16, "and the batch goes on between"
    await stop(scheduler, requests)


@virtual
async def test_a_batch_is_not_starved_by_a_model_in_constant_use() -> None:
    world = World(10, {"batch": Engine(6, load_seconds=1.0), "chat": Engine(6, load_seconds=1.0)})
    scheduler = world.scheduler()

    async def chat_for_ever() -> float:
        while True:
            await answer(scheduler, "chat", 1.0)

    clients = [asyncio.create_task(chat_for_ever()) for _ in range(3)]
    await asyncio.sleep(10.0)
    assert 60.0 <= await answer(scheduler, "batch", 1.0, batch=True) < 70.0
    await stop(scheduler, clients)


@virtual
async def test_models_that_load_slowly_spend_at_most_a_third_of_the_time_with_it() -> None:
    world = World(10, {"a": Engine(6, load_seconds=40.0), "b": Engine(6, load_seconds=40.0)})
    scheduler = world.scheduler()

    async def ask_for_ever(name: str) -> float:
        while True:
            await answer(scheduler, name, 1.0)

    clients = [asyncio.create_task(ask_for_ever(name)) for name in "aabb"]
    await asyncio.sleep(1200.0)
    assert 1200.0 / (3 * 40.0) - 2 <= len(world.started) <= 1200.0 / (3 * 40.0) + 1, "and both are served"
    await stop(scheduler, clients)


@virtual
async def test_a_client_in_a_loop_keeps_its_runner_for_the_time_of_a_load() -> None:
    """It comes back within the second that its model takes to load."""
    world = World(10, {"loop": Engine(6, load_seconds=1.0), "other": Engine(6, load_seconds=1.0)})
    scheduler = world.scheduler()
    first = asyncio.create_task(answer(scheduler, "loop", 0.5))
    await asyncio.sleep(1.2)
    waiting = asyncio.create_task(answer(scheduler, "other", 0.5))
    await first
    for _ in range(3):
        await asyncio.sleep(0.9)
        assert await answer(scheduler, "loop", 0.1) == 0.0
    await asyncio.sleep(1.2)
    await settle()
    assert world.resident() == ["other"]
    await waiting
    await scheduler.close(0)


@virtual
async def test_a_lone_client_that_changes_its_model_waits_for_the_load_alone() -> None:
    """However soon after an answer, and however slowly both load; a stop takes a tenth of a second here."""
    world = World(10, {"a": Engine(6, load_seconds=5.0), "b": Engine(6, load_seconds=40.0)})
    scheduler = world.scheduler()
    for _ in range(3):
        for name, load in (("a", 5.0), ("b", 40.0)):
            assert await answer(scheduler, name, 1.0) <= load + 0.1 + 1e-6
            assert await answer(scheduler, name, 1.0) == 0.0
    await scheduler.close(0)


@virtual
async def test_two_clients_in_loops_get_many_answers_for_each_load() -> None:
    """One that asks without a pause and one that thinks for a moment: the first change of models costs a load each, and
    from then on one always waits for the other."""
    world = World(10, {"a": Engine(6, load_seconds=1.0), "b": Engine(6, load_seconds=1.0)})
    scheduler = world.scheduler()
    answers = 0

    async def ask_for_ever(name: str, pause: float) -> float:
        nonlocal answers
        while True:
            await answer(scheduler, name, 0.2)
            answers += 1
            await asyncio.sleep(pause)

    clients = [asyncio.create_task(ask_for_ever("a", 0.0)), asyncio.create_task(ask_for_ever("b", 0.5))]
    await asyncio.sleep(300.0)
    assert answers >= 10 * len(world.started)
    await stop(scheduler, clients)


@pytest.mark.parametrize(("healthy", "waited"), [(61.0, 0.0), (30.0, 1.0)])
def test_a_minute_of_health_clears_a_model_of_its_crash(healthy: float, waited: float) -> None:
    """The first crash costs no pause, the second in a row one second."""

    @virtual
    async def test() -> None:
        world = World(10, {"a": Engine(6, load_seconds=1.0)})
        scheduler = world.scheduler()
        (await scheduler.acquire(target("a", keep_alive=1000.0))).release()
        world.runner("a").die()
        await settle()
        (await scheduler.acquire(target("a", keep_alive=1000.0))).release()
        await asyncio.sleep(healthy)
        world.runner("a").die()
        await settle()
        with await scheduler.acquire(target("a")) as lease:
            assert lease.waited == pytest.approx(waited + 1.0)
        await scheduler.close(0)

    test()
