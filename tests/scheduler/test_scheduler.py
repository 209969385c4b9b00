"""The scheduler with engines that do as they are told, in virtual time."""

import asyncio
import math
from dataclasses import replace

import pytest

from modelrunner.errors import (
    BackendNotFound,
    EngineFailed,
    InsufficientMemory,
    QueueFull,
    RunnerNotFound,
    ShuttingDown,
    TimedOut,
    Unavailable,
)
from modelrunner.scheduler import Ledger, MemoryUse
from modelrunner.types import KeepAlive, RequiredMemory
from tests.scheduler.fakes import Engine, FakeRunner, World, gathered, settle, target, virtual


def elapsed(since: float) -> float:
    return asyncio.get_running_loop().time() - since


def now() -> float:
    return asyncio.get_running_loop().time()


# One model


@virtual
async def test_a_request_starts_its_model_and_says_how_long_that_took() -> None:
    world = World(10, {"a": Engine(6, load_seconds=2.0)})
    scheduler = world.scheduler()
    with await scheduler.acquire(target("a")) as lease:
        assert (lease.waited, lease.loaded) == (2.0, 2.0)
        assert scheduler.memory() == MemoryUse(RequiredMemory(10), RequiredMemory(6))
        assert scheduler.memory().free == RequiredMemory(4)
        assert scheduler.health() == "ready"  # nobody waits
    assert scheduler.health() == "ready"
    await scheduler.close(0)
    assert world.resident() == []


@virtual
async def test_a_late_joiner_waits_for_the_rest_of_the_load_only() -> None:
    world = World(10, {"a": Engine(6, load_seconds=2.0)})
    scheduler = world.scheduler()
    first = asyncio.create_task(scheduler.acquire(target("a")))
    await asyncio.sleep(1.5)
    second = await scheduler.acquire(target("a"))
    assert (second.waited, second.loaded) == (0.5, 0.5)
    assert (await first).runner is second.runner
    assert world.started == ["a"]
    await scheduler.close(0)


@virtual
async def test_warm_gives_a_lease_without_waiting_and_only_when_ready() -> None:
    world = World(10, {"a": Engine(6)})
    scheduler = world.scheduler()
    assert scheduler.warm(target("a")) is None
    (await scheduler.acquire(target("a"))).release()
    lease = scheduler.warm(target("a"))
    assert lease is not None
    assert (lease.waited, lease.loaded) == (0.0, 0.0)
    lease.release()
    lease.release()
    assert scheduler.runners()[0].leases == 0
    await scheduler.close(0)
    assert scheduler.warm(target("a")) is None


@virtual
async def test_another_revision_of_the_configuration_is_another_runner() -> None:
    world = World(12, {"a": Engine(6)})
    scheduler = world.scheduler()
    old, new = target("a"), target("a")
    new = replace(new, key=new.key._replace(revision=1))
    first, shared = await scheduler.acquire(old), await scheduler.acquire(new)
    assert first.runner is shared.runner, "a request reloads nothing"
    second = await scheduler.restart(new)
    assert first.runner is not second.runner
    await scheduler.close(0)


# Keep-alive


@pytest.mark.parametrize(("seconds", "rest"), [(0.0, 0.0), (2.0, 2.0)])
def test_an_unused_runner_ends_after_its_keep_alive(seconds: float, rest: float) -> None:
    @virtual
    async def test() -> None:
        world = World(10, {"a": Engine(6, stop_seconds=0.25)})
        scheduler = world.scheduler()
        (await scheduler.acquire(target("a"), KeepAlive(seconds))).release()
        await asyncio.sleep(rest + 0.2)
        assert [r.state for r in scheduler.runners()] == ["stopping"]
        await asyncio.sleep(0.1)
        assert world.resident() == []
        await scheduler.close(0)

    test()


@virtual
async def test_the_latest_request_to_end_decides_the_keep_alive() -> None:
    world = World(10, {"a": Engine(6)})
    scheduler = world.scheduler()
    long, short = [await scheduler.acquire(target("a"), KeepAlive(s)) for s in (1000.0, 3.0)]
    long.release()
    await asyncio.sleep(10)
    assert world.resident() == ["a"]
    short.release()
    await asyncio.sleep(4)
    assert world.resident() == []
    await scheduler.close(0)


@virtual
async def test_a_request_stops_the_idle_timer() -> None:
    world = World(10, {"a": Engine(6)})
    scheduler = world.scheduler()
    (await scheduler.acquire(target("a", keep_alive=3))).release()
    await asyncio.sleep(2)
    with await scheduler.acquire(target("a", keep_alive=3)):
        await asyncio.sleep(100)
        assert world.resident() == ["a"]
    await asyncio.sleep(4)
    assert world.resident() == []
    await scheduler.close(0)


@virtual
async def test_it_knows_when_a_runner_was_used_last_also_after_its_end() -> None:
    world = World(10, {"a": Engine(6)})
    scheduler = world.scheduler()
    assert scheduler.idle_for() == math.inf
    with await scheduler.acquire(target("a")):
        assert scheduler.idle_for() is None
        await asyncio.sleep(100)
    await asyncio.sleep(20)
    assert scheduler.idle_for() == pytest.approx(20)
    await scheduler.unload(all=True)
    assert scheduler.runners() == []
    await asyncio.sleep(20)
    assert scheduler.idle_for() == pytest.approx(40, abs=1)
    starting = asyncio.create_task(scheduler.acquire(target("a")))
    await asyncio.sleep(0)
    assert scheduler.idle_for() is None
    (await starting).release()
    await scheduler.close(0)


@virtual
async def test_without_an_end_it_stays_until_the_room_is_needed() -> None:
    world = World(10, {"a": Engine(6), "b": Engine(6)})
    scheduler = world.scheduler()
    (await scheduler.acquire(target("a"), KeepAlive(math.inf))).release()
    await asyncio.sleep(1e7)
    assert world.resident() == ["a"]
    (await scheduler.acquire(target("b"))).release()
    assert world.resident() == ["b"]
    await scheduler.close(0)


# Loads and evictions


@virtual
async def test_a_load_that_everybody_left_is_finished_and_kept() -> None:
    world = World(10, {"a": Engine(6, load_seconds=3.0)})
    scheduler = world.scheduler()
    only = asyncio.create_task(scheduler.acquire(target("a", keep_alive=10)))
    await asyncio.sleep(1.0)
    only.cancel()
    await asyncio.sleep(3.0)
    lease = scheduler.warm(target("a", keep_alive=10))
    assert lease is not None
    lease.release()
    await scheduler.close(0)


@virtual
async def test_a_failing_model_is_started_at_most_seven_times_a_minute() -> None:
    world = World(10, {"a": Engine(6, load_seconds=0.0, fails=EngineFailed("no"))})
    scheduler = world.scheduler()
    for _ in range(600):
        await gathered([scheduler.acquire(target("a"))])
        await asyncio.sleep(0.1)
    assert 5 <= len(world.started) <= 7
    world.engines["a"].fails = None
    await asyncio.sleep(60)
    (await scheduler.acquire(target("a"))).release()
    await scheduler.close(0)


@virtual
async def test_a_small_model_is_not_kept_waiting_by_a_large_one_that_cannot_start_yet() -> None:
    world = World(10, {"busy": Engine(4), "large": Engine(8), "tiny": Engine(1)})
    scheduler = world.scheduler(patience=50.0)
    with await scheduler.acquire(target("busy")):
        large = asyncio.create_task(scheduler.acquire(target("large")))
        await settle()
        (await scheduler.acquire(target("tiny"))).release()
    (await large).release()
    assert world.started == ["busy", "tiny", "large"]
    await scheduler.close(0)


# Limits


@virtual
async def test_the_queue_of_a_model_is_bounded_and_its_own() -> None:
    world = World(12, {"a": Engine(6), "b": Engine(6)})
    scheduler = world.scheduler(max_queue=3)
    waiting = [asyncio.create_task(scheduler.acquire(target("a", parallel=4))) for _ in range(3)]
    await settle()
    with pytest.raises(QueueFull, match=r"^3 requests wait for a, as many as") as caught:
        await scheduler.acquire(target("a", parallel=4))
    assert caught.value.retry_after is not None
    (await scheduler.acquire(target("b"))).release()
    for lease in await asyncio.gather(*waiting):
        lease.release()
    await scheduler.close(0)


@virtual
async def test_an_engine_gets_a_request_for_each_sequence_and_the_pause_is_measured() -> None:
    world = World(10, {"a": Engine(6)})
    scheduler = world.scheduler(max_queue=2)
    with await scheduler.acquire(target("a", parallel=2)):
        await asyncio.sleep(12.0)
    leases = [await scheduler.acquire(target("a", parallel=2)) for _ in range(2)]
    assert scheduler.warm(target("a", parallel=2)) is None
    waiting = [asyncio.create_task(scheduler.acquire(target("a", parallel=2))) for _ in range(2)]
    await settle()
    with pytest.raises(QueueFull) as caught:
        await scheduler.acquire(target("a", parallel=2))
    assert caught.value.retry_after == pytest.approx(6.0)
    assert caught.value.message.startswith("2 requests wait for a, as many as `max_queue` allows")
    leases.pop().release()
    for ticket in waiting:
        (await ticket).release()
    (await scheduler.acquire(target("a", parallel=2))).release()
    await scheduler.close(0)


@virtual
async def test_a_request_waits_at_most_so_long_and_the_load_goes_on() -> None:
    world = World(10, {"a": Engine(6, load_seconds=50.0)})
    scheduler = world.scheduler(max_wait=20.0)
    began = now()
    with pytest.raises(TimedOut):
        await scheduler.acquire(target("a"))
    assert elapsed(began) == pytest.approx(20.0)
    await asyncio.sleep(40.0)
    assert scheduler.warm(target("a")) is not None
    await scheduler.close(0)


@virtual
async def test_a_runner_that_was_drained_for_a_request_that_left_is_loaded_again_when_it_is_asked_for() -> None:
    world = World(10, {"a": Engine(6), "b": Engine(6)})
    scheduler = world.scheduler(max_wait=20.0)
    lease = await scheduler.acquire(target("a"))
    with pytest.raises(TimedOut):
        await scheduler.acquire(target("b"))
    waiting = asyncio.create_task(scheduler.acquire(target("a")))
    await settle()
    lease.release()
    (await waiting).release()
    assert world.started == ["a", "a"]
    await scheduler.close(0)


@virtual
async def test_what_can_never_fit_is_refused_without_touching_anything() -> None:
    world = World(10, {"a": Engine(6), "huge": Engine(11)})
    scheduler = world.scheduler()
    (await scheduler.acquire(target("a"))).release()
    with pytest.raises(InsufficientMemory, match="needed 11, free 4, budget 10 bytes"):
        await scheduler.acquire(target("huge"))
    assert world.started == ["a"]
    assert world.resident() == ["a"]
    await scheduler.close(0)


@virtual
async def test_a_budget_that_grows_is_seen() -> None:
    world = World(5, {"a": Engine(6)})
    scheduler = world.scheduler()
    with pytest.raises(InsufficientMemory):
        await scheduler.acquire(target("a"))
    world.budget = 6
    await asyncio.sleep(2)
    (await scheduler.acquire(target("a"))).release()
    await scheduler.close(0)


@virtual
async def test_an_unknown_backend_answers_everybody() -> None:
    world = World(10, {"a": Engine(6)})
    scheduler = world.scheduler()
    stray = replace(target("a"), key=target("a").key._replace(backend="nobody"))
    errors = await gathered(scheduler.acquire(stray) for _ in range(3))
    assert [type(e) for e in errors] == [BackendNotFound] * 3
    await scheduler.close(0)


# Crashes


@virtual
async def test_after_a_crash_the_next_request_gets_a_new_runner() -> None:
    world = World(10, {"a": Engine(6)})
    scheduler = world.scheduler()
    lease = await scheduler.acquire(target("a"))
    world.runner("a").die("the engine was ended by signal 11")
    assert await lease.engine_ended(within=5.0)
    assert lease.runner.failure is not None
    again = await scheduler.acquire(target("a"))
    assert again.runner is not lease.runner
    lease.release()
    assert scheduler.runners()[0].leases == 1, "the lease of the dead one is not taken from the new one"
    await scheduler.close(0)


@virtual
async def test_an_engine_that_lives_has_not_ended() -> None:
    world = World(10, {"a": Engine(6)})
    scheduler = world.scheduler()
    began = now()
    lease = await scheduler.acquire(target("a"))
    assert not await lease.engine_ended(within=0.5)
    assert elapsed(began) == pytest.approx(1.5)
    await scheduler.close(0)


# Memory


@virtual
async def test_what_was_measured_counts_from_then_on() -> None:
    world = World(10, {"a": Engine(6, measured=4)})
    ledger = Ledger()
    scheduler = world.scheduler(ledger=ledger)
    (await scheduler.acquire(target("a"))).release()
    await settle()
    assert scheduler.memory().used.ram == 4
    assert [(r.memory.estimated.ram, r.memory.measured.ram) for r in scheduler.runners() if r.memory.measured] == [
        (6, 4)
    ]
    assert await ledger.required(world.backend, target("a").spec) == RequiredMemory(4)
    await scheduler.close(0)


@virtual
async def test_an_engine_that_does_not_use_its_device_is_said_and_not_remembered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """CUDA could not begin, and the engine computes on the processor."""
    world = World(20, {"a": Engine(2, vram=(6,), measured=RequiredMemory(8, (0,)))}, vram=(10,))
    ledger = Ledger()
    scheduler = world.scheduler(ledger=ledger)
    lease = await scheduler.acquire(target("a"))
    lease.release()
    await settle()
    assert (scheduler.memory().used.ram, scheduler.memory().used.vram) == (8, (0,))
    assert [r.variant for r in scheduler.runners()] == ["computes elsewhere than on device 0"]
    assert "a computes elsewhere than on device 0" in caplog.text
    assert await ledger.required(world.backend, target("a").spec) == RequiredMemory(2, (6,))
    await scheduler.close(0)


@virtual
async def test_what_is_measured_of_a_process_on_its_way_out_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(10, {"a": Engine(6, stop_seconds=5.0)})
    ledger = Ledger()

    async def slowly(runner: object) -> RequiredMemory:
        await asyncio.sleep(1.0)
        return RequiredMemory(1)

    monkeypatch.setattr(FakeRunner, "memory", slowly)
    scheduler = world.scheduler(ledger=ledger)
    (await scheduler.acquire(target("a"), KeepAlive(0))).release()
    await asyncio.sleep(2.0)
    assert scheduler.memory().used.ram == 6
    await scheduler.close(0)
    assert await ledger.required(world.backend, target("a").spec) == RequiredMemory(6)


@virtual
async def test_the_estimate_is_asked_for_once_however_many_wait() -> None:
    world = World(10, {"a": Engine(6)})
    scheduler = world.scheduler()
    for _ in range(3):
        for lease in await asyncio.gather(*(scheduler.acquire(target("a", parallel=4)) for _ in range(4))):
            lease.release()
        await scheduler.unload(all=True)
    assert world.backend.estimates == 3
    await scheduler.close(0)


# Addressing a runner, unloading, closing


@virtual
async def test_a_runner_is_leased_by_its_id_and_never_loaded_for_it() -> None:
    world = World(10, {"a": Engine(6)})
    scheduler = world.scheduler()
    loading = asyncio.create_task(scheduler.acquire(target("a")))
    await settle()
    [runner] = scheduler.runners()
    with pytest.raises(Unavailable):
        scheduler.lease_runner(runner.id)
    (await loading).release()
    with scheduler.lease_runner(runner.id) as lease:
        assert lease.runner.id == runner.id
    await scheduler.unload(all=True)
    with pytest.raises(RunnerNotFound):
        scheduler.lease_runner(runner.id)
    assert world.started == ["a"]
    await scheduler.close(0)


@virtual
async def test_unload_ends_what_was_asked_and_waits_for_leases() -> None:
    world = World(10, {"a": Engine(3), "b": Engine(3), "c": Engine(3)})
    scheduler = world.scheduler()
    for name in "abc":
        (await scheduler.acquire(target(name))).release()
    lease = await scheduler.acquire(target("a"))
    asyncio.get_running_loop().call_later(5.0, lease.release)
    began = now()
    answer = await scheduler.unload(model_ids=["a", "b"])
    assert elapsed(began) == pytest.approx(5.1)
    assert (sorted(answer.models), answer.kept) == (["a", "b"], ())
    assert world.resident() == ["c"]
    assert [r.model_id for r in scheduler.runners()] == ["c"]
    assert (await scheduler.unload(backend="other")).models == ()
    assert (await scheduler.unload()).models == ()
    assert (await scheduler.unload(backend="fake")).models == ("c",)
    await scheduler.close(0)


@virtual
async def test_unload_says_what_it_could_not_end_in_time() -> None:
    world = World(10, {"a": Engine(3), "slow": Engine(3, load_seconds=50)})
    scheduler = world.scheduler(drain_limit=4.0)
    lease = await scheduler.acquire(target("a"))
    loading = asyncio.create_task(scheduler.acquire(target("slow")))
    await settle()
    answer = await scheduler.unload(all=True)
    assert answer.models == ()
    assert ["1 request" in answer.kept[0].reason, "loading" in answer.kept[1].reason] == [True, True]
    assert scheduler.warm(target("a")) is None, "but it takes nothing new"
    lease.release()
    (await loading).release()
    assert world.resident() == ["slow"]
    await scheduler.close(0)


@virtual
async def test_forced_unload_ends_leased_and_loading_runners_at_once() -> None:
    world = World(10, {"a": Engine(3), "slow": Engine(3, load_seconds=50)})
    scheduler = world.scheduler()
    lease = await scheduler.acquire(target("a"))
    loading = asyncio.create_task(scheduler.acquire(target("slow")))
    await settle()
    began = now()
    answer = await scheduler.unload(all=True, force=True)
    assert elapsed(began) < 1.0
    assert sorted(answer.models) == ["a", "slow"]
    assert [type(e) for e in await gathered([loading])] == [Unavailable]
    assert await lease.engine_ended(within=0)
    lease.release()
    await scheduler.close(0)


@virtual
async def test_who_comes_while_its_model_is_unloaded_gets_it_loaded_again() -> None:
    world = World(10, {"a": Engine(3, stop_seconds=3.0)})
    scheduler = world.scheduler()
    (await scheduler.acquire(target("a"))).release()
    unloading = asyncio.create_task(scheduler.unload(all=True))
    await settle()
    (await scheduler.acquire(target("a"))).release()
    assert (await unloading).models == ("a",)
    assert world.started == ["a", "a"]
    await scheduler.close(0)


@virtual
async def test_in_use_means_leased_or_waited_for() -> None:
    world = World(10, {"a": Engine(3)})
    scheduler = world.scheduler()
    assert not scheduler.uses("a")
    waiting = asyncio.create_task(scheduler.acquire(target("a")))
    await settle()
    assert scheduler.uses("a")
    lease = await waiting
    assert scheduler.uses("a")
    lease.release()
    assert not scheduler.uses("a")
    assert world.resident() == ["a"]
    await scheduler.close(0)


@virtual
async def test_clients_wait_from_their_request_to_its_end_and_batches_do_not_count() -> None:
    world = World(10, {"a": Engine(3)})
    scheduler = world.scheduler()
    assert not scheduler.awaited()
    waiting = asyncio.create_task(scheduler.acquire(target("a"), batch=True))
    await settle()
    assert not scheduler.awaited()
    batch = await waiting
    waiting = asyncio.create_task(scheduler.acquire(target("a", parallel=2)))
    lease = await waiting
    assert scheduler.awaited()
    waiting = asyncio.create_task(scheduler.acquire(target("a", parallel=2)))
    await settle()
    lease.release()
    assert scheduler.awaited()
    (await waiting).release()
    assert not scheduler.awaited()
    batch.release()
    waiting = asyncio.create_task(scheduler.acquire(target("b")))
    await settle()
    await scheduler.close(0)


@virtual
async def test_close_lets_leases_end_and_refuses_the_rest() -> None:
    world = World(9, {"a": Engine(3), "b": Engine(3), "slow": Engine(3, load_seconds=99)})
    scheduler = world.scheduler()
    (await scheduler.acquire(target("b"))).release()
    lease = await scheduler.acquire(target("a"))
    loading = asyncio.create_task(scheduler.acquire(target("slow")))
    await settle()
    asyncio.get_running_loop().call_later(5.0, lease.release)
    began = now()
    closing = asyncio.create_task(scheduler.close(30.0))
    await settle()
    refused = await gathered([loading, scheduler.acquire(target("a"))])
    assert [(type(error), error.retry_after) for error in refused] == [(ShuttingDown, 5.0)] * 2
    assert scheduler.health() == "shutting_down"
    await closing
    assert elapsed(began) == pytest.approx(5.1)
    assert scheduler.runners() == []


@virtual
async def test_close_does_not_wait_beyond_its_limit() -> None:
    world = World(9, {"a": Engine(3, stop_seconds=0.5)})
    scheduler = world.scheduler()
    await scheduler.acquire(target("a"))
    began = now()
    await scheduler.close(3.0)
    assert elapsed(began) == pytest.approx(3.5)
    assert world.resident() == []
    assert len(asyncio.all_tasks()) == 1


# What is shown


@virtual
async def test_the_list_of_runners_says_what_each_is_doing() -> None:
    world = World(10, {"a": Engine(3), "b": Engine(3)})
    scheduler = world.scheduler()
    (await scheduler.acquire(target("a", keep_alive=math.inf, pinned=True))).release()
    waiting = [asyncio.create_task(scheduler.acquire(target("b"))) for _ in range(2)]
    await settle()
    a, b = scheduler.runners()
    assert (a.state, a.leases, a.pinned, a.keep_alive, a.expires_at) == ("ready", 0, True, KeepAlive(math.inf), None)
    assert (b.state, b.queued, b.last_used) == ("starting", 2, None)
    for lease in await asyncio.gather(*waiting):
        lease.release()
    _, b = scheduler.runners()
    assert (b.state, b.leases, b.queued) == ("ready", 0, 0)
    assert b.expires_at is not None
    assert b.last_used is not None
    assert b.expires_at > b.last_used > b.started_at
    await scheduler.close(0)


@virtual
async def test_idle_runners_yield_to_other_programs_within_five_seconds() -> None:
    world = World(10, {"a": Engine(3), "b": Engine(3), "c": Engine(3)})
    scheduler = world.scheduler()
    watch = asyncio.create_task(scheduler.watch_budget())
    for name in "abc":
        (await scheduler.acquire(target(name))).release()
        await asyncio.sleep(1)
    busy = await scheduler.acquire(target("a"))
    world.budget = 5
    await asyncio.sleep(5)
    assert world.resident() == ["a"]
    busy.release()
    watch.cancel()
    await scheduler.close(0)
