"""Engines in the cache: made under a lock in a folder beside their place, renamed when finished, shared by data
directories.

    CACHE/llama.cpp-wheel-2026.10.11549-1a2b3c4d/     engine.json (written last), the engine, users/
    CACHE/llama.cpp-wheel-2026.10.11549-1a2b3c4d.lock
    DATA/engines/llama.cpp -> CACHE/llama.cpp-wheel-2026.10.11549-1a2b3c4d

`users/` holds one file for each data directory that links here, with the link's path in it. Uninstalling removes the
link, and the entry itself once no link in `users/` points to it.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from modelrunner import BackendContext, InstallProgress, ProgressCallback
from modelrunner_llamacpp import engines
from modelrunner_llamacpp.engines import MARKER, Engine, Kind

_LOCK_POLL = 0.1  # seconds; a file lock cannot be awaited


def key(kind: Kind, version: str, *options: str) -> str:
    """The name of an entry; whatever makes two installations differ is in it."""
    digest = hashlib.sha256("\0".join(options).encode()).hexdigest()
    return f"llama.cpp-{kind}-{version}-{digest[:8]}"


async def provide(
    context: BackendContext,
    kind: Kind,
    name: str,
    make: Callable[[Path], Awaitable[Engine]],
    progress: ProgressCallback,
) -> None:
    """Links this data directory to the entry `name`, made by `make(folder)` if it is not there in working order.
    `make` fills an empty folder, and describes the engine in it. An older entry that nobody uses any more goes."""
    entry = context.cache / name
    link = engines.link(context, kind)
    before = link.readlink() if link.is_symlink() else entry
    async with _locked(entry, progress):
        if engines.usable(entry, kind) is None:
            await _make(entry, make)
        _point(link, entry)
    if before != entry:
        await _discard_unused(before)


async def withdraw(context: BackendContext, kind: Kind) -> None:
    """Removes this data directory's link, and the entry if no other data directory uses it. Nothing there is fine."""
    link = engines.link(context, kind)
    if link.is_symlink():
        entry = link.readlink()
        link.unlink()
        await _discard_unused(entry)


async def _discard_unused(entry: Path) -> None:
    if not entry.is_dir():
        return
    async with _locked(entry, lambda _: None):
        if entry.is_dir() and not any(_users(entry)):
            doomed = _beside(entry)
            entry.rename(doomed / entry.name)  # out of sight in one step, then removed at leisure
            await asyncio.to_thread(shutil.rmtree, doomed, ignore_errors=True)


def disk_usage(folders: list[Path]) -> int:
    """Bytes on disk, each file once however many names it has."""
    files = (os.lstat(Path(root, name)) for folder in folders for root, _, names in os.walk(folder) for name in names)
    return sum({(found.st_dev, found.st_ino): found.st_blocks * 512 for found in files}.values())


@contextlib.asynccontextmanager
async def _locked(entry: Path, progress: ProgressCallback) -> AsyncIterator[None]:
    """One installer of an entry at a time, on this machine. The kernel lets go when the holder dies."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(f"{entry}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _try_lock(lock):
            progress(InstallProgress("waiting for another installation of the same engine"))
            while not _try_lock(lock):  # noqa: ASYNC110 (the holder is another process)
                await asyncio.sleep(_LOCK_POLL)
        yield
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _make(entry: Path, make: Callable[[Path], Awaitable[Engine]]) -> None:
    for leftover in entry.parent.glob(f"{entry.name}.tmp-*"):  # of a run that was killed: we hold its lock
        await asyncio.to_thread(shutil.rmtree, leftover, ignore_errors=True)
    work = _beside(entry)
    try:
        made = work / "new"
        made.mkdir()
        engine = await make(made)
        marker = {"kind": engine.kind, "version": engine.version, "devices": engine.devices}
        (made / MARKER).write_text(json.dumps(marker), "utf-8")
        (made / "users").mkdir()
        await asyncio.to_thread(_sync, made)
        if entry.exists():  # there, but not in working order
            entry.rename(work / "old")
        made.rename(entry)
        _sync_folder(entry.parent)
    finally:
        await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)


def _beside(entry: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=entry.parent))


def _sync(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            if not path.is_symlink():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        _sync_folder(Path(root))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _point(link: Path, entry: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    user = hashlib.sha256(os.fsencode(link)).hexdigest()[:16]
    (entry / "users" / user).write_text(str(link), "utf-8")
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(entry)
    fresh.replace(link)
    _sync_folder(link.parent)


def _users(entry: Path) -> Iterator[Path]:
    """The links of data directories that point here."""
    for user in (entry / "users").iterdir():
        link = Path(user.read_text("utf-8"))
        if link.is_symlink() and link.readlink() == entry:
            yield link
