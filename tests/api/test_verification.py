"""Files of models are read again in the background."""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from modelrunner.errors import InvalidModel, StorageFailed
from modelrunner.models.verification import Verifier
from modelrunner.scheduler.events import Events
from modelrunner.store import Store
from modelrunner.store.blobs import ReadProgress
from modelrunner.store.store import PlacedBlob
from tests.api.conftest import StartDaemon
from tests.opened import opened_in
from tests.store.samples import add_model, ingest
from tests.waiting import HUNG

WEEK = 7 * 86_400.0
Pause = Callable[[threading.Event, float], bool]


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

    def __init__(self, folder: Path, disks: Sequence[Path] = ()) -> None:
        self.now = time.time()
        self._data, self._disks, self._file = folder, disks, folder / "state" / "verified.json"
        self.store, self.events = Store(folder, None, disks), Events()

    def restart(self) -> None:
        self.store.close()
        self.store = Store(self._data, None, self._disks)

    def verifier(self, rate: float = 1e15, pause: Pause = threading.Event.wait) -> Verifier:
        return Verifier(self.store, self.events, self._file, WEEK, rate=rate, wall=lambda: self.now, pause=pause)

    async def read(self) -> int:
        """Looks once, ends, and returns how many blobs were opened."""
        verifier = self.verifier()
        with opened_in(self.store.data / "blobs") as opened:
            await verifier.look()
        await self.end(verifier)
        return len(set(opened))

    async def end(self, verifier: Verifier) -> None:
        running = asyncio.create_task(verifier.run())
        await asyncio.sleep(0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


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
    """After each piece it pauses for as long as the piece may take."""
    watched = Watched(tmp_path)
    add_model(watched.store, "m")
    watched.now += WEEK + 1
    paused = list[float]()

    def pause(stop: threading.Event, seconds: float) -> bool:
        paused.append(seconds)
        return stop.is_set()

    await watched.verifier(rate=0.25, pause=pause).look()
    sizes = [path.stat().st_size for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
    assert sum(paused) == sum(sizes) / 0.25 > 0


async def test_the_end_waits_for_no_pause(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    add_model(watched.store, "m")
    watched.now += WEEK + 1
    loop, pausing = asyncio.get_running_loop(), asyncio.Event()

    def pause(stop: threading.Event, seconds: float) -> bool:
        loop.call_soon_threadsafe(pausing.set)
        return stop.wait(100 * HUNG)

    with opened_in(watched.store.data / "blobs") as opened:
        async with asyncio.timeout(HUNG):
            look = asyncio.create_task(watched.verifier(pause=pause).look())
            await pausing.wait()
            look.cancel()
            await asyncio.wait([look])
    assert look.cancelled()
    assert len(set(opened)) == 1


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
    watched.restart()
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


async def test_damage_is_that_of_one_disk_also_after_a_restart_and_when_it_is_back(tmp_path: Path) -> None:
    """Both have the model; what is damaged on the first is served from the second."""
    disks = [tmp_path / "one", tmp_path / "two"]
    for disk in disks:
        disk.mkdir()
        store = Store(tmp_path / "data", None, [disk])
        add_model(store, "m")
        if disk is disks[0]:
            damage(store, "m")
        store.close()
    watched = Watched(tmp_path / "data", disks)
    watched.now += WEEK + 1
    verifier = watched.verifier()
    await verifier.look()
    assert [event.model for event in watched.events] == ["m"]

    def served() -> tuple[str, Path]:
        return watched.store.get("m").damage, watched.store.bundle("m").directory.parents[1]

    assert served() == ("", disks[1])
    await watched.end(verifier)
    watched.restart()
    verifier = watched.verifier()
    await verifier.look()
    assert served() == ("", disks[1])
    disks[0].rename(tmp_path / "away")
    watched.store.look()
    assert served() == ("", disks[1])
    await verifier.look()
    (tmp_path / "away").rename(disks[0])
    watched.store.look()  # before the verifier looks again
    assert served() == ("", disks[1])
    watched.store.close()


async def test_a_disk_that_fails_keeps_no_other_from_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disks = [tmp_path / "one", tmp_path / "two"]
    for disk in disks:
        disk.mkdir()
    watched = Watched(tmp_path / "data", disks)
    for seed, disk in enumerate(disks):
        watched.store.create({"m": ingest(watched.store, seed)}, f"m{seed}", folder=disk)
    damage(watched.store, "m1")
    watched.now += WEEK + 1
    read = watched.store.check

    def failing(file: PlacedBlob, progress: ReadProgress) -> bool:
        if file.folder == disks[0]:
            raise StorageFailed("reading the model: Input/output error")
        return read(file, progress)

    monkeypatch.setattr(watched.store, "check", failing)
    await watched.verifier().look()
    assert [event.model for event in watched.events] == ["m1"]
    assert caplog.text.count("Input/output error") == 1
    watched.store.close()


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
            if model.get("damage"):
                break
            await asyncio.sleep(0.01)
    async with daemon.unix.get("/ready") as answer:
        assert answer.status == 200
        assert "m is damaged" in (await answer.json())["reason"]
