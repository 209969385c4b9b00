"""Entries of the cache: finished or absent, made once, shared, and removed with their last user."""

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from modelrunner.backend import InstallProgress
from modelrunner.errors import InsufficientDisk, StorageFailed
from modelrunner.sdk import enginecache
from modelrunner.sdk.programs import StepFailed

NAME = enginecache.key("engine", "1.0", "-DX=1")
PROGRAM = "bin/engine"


def link(root: Path, data: str = "data") -> Path:
    """Where that data directory names its engine."""
    return root / data / "engines" / "engine"


def works(entry: Path) -> bool:
    return (entry / PROGRAM).exists() and enginecache.read_marker(entry) == {"version": "1.0"}


def found(link: Path) -> Path | None:
    """The entry that a data directory uses."""
    return link.readlink() if link.is_symlink() and works(link) else None


class Maker:
    """Fills an entry as a build does; counts how often it was asked."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.made = 0
        self.began = asyncio.Event()
        self._gate = gate

    async def __call__(self, folder: Path) -> dict[str, str]:
        self.made += 1
        self.began.set()
        if self._gate:
            await self._gate.wait()
        (folder / "bin").mkdir()
        (folder / PROGRAM).write_text("")
        return {"version": "1.0"}


async def provide(
    where: Path,
    make: Callable[[Path], Awaitable[dict[str, str]]],
    tell: Callable[[InstallProgress], None] = lambda _: None,
    name: str = NAME,
    needed: int = 0,
) -> None:
    await enginecache.provide(where, where.parents[2] / "cache" / name, make, works, tell, needed=needed)


def leftovers(root: Path) -> list[str]:
    return [path.name for path in (root / "cache").iterdir() if ".tmp-" in path.name]


async def test_made_once_for_all_data_directories(tmp_path: Path) -> None:
    make = Maker()
    await provide(link(tmp_path), make)
    await provide(link(tmp_path), make)
    await provide(link(tmp_path, "other"), make)
    assert make.made == 1
    assert found(link(tmp_path)) == found(link(tmp_path, "other"))
    assert leftovers(tmp_path) == []


async def test_a_failed_run_leaves_nothing(tmp_path: Path) -> None:
    async def fail(folder: Path) -> dict[str, str]:
        (folder / "half").write_text("done")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        await provide(link(tmp_path), fail)
    assert found(link(tmp_path)) is None
    assert leftovers(tmp_path) == []


async def test_what_a_killed_run_left_is_cleared(tmp_path: Path) -> None:
    half = tmp_path / "cache" / f"{NAME}.tmp-dead" / "new"
    half.mkdir(parents=True)
    (half / "object.o").write_text("half")
    await provide(link(tmp_path), Maker())
    assert found(link(tmp_path)) is not None
    assert leftovers(tmp_path) == []


async def test_a_broken_entry_is_made_again(tmp_path: Path) -> None:
    make = Maker()
    await provide(link(tmp_path), make)
    (tmp_path / "cache" / NAME / PROGRAM).unlink()
    assert found(link(tmp_path)) is None
    await provide(link(tmp_path), make)
    assert found(link(tmp_path)) is not None
    assert make.made == 2


async def test_two_at_once_make_one(tmp_path: Path) -> None:
    gate = asyncio.Event()
    first, second, said = Maker(gate), Maker(), list[InstallProgress]()
    waits = asyncio.Event()

    def tell(step: InstallProgress) -> None:
        said.append(step)
        waits.set()

    one = asyncio.create_task(provide(link(tmp_path), first))
    await first.began.wait()
    two = asyncio.create_task(provide(link(tmp_path, "other"), second, tell))
    await waits.wait()
    gate.set()
    await asyncio.gather(one, two)
    assert (first.made, second.made) == (1, 0)
    assert "waiting for another installation" in said[0].message
    assert found(link(tmp_path, "other")) is not None


async def test_one_that_waits_can_be_cancelled(tmp_path: Path) -> None:
    gate = asyncio.Event()
    first, waits = Maker(gate), asyncio.Event()
    one = asyncio.create_task(provide(link(tmp_path), first))
    await first.began.wait()
    two = asyncio.create_task(provide(link(tmp_path), Maker(), lambda _: waits.set()))
    await waits.wait()
    two.cancel()
    with pytest.raises(asyncio.CancelledError):
        await two
    gate.set()
    await one
    assert found(link(tmp_path)) is not None


async def test_the_entry_goes_with_its_last_user(tmp_path: Path) -> None:
    await provide(link(tmp_path), Maker())
    await provide(link(tmp_path, "other"), Maker())
    await enginecache.withdraw(link(tmp_path))
    assert found(link(tmp_path)) is None
    assert found(link(tmp_path, "other")) is not None
    await enginecache.withdraw(link(tmp_path, "other"))
    assert not (tmp_path / "cache" / NAME).exists()
    await enginecache.withdraw(link(tmp_path, "other"))
    assert leftovers(tmp_path) == []


async def test_a_data_directory_that_was_deleted_is_no_user(tmp_path: Path) -> None:
    await provide(link(tmp_path), Maker())
    await provide(link(tmp_path, "gone"), Maker())
    link(tmp_path, "gone").unlink()
    await enginecache.withdraw(link(tmp_path))
    assert not (tmp_path / "cache" / NAME).exists()


async def test_an_update_drops_the_entry_that_nobody_uses_any_more(tmp_path: Path) -> None:
    older, where = enginecache.key("engine", "0.9"), link(tmp_path)
    await provide(where, Maker(), name=older)
    await provide(where, Maker())
    assert not (tmp_path / "cache" / older).exists()
    assert found(where) == tmp_path / "cache" / NAME


def test_options_and_versions_have_entries_of_their_own() -> None:
    names = {
        enginecache.key("engine", version, *options) for version in ("1", "2") for options in (("a", "b"), ("ab",))
    }
    assert len(names) == 4


def test_disk_usage_counts_hard_links_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    alone = enginecache.disk_usage([tmp_path])
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    assert enginecache.disk_usage([tmp_path]) == alone >= 100_000


async def test_room_is_looked_for_before_anything_is_fetched(tmp_path: Path) -> None:
    make = Maker()
    with pytest.raises(InsufficientDisk, match=rf"needs 1024TiB in {tmp_path}/cache, and .* are free: make room"):
        await provide(link(tmp_path), make, needed=1 << 50)
    assert make.made == 0
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("place", ["cache", "data"])
async def test_a_folder_that_cannot_be_written_is_named_with_what_helps(tmp_path: Path, place: str) -> None:
    (tmp_path / place).write_text("a file where a folder is to be")
    make = Maker()
    with pytest.raises(StorageFailed, match=rf"{tmp_path}/{place}.*: make it writable for this user"):
        await provide(link(tmp_path), make)
    assert make.made == 0


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/x"),
        StepFailed("pip exited with 1", ["ERROR: Could not install packages", "[Errno 28] No space left on device"]),
    ],
)
async def test_a_disk_that_fills_up_meanwhile_is_said(tmp_path: Path, failure: Exception) -> None:
    async def fail(folder: Path) -> dict[str, str]:
        raise failure

    with pytest.raises(InsufficientDisk, match=rf"in {tmp_path}/cache, and .* are free"):
        await provide(link(tmp_path), fail, needed=1)
    assert leftovers(tmp_path) == []
