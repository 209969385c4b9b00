"""What the other schedulers of this kind get wrong, each as a test of its own, in virtual time."""

import asyncio
from dataclasses import replace

import pytest

from modelrunner.errors import BackingOff, EngineFailed, InsufficientMemory
from modelrunner.scheduler import Lease, Scheduler
from modelrunner.types import KeepAlive
from tests.scheduler.fakes import Engine, World, gathered, settle, target, virtual


def now() -> float:
    return asyncio.get_running_loop().time()


async def use(scheduler: Scheduler, name: str) -> None:
    (await scheduler.acquire(target(name))).release()


@virtual
async def test_a_victim_that_is_used_again_while_it_is_evicted_comes_back_and_nothing_hangs() -> None:
    """Ollama waits for one event that a request with a keep-alive of its own prevents: no model loads any more."""
    world = World(10, {"a": Engine(6, stop_seconds=5.0), "b": Engine(6)})
    scheduler = world.scheduler()
    await use(scheduler, "a")
    b = asyncio.create_task(scheduler.acquire(target("b")))
    await asyncio.sleep(1.0)  # a is stopping, and slow about it
    again = asyncio.create_task(scheduler.acquire(target("a"), KeepAlive(500)))
    (await b).release()
    (await again).release()
    assert world.started == ["a", "b", "a"]
    await scheduler.close(0)


@virtual
async def test_the_client_that_caused_a_load_may_leave() -> None:
    """Ollama aborts the load, and everybody else's wait with it, when the client that began it gives up."""
    world = World(10, {"a": Engine(6, load_seconds=3.0)})
    scheduler = world.scheduler()
    first = asyncio.create_task(scheduler.acquire(target("a")))
    await asyncio.sleep(1.0)
    second = asyncio.create_task(scheduler.acquire(target("a")))
    await asyncio.sleep(1.0)
    first.cancel()
    with await second as lease:
        assert lease.waited == 2.0
    assert world.started == ["a"]
    await scheduler.close(0)


@virtual
async def test_fifty_waiters_for_a_failing_model_are_one_start_and_fifty_answers() -> None:
    """docker/model-runner starts a failing model once for each of those who wait."""
    world = World(10, {"a": Engine(6, fails=EngineFailed("unknown architecture"))})
    scheduler = world.scheduler()
    errors = await gathered(scheduler.acquire(target("a")) for _ in range(50))
    assert [str(e) for e in errors] == ["unknown architecture"] * 50
    assert world.started == ["a"]
    with pytest.raises(BackingOff) as caught:
        await scheduler.acquire(target("a"))
    assert caught.value.retry_after == pytest.approx(1.0)
    await scheduler.close(0)


@virtual
async def test_a_configuration_changed_during_a_load_neither_aborts_it_nor_is_served_by_it_unasked() -> None:
    """docker/model-runner serves the old settings under the new ones' name, or answers 409 while it loads."""
    world = World(12, {"a": Engine(6, load_seconds=4.0)})
    scheduler = world.scheduler()
    old = target("a")
    new = replace(old, key=old.key._replace(revision=1), spec=replace(old.spec, context_size=1024))
    loading = asyncio.create_task(scheduler.acquire(old))
    await asyncio.sleep(1.0)
    restarting = asyncio.create_task(scheduler.restart(new))
    with await loading as lease:
        assert lease.runner.spec.context_size == 512
        assert lease.waited == 4.0
    with await restarting as lease:
        assert lease.runner.spec.context_size == 1024
    assert world.started == ["a", "a"]
    await scheduler.close(0)


@virtual
async def test_an_engine_that_ignores_being_stopped_holds_nobody_else_up() -> None:
    """docker/model-runner waits for it without a limit, with the loader's lock held: no list, no load, no release."""
    world = World(12, {"stuck": Engine(4, stop_seconds=60.0), "b": Engine(4), "c": Engine(4)})
    scheduler = world.scheduler()
    (await scheduler.acquire(target("stuck"), KeepAlive(0))).release()
    await settle()
    with await scheduler.acquire(target("b")):
        began = now()
        for _ in range(100):
            await use(scheduler, "b")
        assert now() == began
    await use(scheduler, "c")
    assert now() == began + 1.0
    assert world.resident() == ["b", "c", "stuck"]
    await scheduler.close(0)


@virtual
async def test_a_pinned_model_stays_and_who_needs_its_room_is_told_so() -> None:
    """docker/model-runner evicts it under pressure like anything that is not in use."""
    world = World(10, {"pinned": Engine(6), "b": Engine(6), "c": Engine(4)})
    scheduler = world.scheduler()
    (await scheduler.acquire(target("pinned", keep_alive=0, pinned=True))).release()
    with pytest.raises(InsufficientMemory, match="needed 6, free 4, budget 10 bytes"):
        await scheduler.acquire(target("b"))
    await use(scheduler, "c")
    assert world.resident() == ["c", "pinned"]
    await scheduler.close(0)


@virtual
async def test_a_busy_model_does_not_starve_another() -> None:
    """llama-swap, Ollama and llama-server's router let a ready model take requests as long as there are any."""
    world = World(10, {"a": Engine(6), "b": Engine(6)})
    scheduler = world.scheduler(patience=5.0)
    answers = 0

    async def stream_for_ever() -> None:
        nonlocal answers
        while True:
            with await scheduler.acquire(target("a")):
                await asyncio.sleep(2.0)
                answers += 1

    clients = [asyncio.create_task(stream_for_ever()) for _ in range(3)]
    await asyncio.sleep(2.0)
    with await scheduler.acquire(target("b")) as lease:
        longest = 25.0 + 2.0 + 0.1 + 1.0  # five patiences (one queues for two), a stream's rest, a stop, a load
        assert 5.0 <= lease.waited <= longest + 1e-6
    seen = answers
    await asyncio.sleep(12.0)
    assert answers > seen, "and the others go on after it"
    for client in clients:
        client.cancel()
    await gathered(clients)
    await scheduler.close(0)


@virtual
async def test_the_victim_is_neither_the_first_by_name_nor_one_of_a_size_that_does_not_help() -> None:
    """Ollama's victim is the first by keep-alive and the hash of its file, whatever its size or its last use."""
    world = World(10, {"aaa": Engine(4), "small": Engine(1), "zzz": Engine(5), "x": Engine(5)})
    scheduler = world.scheduler()
    for name in ("zzz", "small", "aaa"):
        await use(scheduler, name)
        await asyncio.sleep(10.0)
    await use(scheduler, "x")
    assert world.resident() == ["aaa", "small", "x"]
    await scheduler.close(0)


@virtual
async def test_one_more_model_evicts_no_more_than_it_needs() -> None:
    """docker/model-runner evicts everything that is not in use, all at once."""
    world = World(10, {**{f"m{i}": Engine(2) for i in range(5)}, "x": Engine(4)})
    scheduler = world.scheduler()
    for name in ("m0", "m1", "m2", "m3", "m4", "m0"):
        await use(scheduler, name)
        await asyncio.sleep(1)
    await use(scheduler, "x")
    assert world.resident() == ["m0", "m3", "m4", "x"]
    await scheduler.close(0)


@virtual
async def test_memory_that_ran_out_is_made_room_for_and_the_load_tried_again() -> None:
    """docker/model-runner answers with the crash of the second model while the first one sits idle."""
    world = World(10, {"a": Engine(5), "b": Engine(5, holds=6)}, physical=10)
    scheduler = world.scheduler()
    await use(scheduler, "a")
    await use(scheduler, "b")
    assert world.started == ["a", "b", "b"]
    assert world.resident() == ["b"]
    await scheduler.close(0)


@virtual
async def test_two_models_in_turns_do_not_spend_their_time_with_loading() -> None:
    """llama-swap and llama-server's router load a model anew for every single request of two clients in turns."""
    world = World(10, {"a": Engine(6, load_seconds=3.0), "b": Engine(6, load_seconds=3.0)})
    scheduler = world.scheduler(patience=5.0)
    answers = {"a": 0, "b": 0}

    async def ask_for_ever(name: str) -> None:
        while True:
            with await scheduler.acquire(target(name)):
                await asyncio.sleep(0.5)
            answers[name] += 1

    clients = [asyncio.create_task(ask_for_ever(name)) for name in answers]
    await asyncio.sleep(300.0)
    for client in clients:
        client.cancel()
    await gathered(clients)
    assert min(answers.values()) > 0.3 * 300 / 0.5, "two thirds of the time they serve"
    assert len(world.started) <= 1 + 300 / (3 * 3.0), "the first switch comes before both loads are known"
    await scheduler.close(0)


@virtual
async def test_a_flood_of_one_caller_does_not_keep_another_from_its_turn() -> None:
    """Ollama, llama-swap and llama-server's router serve in the order of arrival: one client's hundred come before
    another's one."""
    world = World(10, {"a": Engine(6)})
    scheduler = world.scheduler()

    async def ask(caller: str, batch: bool = False) -> str:
        with await scheduler.acquire(target("a", parallel=4), caller=caller, batch=batch):
            await asyncio.sleep(1.0)
        return caller

    done: list[str] = []
    tasks = [asyncio.create_task(ask("many")) for _ in range(100)]
    await asyncio.sleep(5.0)
    tasks += [asyncio.create_task(ask("one"))]
    for task in tasks:
        task.add_done_callback(lambda t: done.append(t.result()))
    began = now()
    await tasks[-1]
    assert now() - began <= 2.0 + 1e-6, "what runs, and its own"
    await asyncio.gather(*tasks)
    assert now() == pytest.approx(1000.0 + 1.0 + 101 / 4, abs=1.5), "and the engine never waited"
    await scheduler.close(0)


@virtual
async def test_a_crashing_model_is_given_up_with_its_last_words_and_not_started_over_and_over() -> None:
    """llama-server's router and docker/model-runner start it for every request, as fast as they come."""
    world = World(10, {"a": Engine(6, load_seconds=0.0)})
    scheduler = world.scheduler()
    errors = []
    for _ in range(600):
        try:
            lease: Lease = await asyncio.wait_for(scheduler.acquire(target("a")), 0.05)
        except TimeoutError:
            pass
        except BackingOff as error:
            errors.append(error)
        else:
            world.runner("a").die("the engine was ended by signal 11: ggml_abort")
            await lease.engine_ended(within=1.0)
            lease.release()
        await asyncio.sleep(0.05)
    assert 4 <= len(world.started) <= 7
    assert "5 times in a row" in errors[0].message
    assert "ggml_abort" in errors[0].message
    assert errors[0].retry_after is not None
    assert errors[0].retry_after <= 60.0
    await asyncio.sleep(60.0)
    await use(scheduler, "a")
    await scheduler.close(0)
