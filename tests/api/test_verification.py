"""Files of models are read again in the background."""

import asyncio
import contextlib
import os
import time
from pathlib import Path

import pytest

from modelrunner.errors import InvalidModel
from modelrunner.models.verification import Verifier
from modelrunner.scheduler.events import Events
from modelrunner.store import Store
from tests.api.conftest import StartDaemon
from tests.opened import opened_in
from tests.store.samples import add_model
from tests.waiting import HUNG

WEEK = 7 * 86_400.0


def damage(store: Store, name: str) -> Path:
    """Changes a byte; the time of the last change stays."""
    path = store.bundle(name).files["model.gguf"]
    before = path.stat()
    path.chmod(0o644)
    with open(path, "r+b") as file:
        file.seek(before.st_size - 1)
        file.write(b"\xff")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path


class Watched:
    """A store that is verified, with a clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.now = time.time()
        self.store, self.events, self._file = Store(folder), Events(), folder / "state" / "verified.json"

    def verifier(self, rate: float = 1e15) -> Verifier:
        return Verifier(self.store, self.events, self._file, WEEK, rate=rate, wall=lambda: self.now)

    async def read(self) -> int:
        """Looks once, ends, and returns how many blobs were opened."""
        verifier = self.verifier()
        with opened_in(self.store.data / "blobs") as opened:
            await verifier.look()
        running = asyncio.create_task(verifier.run())
        await asyncio.sleep(0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        return len(set(opened))


async def test_each_file_is_read_when_its_time_has_come(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    add_model(watched.store, "m")
    assert await watched.read() == 0  # it was read when it came
    watched.now += WEEK + 1
    assert await watched.read() == 2
    assert await watched.read() == 0  # also after a restart
    watched.now += WEEK
    assert await watched.read() == 2
    assert list(watched.events) == []


async def test_it_reads_no_faster_than_it_may(tmp_path: Path) -> None:
    """At a byte in a second the first piece takes hours, and the end of the daemon does not wait for it."""
    watched = Watched(tmp_path)
    add_model(watched.store, "m")
    watched.now += WEEK + 1
    with opened_in(watched.store.data / "blobs") as opened:
        look = asyncio.create_task(watched.verifier(rate=1.0).look())
        async with asyncio.timeout(HUNG):
            while not opened:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.wait([look], timeout=1.0)
            assert (look.done(), len(set(opened))) == (False, 1), opened
            look.cancel()
            await asyncio.wait([look])
    assert look.cancelled()


async def test_damage_is_told_once_and_known_after_a_restart(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    add_model(watched.store, "sound", 1)
    add_model(watched.store, "m", 2)
    damage(watched.store, "m")
    watched.now += WEEK + 1
    await watched.read()
    watched.now += WEEK + 1
    await watched.read()
    assert [(event.event, event.model) for event in watched.events] == [("damage", "m")]
    watched.store = Store(tmp_path)
    assert await watched.read() == 0
    assert [bool(model.damage) for model in watched.store.list()] == [False, True]
    with pytest.raises(InvalidModel, match="damaged"):
        watched.store.bundle("m")
    add_model(watched.store, "m", 2)
    await watched.read()
    assert [bool(model.damage) for model in watched.store.list()] == [False, False]
    watched.store.bundle("m")


async def test_a_file_that_was_changed_is_read_soon(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    add_model(watched.store, "m")
    watched.now += WEEK + 1
    await watched.read()
    os.utime(damage(watched.store, "m"))
    assert await watched.read() == 1
    assert [event.model for event in watched.events] == ["m"]


async def test_the_daemon_shows_what_was_damaged(start_daemon: StartDaemon, tmp_path: Path) -> None:
    (tmp_path / "data_dir").mkdir()
    store = Store(tmp_path / "data_dir")
    add_model(store, "m")
    os.utime(damage(store, "m"), (time.time() - 90_000,) * 2)
    daemon = await start_daemon(verify_every="1d")
    async with asyncio.timeout(HUNG):
        while True:
            async with daemon.unix.get("/models") as answer:
                [model] = await answer.json()
            if model["damage"]:
                break
            await asyncio.sleep(0.01)
    async with daemon.unix.get("/ready") as answer:
        assert answer.status == 200
        assert "m is damaged" in (await answer.json())["reason"]
