"""A backend that fails, or gives figures that are none: its own models are refused with its name, the others go on."""

import asyncio
from typing import Any

import pytest

from modelrunner.errors import EngineFailed
from modelrunner.scheduler import Ledger
from modelrunner.types import RequiredMemory, RunnerKey, RunSpec, Variant
from tests.scheduler.fakes import Engine, FakeRunner, World, settle, target, virtual


def worlds(faulty: Any) -> World:
    """The estimate of `bad` is what `faulty` gives."""
    world = World(10, {"good": Engine(6), "bad": Engine(6)})
    right = world.backend.variants

    async def variants(spec: RunSpec, budget: RequiredMemory) -> list[Variant]:
        return faulty(spec) if spec.model_id == "bad" else await right(spec, budget)

    world.backend.variants = variants  # type: ignore[method-assign]
    return world


def raises(spec: RunSpec) -> list[Variant]:
    raise KeyError("n_layers")


@pytest.mark.parametrize(
    "faulty",
    [
        raises,
        lambda spec: None,
        lambda spec: [],
        lambda spec: [Variant(spec, None)],  # type: ignore[arg-type]
        lambda spec: [Variant(spec, RequiredMemory(-5_000_000_000))],
        lambda spec: [Variant(spec, RequiredMemory(1.5))],  # type: ignore[arg-type]
        lambda spec: [Variant(spec, RequiredMemory(5, (-1,)))],
        lambda spec: [Variant(spec, RequiredMemory(5, None))],  # type: ignore[arg-type]
        lambda spec: [Variant(spec, RequiredMemory(5, (), 6))],
    ],
)
def test_a_faulty_estimate_refuses_its_own_requests_only(faulty: Any) -> None:
    @virtual
    async def test() -> None:
        world = worlds(faulty)
        scheduler = world.scheduler()
        bad = [asyncio.create_task(scheduler.acquire(target("bad"))) for _ in range(3)]
        (await scheduler.acquire(target("good"))).release()
        for request in bad:
            with pytest.raises(EngineFailed, match="the backend fake"):
                await request
        assert await scheduler.diagnostics.trouble() == ""
        await scheduler.close(0)

    test()


class Stubborn(World):
    """Whose runner of `bad` cannot be made, or fails when it is asked about sleep."""

    where = "make"

    def make_runner(self, key: RunnerKey, spec: RunSpec) -> Any:
        if key.files == "bad" and self.where == "make":
            raise TypeError("uses_tcp")
        runner = super().make_runner(key, spec)
        if key.files == "bad":
            runner.__class__ = type("Faulty", (FakeRunner,), {"sleep_level": property(raises)})
        return runner


@virtual
async def test_a_runner_that_cannot_be_made_refuses_its_own_requests_only() -> None:
    scheduler = Stubborn(12, {"good": Engine(6), "bad": Engine(6)}).scheduler()
    bad = asyncio.create_task(scheduler.acquire(target("bad")))
    (await scheduler.acquire(target("good"))).release()
    with pytest.raises(EngineFailed, match="the backend fake failed to start bad: TypeError: uses_tcp"):
        await bad
    assert await scheduler.diagnostics.trouble() == ""
    await scheduler.close(0)


@virtual
async def test_a_backend_that_fails_about_sleep_has_runners_that_do_not_sleep() -> None:
    world = Stubborn(12, {"good": Engine(6), "bad": Engine(6)})
    world.where = "sleep"
    scheduler = world.scheduler()
    (await scheduler.acquire(target("bad"))).release()
    (await scheduler.acquire(target("good"))).release()
    assert await scheduler.diagnostics.trouble() == ""
    await scheduler.close(0)


@pytest.mark.parametrize("growth", [None, RequiredMemory(-100), RequiredMemory(0.5)])  # type: ignore[arg-type]
def test_a_wrong_growth_leaves_the_estimate(growth: Any) -> None:
    @virtual
    async def test() -> None:
        world = World(10, {"a": Engine(6, measured=4)})
        world.backend.growth = lambda spec: growth  # type: ignore[attr-defined]
        scheduler = world.scheduler(ledger=Ledger())
        with await scheduler.acquire(target("a")):
            await settle()
            assert scheduler.memory().used.ram == 6
        await scheduler.close(0)

    test()


@virtual
async def test_a_slow_estimate_rests_where_hosts_change_all_the_time_and_ends_with_its_requests() -> None:
    world = World(10, {"a": Engine(6), "b": Engine(6)})
    asked, right = [], world.backend.variants

    async def variants(spec: RunSpec, budget: RequiredMemory) -> list[Variant]:
        asked.append(spec.model_id)
        await asyncio.sleep(1)
        return await right(spec, budget)

    world.backend.variants = variants  # type: ignore[method-assign]
    scheduler = world.scheduler()
    with await scheduler.acquire(target("a")):
        waiting = asyncio.create_task(scheduler.acquire(target("b")))
        for _ in range(570):
            scheduler.hosts_changed()
            await asyncio.sleep(0.1)
        seen = asked.count("b")
        assert 5 < seen < 15, "a second, and a rest of five"
        scheduler.hosts_changed()
        waiting.cancel()
        await asyncio.sleep(60)
        assert asked.count("b") == seen
    await scheduler.close(0)
