"""What the measurements of single engines share: a store, the engines of the cache, and a runner without a daemon."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from modelrunner.backend import BackendContext
from modelrunner.config.locations import Locations
from modelrunner.engine.localrunner import LocalRunner
from modelrunner.store import Store
from modelrunner.types import Endpoint, Launch, ProcessOptions, RunnerKey, RunSpec
from modelrunner_llamacpp import LlamaCppBackend, engines
from modelrunner_llamacpp.engines import EngineKind


def backends(folder: Path, kinds: list[str]) -> Iterator[tuple[EngineKind, LlamaCppBackend]]:
    """One for each kind of engine in the cache."""
    cache = Locations.find().cache
    for kind in map(EngineKind, kinds):
        links = folder / kind
        links.mkdir()
        context = BackendContext(links, cache, folder, {})
        for entry in cache.glob(f"llama.cpp-{kind}-*/"):
            if engines.usable(entry, kind):
                engines.link(context, kind).symlink_to(entry)
                yield kind, LlamaCppBackend(context)
                break


def store_of(data: Path, folder: Path) -> Store:
    """A copy by hard links: the directory may be a daemon's."""
    ignore = shutil.ignore_patterns("daemon.lock", "logs", "state")
    shutil.copytree(data, folder / "data", copy_function=os.link, ignore=ignore)
    return Store(folder / "data")


@asynccontextmanager
async def serving(backend: LlamaCppBackend, spec: RunSpec, socket: Path) -> AsyncIterator[LocalRunner]:
    key = RunnerKey(backend.name, spec.model_id, spec.mode)
    launch = Launch(Endpoint(path=socket), ProcessOptions(socket.with_name("engine.log")))
    runner = LocalRunner(backend, spec, key, launch, id="bench", folder=socket.parent)
    changed = asyncio.Event()
    task = asyncio.create_task(runner.run(changed.set))
    try:
        while runner.ready_at is None:
            if task.done():
                await task
            await changed.wait()
            changed.clear()
        yield runner
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def tested_models() -> Path:
    """The newest of the tests' own data directories."""
    found = sorted(Locations.find().cache.glob("test-models-*/complete"))
    return found[-1].parent / "data" if found else Locations.find().data
