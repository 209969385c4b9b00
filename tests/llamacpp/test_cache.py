"""Entries of the cache: finished or absent, made once, shared, and removed with their last user."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from modelrunner import BackendContext, InstallProgress
from modelrunner_llamacpp import cache, engines
from modelrunner_llamacpp.engines import Engine, Kind

NAME = cache.key(Kind.NATIVE, "1.0", "-DX=1")


def context(root: Path, data: str = "data") -> BackendContext:
    return BackendContext(root / data / "engines", root / "cache", root / data / "logs", {})


class Maker:
    """Fills an entry as a build does; counts how often it was asked."""

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.made = 0
        self.began = asyncio.Event()
        self._gate = gate

    async def __call__(self, folder: Path) -> Engine:
        self.made += 1
        self.began.set()
        if self._gate:
            await self._gate.wait()
        (folder / "bin").mkdir()
        program = folder / "bin/llama-server"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        return Engine(Kind.NATIVE, program, "1.0", devices=False)


async def provide(
    where: BackendContext, make: Callable[[Path], Awaitable[Engine]], said: list[InstallProgress] | None = None
) -> None:
    await cache.provide(where, Kind.NATIVE, NAME, make, (said if said is not None else []).append)


def found(where: BackendContext) -> Engine | None:
    return engines.usable(engines.link(where, Kind.NATIVE), Kind.NATIVE)


def leftovers(root: Path) -> list[str]:
    return [path.name for path in (root / "cache").iterdir() if ".tmp-" in path.name]


async def test_made_once_for_all_data_directories(tmp_path: Path) -> None:
    make = Maker()
    await provide(context(tmp_path), make)
    await provide(context(tmp_path), make)
    await provide(context(tmp_path, "other"), make)
    assert make.made == 1
    assert found(context(tmp_path)) == found(context(tmp_path, "other"))
    assert leftovers(tmp_path) == []


async def test_a_failed_run_leaves_nothing(tmp_path: Path) -> None:
    async def fail(folder: Path) -> Engine:
        (folder / "half").write_text("done")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        await provide(context(tmp_path), fail)
    assert found(context(tmp_path)) is None
    assert leftovers(tmp_path) == []


async def test_what_a_killed_run_left_is_cleared(tmp_path: Path) -> None:
    half = tmp_path / "cache" / f"{NAME}.tmp-dead" / "new"
    half.mkdir(parents=True)
    (half / "object.o").write_text("half")
    await provide(context(tmp_path), Maker())
    assert found(context(tmp_path)) is not None
    assert leftovers(tmp_path) == []


async def test_a_broken_entry_is_made_again(tmp_path: Path) -> None:
    make = Maker()
    await provide(context(tmp_path), make)
    (tmp_path / "cache" / NAME / "bin/llama-server").unlink()
    assert found(context(tmp_path)) is None
    await provide(context(tmp_path), make)
    assert found(context(tmp_path)) is not None
    assert make.made == 2


async def test_two_at_once_make_one(tmp_path: Path) -> None:
    gate = asyncio.Event()
    first, second, said = Maker(gate), Maker(), list[InstallProgress]()
    waits = asyncio.Event()

    def tell(step: InstallProgress) -> None:
        said.append(step)
        waits.set()

    one = asyncio.create_task(provide(context(tmp_path), first))
    await first.began.wait()
    two = asyncio.create_task(cache.provide(context(tmp_path, "other"), Kind.NATIVE, NAME, second, tell))
    await waits.wait()
    gate.set()
    await asyncio.gather(one, two)
    assert (first.made, second.made) == (1, 0)
    assert "waiting for another installation" in said[0].message
    assert found(context(tmp_path, "other")) is not None


async def test_one_that_waits_can_be_cancelled(tmp_path: Path) -> None:
    gate = asyncio.Event()
    first, waits = Maker(gate), asyncio.Event()
    one = asyncio.create_task(provide(context(tmp_path), first))
    await first.began.wait()
    two = asyncio.create_task(cache.provide(context(tmp_path), Kind.NATIVE, NAME, Maker(), lambda _: waits.set()))
    await waits.wait()
    two.cancel()
    with pytest.raises(asyncio.CancelledError):
        await two
    gate.set()
    await one
    assert found(context(tmp_path)) is not None


async def test_the_entry_goes_with_its_last_user(tmp_path: Path) -> None:
    await provide(context(tmp_path), Maker())
    await provide(context(tmp_path, "other"), Maker())
    await cache.withdraw(context(tmp_path), Kind.NATIVE)
    assert found(context(tmp_path)) is None
    assert found(context(tmp_path, "other")) is not None
    await cache.withdraw(context(tmp_path, "other"), Kind.NATIVE)
    assert not (tmp_path / "cache" / NAME).exists()
    await cache.withdraw(context(tmp_path, "other"), Kind.NATIVE)
    assert leftovers(tmp_path) == []


async def test_a_data_directory_that_was_deleted_is_no_user(tmp_path: Path) -> None:
    await provide(context(tmp_path), Maker())
    await provide(context(tmp_path, "gone"), Maker())
    engines.link(context(tmp_path, "gone"), Kind.NATIVE).unlink()
    await cache.withdraw(context(tmp_path), Kind.NATIVE)
    assert not (tmp_path / "cache" / NAME).exists()


async def test_an_update_drops_the_entry_that_nobody_uses_any_more(tmp_path: Path) -> None:
    older, where = cache.key(Kind.NATIVE, "0.9"), context(tmp_path)
    await cache.provide(where, Kind.NATIVE, older, Maker(), lambda _: None)
    await provide(where, Maker())
    assert not (tmp_path / "cache" / older).exists()
    engine = found(where)
    assert engine is not None
    assert engine.folder == tmp_path / "cache" / NAME


def test_options_and_versions_have_entries_of_their_own() -> None:
    names = {cache.key(Kind.NATIVE, version, *options) for version in ("1", "2") for options in (("a", "b"), ("ab",))}
    assert len(names) == 4


def test_disk_usage_counts_hard_links_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    alone = cache.disk_usage([tmp_path])
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    assert cache.disk_usage([tmp_path]) == alone >= 100_000
