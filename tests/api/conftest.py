"""A whole daemon in the test's own process, with the fake backend in place of real engines."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from modelrunner.backend import Backend
from modelrunner.config.locations import Locations
from modelrunner.config.settings import Settings
from modelrunner.daemon.app import serve
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.store import Store
from tests.fakes import FakeBackend
from tests.store.samples import add_model


def make_settings(folder: Path, **overrides: object) -> Settings:
    places = {
        "data_dir": str(folder / "data_dir"),
        "cache_dir": str(folder / "cache_dir"),
        "runtime_dir": str(folder / "r"),
    }
    environ = {f"MODELRUNNER_{name.upper()}": path for name, path in places.items()}
    locations = Locations.find(environ | {"MODELRUNNER_CONFIG": str(folder / "config.toml")})
    usual = {"listen": "127.0.0.1:0", "telemetry": True, "drain_limit": 5.0, "stop_grace": 2.0}
    return Settings.load(locations, **usual | overrides)


@dataclass
class Daemon:
    """`unix` and `tcp` speak to its listeners; paths are given without a host."""

    settings: Settings
    backend: FakeBackend
    unix: aiohttp.ClientSession
    tcp: aiohttp.ClientSession
    task: asyncio.Task[None]

    @property
    def port(self) -> int:
        assert self.tcp._base_url is not None
        assert self.tcp._base_url.port is not None
        return self.tcp._base_url.port


StartDaemon = Callable[..., Awaitable[Daemon]]


@pytest.fixture
async def start_daemon(tmp_path: Path) -> AsyncIterator[StartDaemon]:
    """`start_daemon(models={"smol": 0})` serves with that model in the store; the number makes models differ, and
    `metadata` goes into their headers. `backends` are instead of the fake one."""
    started: list[Daemon] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    async def start(
        *,
        models: dict[str, int] | None = None,
        metadata: dict[str, Any] | None = None,
        folder: Path = tmp_path,
        backends: dict[str, Backend] | None = None,
        **overrides: object,
    ) -> Daemon:
        folder.mkdir(exist_ok=True)
        settings = make_settings(folder, **overrides)
        settings.data_dir.mkdir(exist_ok=True)
        if models:
            store = Store(settings.data_dir)
            for reference, seed in models.items():
                add_model(store, reference, seed, metadata=metadata)
        backend = FakeBackend(folder)
        ready = asyncio.Event()
        registry = BackendRegistry(backends or {"fake": backend}, {"broken": "ImportError: no such module"})
        task = asyncio.create_task(serve(settings, ready=ready.set, registry=registry))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            task.result()
        path = str(settings.runtime_dir / "modelrunner.sock")
        unix = aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(path))
        async with unix.get("/version") as answer:
            listen = (await answer.json())["listen"]
        started.append(Daemon(settings, backend, unix, aiohttp.ClientSession(listen or None), task))
        return started[-1]

    yield start
    for daemon in started:
        if not daemon.task.done():
            async with daemon.unix.post("/shutdown") as answer:
                assert answer.status == 202
        await daemon.unix.close()
        await daemon.tcp.close()
        await daemon.task
    for number, handler in handlers.items():  # of several daemons, each has put back that of the one before
        signal.signal(number, handler)
