"""Who asked for it is told of crashes, refused loads and a full disk: once, and with nothing of a request in it."""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from modelrunner.scheduler.events import Events
from modelrunner.telemetry.notifier import NoticeRules, Notifier
from tests.api.conftest import StartDaemon, start_daemon
from tests.fakes import FakeClock
from tests.waiting import HUNG

__all__ = ["start_daemon"]
CHAT = {"model": "smol", "messages": [{"role": "user", "content": "the secret of my heart"}]}


class Hook:
    def __init__(self) -> None:
        self.told: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.url = ""
        self.status = 200

    async def take(self, request: web.Request) -> web.Response:
        self.told.put_nowait(await request.json())
        return web.Response(status=self.status)

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(HUNG):
            return await self.told.get()


@pytest.fixture
async def hook() -> AsyncIterator[Hook]:
    made = Hook()
    app = web.Application()
    app.add_routes([web.post("/{secret}", made.take)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    made.url = f"http://{host}:{port}/the-secret"
    yield made
    await runner.cleanup()


class Told:
    """A notifier at work. `disks` has the number and the free bytes of each folder's disk; that of the data folder has
    `free` bytes."""

    def __init__(self, folder: Path, hook: Hook, **rules: Any) -> None:
        self.clock, self.free = FakeClock(), 1 << 40
        self.events = Events(self.clock)
        made = replace(NoticeRules((), hook.url, every=600.0, disk_free=5 << 30), **rules)
        self.disks: dict[Path, tuple[int, int]] = {}
        self.notifier = Notifier(made, self.events, lambda: [folder, *self.disks], self.clock, self.disk)

    def disk(self, folder: Path) -> tuple[int, int]:
        return self.disks.get(folder, (0, self.free))


async def test_each_is_told_once_in_its_time(tmp_path: Path, hook: Hook) -> None:
    told = Told(tmp_path, hook)
    task = asyncio.create_task(told.notifier.run())
    await asyncio.sleep(0)
    for _ in range(4):
        told.events.emit("refuse", model="smol", reason="prompt: the secret of my heart")
    told.events.emit("refuse", model="other")
    first, second = await hook.next(), await hook.next()
    assert (first["event"], first["model"], first["withheld"]) == ("refused_load", "smol", 0)
    assert second["model"] == "other"
    assert "secret" not in json.dumps(first)
    told.clock.advance(600)
    told.events.emit("refuse", model="smol")
    assert (await hook.next())["withheld"] == 3
    told.events.close()
    await task
    assert hook.told.empty()


async def test_three_crashes_in_ten_minutes_are_a_loop(tmp_path: Path, hook: Hook) -> None:
    told = Told(tmp_path, hook)
    task = asyncio.create_task(told.notifier.run())
    await asyncio.sleep(0)
    for _ in range(4):  # one in five minutes is none
        told.events.emit("crash", model="slow", reason="x")
        told.clock.advance(301)
    for _ in range(3):
        told.events.emit("crash", model="smol", reason="x")
    found = await hook.next()
    assert (found["event"], found["model"]) == ("crash_loop", "smol")
    told.events.close()
    await task
    assert hook.told.empty()


async def test_a_disk_that_is_nearly_full_is_told(tmp_path: Path, hook: Hook) -> None:
    told = Told(tmp_path, hook)
    told.free = 1 << 30
    task = asyncio.create_task(told.notifier.run())
    assert (await hook.next())["event"] == "disk_nearly_full"
    told.events.close()
    await task


async def test_each_disk_is_told_of_once(tmp_path: Path, hook: Hook) -> None:
    told = Told(tmp_path, hook)
    told.disks = {Path("/cache"): (0, 9 << 40), Path("/big"): (1, 1 << 30), Path("/more"): (1, 1 << 30)}
    told.disks |= {Path("/other"): (2, 0), Path("/roomy"): (3, 1 << 40)}
    task = asyncio.create_task(told.notifier.run())
    for folder in ("/big", "/other"):
        notice = await hook.next()
        assert (notice["event"], notice["model"]) == ("disk_nearly_full", "")
        assert f"the disk of {folder} has" in notice["message"]
    told.events.close()
    await task
    assert hook.told.empty()


async def test_many_subjects_do_not_make_it_forget_what_it_has_just_told(tmp_path: Path, hook: Hook) -> None:
    told = Told(tmp_path, hook)
    task = asyncio.create_task(told.notifier.run())
    await asyncio.sleep(0)
    for number in range(1000):
        told.events.emit("refuse", model=f"m{number}")
        assert (await hook.next())["model"] == f"m{number}"
    for model in ("m999", "one-more", "m999", "m500", "m0"):
        told.events.emit("refuse", model=model)
    assert [(await hook.next())["model"] for _ in range(2)] == ["one-more", "m0"]  # the oldest had to go
    told.events.close()
    await task
    assert hook.told.empty()


async def warned(caplog: Any, count: int) -> None:
    async with asyncio.timeout(HUNG):
        while sum(record.levelname == "WARNING" for record in caplog.records) < count:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_webhook_that_fails_is_a_line_without_its_secret(tmp_path: Path, hook: Hook, caplog: Any) -> None:
    hook.status = 500
    for number, url in enumerate((hook.url, "http://127.0.0.1:9/the-secret"), 1):
        told = Told(tmp_path, hook, webhook=url)
        told.free = 0
        task = asyncio.create_task(told.notifier.run())
        await warned(caplog, number)
        told.events.close()
        await task
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert not any("the-secret" in line for line in lines)


@pytest.mark.parametrize("program", ["/nonexistent/program", "/bin/false"])
async def test_a_program_that_fails_is_a_line(tmp_path: Path, hook: Hook, caplog: Any, program: str) -> None:
    told = Told(tmp_path, hook, webhook="", command=(program,))
    told.free = 0
    task = asyncio.create_task(told.notifier.run())
    await warned(caplog, 1)
    told.events.close()
    await task
    assert [program in record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [True]


async def test_a_daemon_watches_the_disks_of_its_models_and_engines(start_daemon: StartDaemon, tmp_path: Path) -> None:
    if os.stat("/dev/shm").st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("needs a second disk")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        log = tmp_path / "notices"
        program = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"
        notify = {"command": [sys.executable, "-c", program, str(log)], "disk_free": 1 << 60}
        (tmp_path / "cache_dir").mkdir()
        await start_daemon(models={"smol": 0}, notify=notify, model_dirs=[elsewhere])
        async with asyncio.timeout(HUNG):
            while not (log.exists() and log.read_text().count("\n") == 2):  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert f"the disk of {elsewhere} has" in log.read_text()


async def test_a_daemon_tells_of_an_engine_that_keeps_crashing(start_daemon: StartDaemon, tmp_path: Path) -> None:
    program = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"
    log = tmp_path / "notices"
    command = [sys.executable, "-c", program, str(log)]
    daemon = await start_daemon(models={"smol": 0}, notify={"command": command})
    daemon.backend.knobs = ("--crash", "the secret of my heart")
    async with asyncio.timeout(2 * HUNG):
        while not (log.exists() and "crash_loop" in log.read_text()):
            async with daemon.unix.post("/v1/chat/completions", json=CHAT) as answer:
                assert answer.status >= 500
    assert "secret" not in log.read_text()
