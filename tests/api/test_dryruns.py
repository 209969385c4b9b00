"""What a pull or a configuration sets going in the background."""

import asyncio
from typing import Any

from modelrunner.errors import ModelNotFound
from modelrunner.models.dryruns import DryRuns
from modelrunner.scheduler import Ledger, Target
from modelrunner.types import Bundle, Mode, RequiredMemory, RunSpec
from tests.scheduler.fakes import Engine, World, target
from tests.waiting import HUNG


class Models:
    """The store and the resolver of two models, `a` and `b`."""

    def bundle(self, model: str) -> Bundle:
        if model not in ("a", "b"):
            raise ModelNotFound(f"there is no {model}")
        return target(model).spec.bundle

    async def prepare(self, backend: str | None, model: str, mode: Mode) -> None: ...

    def __call__(self, backend: str | None, model: str, mode: Mode) -> Target:
        return target(model)


async def test_the_engine_is_asked_after_a_pull_and_after_a_configuration() -> None:
    world, models, ledger = World(1000, {"a": Engine(100), "b": Engine(50)}), Models(), Ledger()
    asked: asyncio.Queue[str] = asyncio.Queue()

    async def dry_run(spec: RunSpec) -> RequiredMemory | None:
        await asked.put(spec.model_id)
        return RequiredMemory(77)

    world.backend.dry_run = dry_run  # type: ignore[attr-defined]
    scheduler = world.scheduler(ledger=ledger)
    dry_runs: Any = DryRuns(models, models, scheduler)  # type: ignore[arg-type]
    running = asyncio.create_task(dry_runs.run())
    await asyncio.sleep(0)
    happened: list[tuple[Any, str]] = [("ready", "a"), ("pull", "gone"), ("pull", "a"), ("configure", "a")]
    for kind, model in (*happened, ("configure", "b")):
        scheduler.events.emit(kind, model=model)
    async with asyncio.timeout(HUNG):
        assert [await asked.get(), await asked.get()] == ["a", "b"]
    running.cancel()
    assert await ledger.required(world.backend, target("a").spec) == RequiredMemory(77)
    await scheduler.close(0)
