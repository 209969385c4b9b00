"""The first request that needs an engine installs it, if its backend is small enough for that."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from modelrunner.backend import BackendState, BackendStatus, InstallProgress, ProgressCallback
from modelrunner.errors import InsufficientDisk
from tests.api.conftest import Daemon, StartDaemon
from tests.fakes import FakeBackend
from tests.waiting import HUNG

ASK = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}


class World:
    """A daemon with a model whose engine is missing. Its installation waits for `go`."""

    def __init__(self, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
        self.daemon = daemon
        self.installs = 0
        self.fault: Exception | None = None
        self.began, self.go = asyncio.Event(), asyncio.Event()
        daemon.backend.state = BackendStatus(BackendState.NOT_INSTALLED, "binary not found")
        monkeypatch.setattr(FakeBackend, "installs_on_demand", True)
        monkeypatch.setattr(daemon.backend, "install", self._install)

    async def _install(self, progress: ProgressCallback, **options: Any) -> None:
        self.installs += 1
        self.daemon.backend.state = BackendStatus(BackendState.INSTALLING, "fake 1.0")
        progress(InstallProgress("downloading the engine"))
        self.began.set()
        await self.go.wait()
        missing = BackendStatus(BackendState.NOT_INSTALLED, "binary not found")
        self.daemon.backend.state = missing if self.fault else BackendStatus(BackendState.RUNNING, "fake 1.0")
        if self.fault:
            raise self.fault

    async def active(self) -> int:
        async with self.daemon.tcp.get("/health") as answer:
            found: int = (await answer.json())["active_requests"]
            return found

    async def ask(self) -> tuple[int, Any]:
        async with self.daemon.unix.post("/v1/chat/completions", json=ASK) as answer:
            return answer.status, await answer.json()


@pytest.fixture
async def world(start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(await start_daemon(models={"smol": 0}), monkeypatch)


async def test_the_first_requests_share_one_installation(world: World) -> None:
    first = asyncio.create_task(world.ask())
    await world.began.wait()
    second = asyncio.create_task(world.ask())
    while await world.active() < 2:
        pass
    world.go.set()
    assert [status for status, _ in await asyncio.gather(first, second)] == [200, 200]
    assert world.installs == 1


async def test_a_state_of_before_the_end_of_an_installation_starts_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, ended = threading.Semaphore(0), threading.Event()

    def status() -> BackendStatus:
        state = world.daemon.backend.state
        if state.state is BackendState.INSTALLING:
            seen.release()
            if not looks_before.acquire(blocking=False):
                ended.wait(HUNG)
        return state

    first = asyncio.create_task(world.ask())
    await world.began.wait()
    looks_before = threading.Semaphore(2)  # those of the model's resolution
    monkeypatch.setattr(world.daemon.backend, "status", status)
    second = asyncio.create_task(world.ask())
    await asyncio.to_thread(seen.acquire)
    await world.active()  # what it saw reaches the loop meanwhile
    world.go.set()
    assert (await first)[0] == 200
    ended.set()
    assert (await second)[0] == 200
    assert world.installs == 1


async def test_a_waiting_client_sees_what_is_done(world: World) -> None:
    headers = {"X-Progress": "events"}
    async with world.daemon.unix.post("/v1/chat/completions", json=ASK | {"stream": True}, headers=headers) as answer:
        stages = []
        async for line in answer.content:
            if b'"stage"' in line:
                stages.append(json.loads(line.removeprefix(b"data: "))["stage"])
                if stages[-1] == "downloading the engine":
                    world.go.set()
        assert "downloading the engine" in stages


async def test_a_preload_installs_the_engine_and_says_so(world: World) -> None:
    world.go.set()
    headers = {"Accept": "application/json"}
    async with world.daemon.unix.post("/engines/preload", json={"model": "smol"}, headers=headers) as answer:
        lines = [json.loads(line) async for line in answer.content]
    assert lines[-1]["type"] == "success"
    assert "downloading the engine" in [line["message"] for line in lines]
    assert world.installs == 1


async def test_a_pin_needs_no_engine(world: World) -> None:
    async with world.daemon.unix.post("/engines/pin", json={"model": "smol"}) as answer:
        assert (answer.status, world.installs) == (200, 0)


async def test_a_preload_at_the_start_tries_to_install_once(
    start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt that fails is an event, after which the models that failed are loaded again."""
    installs = []

    async def install(self: FakeBackend, progress: ProgressCallback, **options: Any) -> None:
        installs.append(options)
        raise InsufficientDisk("the engine needs 100 MiB, and 3 MiB are free")

    missing = BackendStatus(BackendState.NOT_INSTALLED, "binary not found")
    monkeypatch.setattr(FakeBackend, "installs_on_demand", True)
    monkeypatch.setattr(FakeBackend, "install", install)
    monkeypatch.setattr(FakeBackend, "status", lambda self: missing)
    (tmp_path / "config.toml").write_text('[models."smol"]\npreload = true\n')
    daemon = await start_daemon(models={"smol": 0})
    refusals = 0
    async with daemon.unix.get("/engines/events", params={"since": "0"}) as feed:
        async for line in feed.content:
            refusals += line == b"event: refuse\n"
            if refusals == 3:  # after the first attempt, and after each of two changes of its configuration
                break
            if line == b"event: refuse\n":
                await configure(daemon, refusals)
    assert len(installs) == 1


async def configure(daemon: Daemon, parallel: int) -> None:
    async with daemon.unix.post("/engines/_configure", json={"model": "smol", "parallel": parallel}) as answer:
        assert answer.status == 202


async def test_a_failed_installation_says_why(world: World) -> None:
    world.fault = InsufficientDisk("the engine needs 100 MiB, and 3 MiB are free")
    world.go.set()
    status, body = await world.ask()
    assert (status, body["error"]["code"]) == (507, "insufficient_disk")


async def test_a_large_engine_is_not_installed_unasked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeBackend, "installs_on_demand", False)
    status, body = await world.ask()
    assert status == 412
    assert "modelrunner install fake" in body["error"]["message"]
    assert world.installs == 0
