"""Batches beside clients of the same model get a runner of their own, where memory is free."""

import asyncio
from typing import Any

from modelrunner.scheduler import Lease, Scheduler, Target
from modelrunner.scheduler.fairness import KEPT_FREE
from modelrunner.types import RunnerKey
from tests.scheduler.fakes import Engine, FakeRunner, World, settle, target, virtual

MODEL = target("m", parallel=2)
OWN = MODEL.key._replace(batch=True)


async def a_client_was_here(scheduler: Scheduler, wanted: Target = MODEL) -> None:
    (await scheduler.acquire(wanted)).release()


def ask(scheduler: Scheduler, lines: int, owner: str | None = None) -> list[asyncio.Task[Lease]]:
    return [asyncio.create_task(scheduler.acquire(MODEL, batch=True, owner=owner)) for _ in range(lines)]


async def finish(lines: list[asyncio.Task[Lease]]) -> list[RunnerKey]:
    """Each line for a second, in turn; where they were answered."""
    where = []
    for line in lines:
        lease = await line
        where.append(lease.runner.key)
        await asyncio.sleep(1)
        lease.release()
    return where


def runners(machine: World) -> dict[RunnerKey, FakeRunner]:
    return machine.running


@virtual
async def test_a_batch_beside_a_client_has_a_runner_that_stands_still_for_it() -> None:
    scheduler = (machine := World(10, {"m": Engine(4)})).scheduler()
    await a_client_was_here(scheduler)
    lines = ask(scheduler, 5)
    await asyncio.sleep(2)
    assert set(runners(machine)) == {MODEL.key, OWN}
    client = scheduler.warm(MODEL)
    assert client is not None, "the place of the next client is free"
    assert client.runner.key == MODEL.key
    assert runners(machine)[OWN].is_held()
    client.release()
    assert not runners(machine)[OWN].is_held()
    assert (await finish(lines)) == [MODEL.key] + [OWN] * 4, "one was under way before there was another runner"
    line = scheduler.warm(MODEL, batch=True)
    assert line is not None
    assert line.runner.key == OWN
    line.release()
    assert [view.variant for view in scheduler.runners()] == ["", "for batches, beside the clients' runner"]
    await scheduler.close(0)


@virtual
async def test_lines_without_a_client_or_too_few_of_them_share_the_runner() -> None:
    scheduler = (machine := World(10, {"m": Engine(4)})).scheduler()
    assert await finish(ask(scheduler, 6)) == [MODEL.key] * 6
    await a_client_was_here(scheduler)
    assert await finish(ask(scheduler, 2)) == [MODEL.key] * 2, (
        "one has a place and one waits, where two fill the engine"
    )
    await asyncio.sleep(KEPT_FREE)
    assert await finish(ask(scheduler, 6)) == [MODEL.key] * 6, "the client is long gone"
    assert machine.started == ["m"]
    await scheduler.close(0)


@virtual
async def test_nothing_is_evicted_for_it() -> None:
    scheduler = (machine := World(10, {"m": Engine(4), "idle": Engine(3)})).scheduler()
    await a_client_was_here(scheduler, target("idle"))
    await a_client_was_here(scheduler)
    assert await finish(ask(scheduler, 6)) == [MODEL.key] * 6
    assert machine.started == ["idle", "m"]
    await scheduler.unload(model_ids=["idle"])
    await a_client_was_here(scheduler)
    assert (await finish(ask(scheduler, 6)))[1:] == [OWN] * 5, "now there is room"
    await scheduler.close(0)


@virtual
async def test_it_goes_for_a_client_of_another_model_and_its_lines_share_again() -> None:
    scheduler = (machine := World(10, {"m": Engine(4), "other": Engine(4)})).scheduler()
    await a_client_was_here(scheduler)
    lines = ask(scheduler, 8)
    await asyncio.sleep(2)
    client = await scheduler.acquire(MODEL)
    finished = asyncio.create_task(finish(lines))
    other = await scheduler.acquire(target("other"))
    assert set(runners(machine)) == {MODEL.key, other.runner.key}
    assert await finished == [MODEL.key] + [OWN] * 2 + [MODEL.key] * 5
    for lease in (client, other):
        lease.release()
    await scheduler.close(0)


@virtual
async def test_lines_outlive_a_runner_of_their_own_that_dies_as_it_loads() -> None:
    scheduler = (machine := World(10, {"m": Engine(4, load_seconds=3)})).scheduler()
    await a_client_was_here(scheduler)
    finished = asyncio.create_task(finish(ask(scheduler, 6)))
    await asyncio.sleep(1)
    runners(machine)[OWN].die()
    await settle()
    assert set(runners(machine)) == {MODEL.key}, "it is not tried again at once"
    assert scheduler.diagnostics.failing({"m": "m"}) == {}
    where = await finished
    assert where[:2] == [MODEL.key] * 2
    assert where[3:] == [OWN] * 3, "a second later it was"
    await scheduler.close(0)


@virtual
async def test_lines_outlive_a_runner_of_their_own_that_cannot_be_made() -> None:
    machine = World(10, {"m": Engine(4)})
    made, make = [], machine.make_runner

    def failing(key: RunnerKey, spec: Any) -> Any:
        made.append(key)
        if key.batch:
            raise OSError(24, "Too many open files")
        return make(key, spec)

    machine.make_runner = failing  # type: ignore[method-assign]
    scheduler = machine.scheduler()
    await a_client_was_here(scheduler)
    assert await finish(ask(scheduler, 6)) == [MODEL.key] * 6
    assert made == [MODEL.key, OWN]
    await scheduler.close(0)


@virtual
async def test_a_client_whose_own_runner_is_gone_shares_the_one_of_batches() -> None:
    scheduler = (machine := World(10, {"m": Engine(4)})).scheduler()
    (await scheduler.acquire(target("m", keep_alive=5.0))).release()
    lines = [asyncio.create_task(scheduler.acquire(target("m", keep_alive=5.0), batch=True)) for _ in range(10)]
    finished = asyncio.create_task(finish(lines))
    await asyncio.sleep(6.5)
    assert set(runners(machine)) == {OWN}
    client = await scheduler.acquire(target("m", keep_alive=5.0))
    assert client.runner.key == OWN
    assert not runners(machine)[OWN].is_held()
    client.release()
    await finished
    assert machine.started == ["m", "m"]
    await scheduler.close(0)


@virtual
async def test_it_is_unloaded_with_the_model_and_never_pinned() -> None:
    scheduler = (machine := World(10, {"m": Engine(4), "other": Engine(4)})).scheduler()
    pinned = target("m", pinned=True)
    await a_client_was_here(scheduler, pinned)
    lines = [asyncio.create_task(scheduler.acquire(pinned, batch=True)) for _ in range(4)]
    await finish(lines)
    assert [view.pinned for view in scheduler.runners()] == [True, False]
    await a_client_was_here(scheduler, target("other"))
    assert set(runners(machine)) == {MODEL.key, target("other").key}
    await a_client_was_here(scheduler, pinned)
    await scheduler.unload(model_ids=["other"])
    await finish([asyncio.create_task(scheduler.acquire(pinned, batch=True)) for _ in range(4)])
    assert OWN in runners(machine)
    assert (await scheduler.unload(model_ids=["m"])).models == ("m", "m")
    assert not runners(machine)
    await scheduler.close(0)


@virtual
async def test_its_prompt_caches_are_nobodys() -> None:
    """What a run of the clients' runner saved for an owner is not overwritten by that owner's batch."""
    scheduler = (machine := World(10, {"m": Engine(4)})).scheduler()
    await a_client_was_here(scheduler)
    lines = ask(scheduler, 4, owner="ada")
    await asyncio.sleep(2)
    assert runners(machine)[OWN].loaded_for is None
    assert not runners(machine)[OWN].owners
    assert runners(machine)[MODEL.key].owners == {"ada"}
    await finish(lines)
    await scheduler.close(0)


@virtual
async def test_lines_that_are_given_up_while_it_loads_leave_nothing() -> None:
    scheduler = (machine := World(10, {"m": Engine(4)})).scheduler()
    await a_client_was_here(scheduler)
    lines = ask(scheduler, 6)
    await settle()
    assert OWN in runners(machine)
    for line in lines[1:]:
        line.cancel()
    await asyncio.gather(*lines[1:], return_exceptions=True)
    (await lines[0]).release()
    await asyncio.sleep(2)
    assert scheduler.waiting() == {}
    assert not scheduler.uses("m")
    client = scheduler.warm(MODEL)
    assert client is not None
    client.release()
    await scheduler.close(0)


@virtual
async def test_a_restart_with_another_configuration_ends_it_too() -> None:
    scheduler = (machine := World(20, {"m": Engine(4)})).scheduler()
    await a_client_was_here(scheduler)
    lines = ask(scheduler, 8)
    await asyncio.sleep(2)
    finished = asyncio.create_task(finish(lines))
    newer = Target(MODEL.key._replace(revision=1), MODEL.spec, MODEL.keep_alive)
    (await scheduler.restart(newer)).release()
    scheduler.retire(newer)
    where = await finished
    assert {key.revision for key in where[-4:]} == {1}
    await asyncio.sleep(1)
    assert {key.revision for key in runners(machine)} == {1}
    await scheduler.close(0)
