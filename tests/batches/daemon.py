"""A daemon with the fake backend, as a process of its own: python -m tests.batches.daemon FOLDER"""

import asyncio
import sys
from pathlib import Path

from modelrunner.daemon.app import serve
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.store import Store
from tests.api.conftest import make_settings
from tests.fakes import FakeBackend
from tests.store.samples import add_model


async def main(folder: Path) -> None:
    settings = make_settings(folder)
    settings.data_dir.mkdir(exist_ok=True)
    store = Store(settings.data_dir)
    if not list(store.list()):
        add_model(store, "smol", 0)
    backend = FakeBackend(folder, ("--rate=2000", "--tokens=4"))
    await serve(settings, registry=BackendRegistry({"fake": backend}, {}), ready=lambda: print("ready", flush=True))


asyncio.run(main(Path(sys.argv[1])))
