"""Presets: models with the same files and the same start, and their own defaults."""

from dataclasses import replace

from modelrunner.scheduler import RetainedSettings, Target
from modelrunner.types import KeepAlive, Mode
from tests.scheduler.fakes import Engine, World, target, virtual


def _preset(name: str, revision: int = 0) -> Target:
    """A preset of the model "a"."""
    base = target("a")
    bundle = replace(base.spec.bundle, model_id=name, references=(f"ai/{name}",))
    spec = replace(base.spec, model_id=name, bundle=bundle)
    return replace(base, key=base.key._replace(revision=revision), spec=spec)


@virtual
async def test_presets_share_a_runner_and_keep_their_names() -> None:
    world = World(10, {"a": Engine(6), "b": Engine(6)})
    scheduler = world.scheduler()
    for _ in range(10):
        for asked in (target("a"), _preset("b")):
            with await scheduler.acquire(asked) as lease:
                assert lease.target is asked
                assert lease.served.model == asked.name
    assert world.started == ["a"]
    [runner] = scheduler.runners()
    assert list(runner.models) == ["a", "b"]
    await scheduler.close(0)


@virtual
async def test_a_preset_that_starts_its_engine_otherwise_has_its_own() -> None:
    world = World(20, {"a": Engine(6), "b": Engine(6)})
    scheduler = world.scheduler()
    with await scheduler.acquire(target("a")) as one, await scheduler.acquire(_preset("b", revision=7)) as other:
        assert one.runner is not other.runner
    await scheduler.close(0)


@virtual
async def test_a_pin_of_one_preset_keeps_the_runner() -> None:
    world = World(10, {"a": Engine(6), "b": Engine(6)})
    scheduler = world.scheduler()
    (await scheduler.acquire(target("a"))).release()
    (await scheduler.acquire(_preset("b"))).release()
    scheduler.retain("b", Mode.COMPLETION, RetainedSettings(KeepAlive(1.0), pinned=True))
    assert [runner.pinned for runner in scheduler.runners()] == [True]
    scheduler.forget("b")
    assert [runner.pinned for runner in scheduler.runners()] == [False]
    await scheduler.close(0)


@virtual
async def test_only_the_preset_that_is_asked_is_in_use() -> None:
    world = World(10, {"a": Engine(6), "b": Engine(6)})
    scheduler = world.scheduler()
    (await scheduler.acquire(_preset("b"))).release()
    with await scheduler.acquire(target("a")):
        assert scheduler.uses("a")
        assert scheduler.uses("b"), "its files are open"
        assert not scheduler.uses("c")
    await scheduler.unload(model_ids=["a"])
    assert scheduler.runners() == []
    await scheduler.close(0)
