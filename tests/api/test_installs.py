"""One piece of work per backend, which outlives whoever asked for it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from modelrunner.backend import InstallProgress, ProgressCallback
from modelrunner.errors import BackendUnavailable, Conflict
from modelrunner.models.installs import Installer
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.scheduler import LocalHost, Scheduler
from tests.fakes import FakeBackend


class Slow(FakeBackend):
    """Installs in two steps, the second of which waits for `go`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.installs = 0
        self.began, self.go = asyncio.Event(), asyncio.Event()

    async def install(self, progress: ProgressCallback, **options: Any) -> None:
        self.installs += 1
        progress(InstallProgress("first"))
        self.began.set()
        await self.go.wait()
        if options.get("fail"):
            raise BackendUnavailable("no wheel for this platform")
        progress(InstallProgress("second"))


class World:
    def __init__(self, folder: Path) -> None:
        self.backend = Slow(folder)
        registry = BackendRegistry({"fake": self.backend})
        self.changes = 0
        self.scheduler = Scheduler(registry, [LocalHost(registry, lambda: folder, folder / "logs")])
        self.installer = Installer(registry, self.scheduler, self.changed)
        self.seen: list[list[str]] = []

    def changed(self) -> None:
        self.changes += 1

    def start(self, action: str = "install", **options: Any) -> asyncio.Task[str]:
        seen: list[str] = []
        self.seen.append(seen)
        work = self.installer.run(action, "fake", options, lambda step: seen.append(step.message))
        return asyncio.create_task(work)


@pytest.fixture
async def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_those_who_ask_at_once_share_one_installation(world: World) -> None:
    first = world.start()
    await world.backend.began.wait()
    second = world.start()
    world.backend.go.set()
    assert await first == await second == "fake: Running: fake 1.0"
    assert world.backend.installs == 1
    assert world.seen == [["first", "second"], ["first", "second"]]
    assert world.changes == 1


async def test_an_installation_goes_on_without_its_client(world: World) -> None:
    first = world.start()
    await world.backend.began.wait()
    first.cancel()
    await asyncio.wait({first})
    second = world.start()
    world.backend.go.set()
    assert await second == "fake: Running: fake 1.0"
    assert world.backend.installs == 1


async def test_something_else_with_the_same_backend_has_to_wait(world: World) -> None:
    first = world.start()
    await world.backend.began.wait()
    for other in (world.start("uninstall"), world.start(build=True)):
        with pytest.raises(Conflict, match="install of fake is under way"):
            await other
    world.backend.go.set()
    await first
    assert await world.start("uninstall") == "fake: Not Installed: binary not found"


async def test_a_failure_reaches_everybody_and_the_next_attempt_begins_anew(world: World) -> None:
    first, second = world.start(fail=True), world.start(fail=True)
    world.backend.go.set()
    for waiting in (first, second):
        with pytest.raises(BackendUnavailable, match="no wheel"):
            await waiting
    await world.start()
    assert world.backend.installs == 2


async def test_the_end_of_the_daemon_ends_the_work(world: World) -> None:
    first = world.start()
    await world.backend.began.wait()
    await world.installer.close()
    with pytest.raises(asyncio.CancelledError):
        await first
