"""Engines in the cache, for backends. An engine is made under a lock in a folder beside its place, renamed when it is
finished, and shared by data directories.

    CACHE/llama.cpp-wheel-2026.10.11549-1a2b3c4d/     engine.json (MARKER, written last), the engine, users/
    CACHE/llama.cpp-wheel-2026.10.11549-1a2b3c4d.lock
    DATA/engines/llama.cpp -> CACHE/llama.cpp-wheel-2026.10.11549-1a2b3c4d

`users/` holds one file for each data directory that links here, with the link's path in it. Uninstalling removes the
link, and the entry itself once no link in `users/` points to it.
"""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from modelrunner.backend import InstallProgress, ProgressCallback
from modelrunner.durable import sync_file, sync_folder
from modelrunner.errors import InsufficientDisk, ModelRunnerError, StorageFailed
from modelrunner.sdk.programs import StepFailed
from modelrunner.units import format_bytes

MARKER = "engine.json"
"""The last file written into an engine's folder: without it the folder is not an engine."""
_LOCK_POLL = 0.1  # seconds; a file lock cannot be awaited


class InstallState:
    """The state of installations for `Backend.status`. `step` is the current one, "" for none. `failure` is that of the
    last installation, "" after a success."""

    def __init__(self) -> None:
        self.step = ""
        self.failure = ""

    @contextlib.contextmanager
    def reported(self, what: str, progress: ProgressCallback) -> Iterator[ProgressCallback]:
        """Reports an installation of `what`. It yields a callback that keeps the `step` and passes it on."""

        def tell(step: InstallProgress) -> None:
            self.step = f"{step.message} ({step.current}/{step.total})" if step.total else step.message
            progress(step)

        self.step, self.failure = what, ""
        try:
            yield tell
        except ModelRunnerError as error:
            self.failure = error.message
            raise
        finally:
            self.step = ""


def key(engine: str, version: str, *options: str) -> str:
    """Returns the name of an entry, which contains every value in which two installations may differ."""
    digest = hashlib.sha256("\0".join(options).encode()).hexdigest()
    return f"{engine}-{version}-{digest[:8]}"


def read_marker(folder: Path) -> Mapping[str, Any] | None:
    """Returns the marker of the finished engine in `folder`; None for anything else."""
    try:
        marker = json.loads((folder / MARKER).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None


async def provide(
    link: Path,
    entry: Path,
    make: Callable[[Path], Awaitable[Mapping[str, Any]]],
    works: Callable[[Path], bool],
    progress: ProgressCallback,
    *,
    needed: int = 0,
) -> None:
    """Points `link`, in a data directory, to `entry`, in the cache. If `works(entry)` is false, `make(folder)` makes
    the entry: it fills an empty folder and returns the marker's content. `needed` is bytes of disk for all of it,
    downloads included. The entry that the link pointed to before is removed if no data directory uses it.

    Raises `InsufficientDisk` and `StorageFailed`, before any download where that can be known."""
    before = link.readlink() if link.is_symlink() else entry
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        async with _locked(entry, progress):
            if not works(entry):
                _check_room(entry.parent, needed)
                await _make(entry, make)
            _point(link, entry)
    except OSError as error:
        raise _storage_failed(error, entry.parent, needed) from error
    except StepFailed as failed:
        if any(os.strerror(errno.ENOSPC) in line for line in failed.lines):
            raise _full(entry.parent, needed) from failed
        raise
    if before != entry:
        await _discard_unused(before)


def _check_room(cache: Path, needed: int) -> None:
    if _free(cache) < needed:
        raise _full(cache, needed)


def _free(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def _full(cache: Path, needed: int) -> InsufficientDisk:
    return InsufficientDisk(
        f"installing the engine needs {format_bytes(needed)} in {cache}, and {format_bytes(_free(cache))} are free: "
        "make room there, or set MODELRUNNER_CACHE_DIR to a folder on another disk"
    )


def _storage_failed(error: OSError, cache: Path, needed: int) -> ModelRunnerError:
    """Returns the error for a disk failure during an installation, with the remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and cache.is_dir():
        return _full(cache, needed)
    return StorageFailed(
        f"the engine cannot be installed: {error.filename or cache}: {error.strerror or error}. Engines lie in "
        f"{cache}: make it writable for this user, or set MODELRUNNER_CACHE_DIR to another folder"
    )


async def withdraw(link: Path) -> None:
    """Removes a data directory's link, and the entry if no other data directory uses it. Either may be missing."""
    if link.is_symlink():
        entry = link.readlink()
        link.unlink()
        await _discard_unused(entry)


async def discard_leftovers(cache: Path, engine: str) -> None:
    """Removes leftovers of interrupted installations of `engine`, except those whose lock is held."""
    for file in cache.glob(f"{engine}-*.lock"):
        with contextlib.closing(_Lock(file)) as lock:
            if lock.taken():
                for leftover in cache.glob(f"{file.stem}.*/"):
                    await asyncio.to_thread(shutil.rmtree, leftover, ignore_errors=True)


async def _discard_unused(entry: Path) -> None:
    if not entry.is_dir():
        return
    async with _locked(entry, lambda _: None):
        if entry.is_dir() and not any(_users(entry)):
            doomed = _beside(entry)
            entry.rename(doomed / entry.name)  # out of sight in one step, then removed in a thread
            await asyncio.to_thread(shutil.rmtree, doomed, ignore_errors=True)


def disk_usage(folders: list[Path]) -> int:
    """Returns bytes on disk. A file with several names counts once."""
    files = (os.lstat(Path(root, name)) for folder in folders for root, _, names in os.walk(folder) for name in names)
    return sum({(file.st_dev, file.st_ino): file.st_blocks * 512 for file in files}.values())


@contextlib.asynccontextmanager
async def _locked(entry: Path, progress: ProgressCallback) -> AsyncIterator[None]:
    """Holds the lock of an entry, so that one process on this machine installs it at a time. The kernel releases the
    lock of a process that dies."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(_Lock(Path(f"{entry}.lock"))) as lock:
        if not lock.taken():
            progress(InstallProgress("waiting for another installation of the same engine"))
            while not lock.taken():  # noqa: ASYNC110 (the holder is another process)
                await asyncio.sleep(_LOCK_POLL)
        yield


class _Lock:
    def __init__(self, file: Path) -> None:
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def taken(self) -> bool:
        """Tries to take the lock; returns True on success."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._descriptor)


async def _make(entry: Path, make: Callable[[Path], Awaitable[Mapping[str, Any]]]) -> None:
    for leftover in entry.parent.glob(f"{entry.name}.tmp-*"):  # a killed run has left it: we hold its lock
        await asyncio.to_thread(shutil.rmtree, leftover, ignore_errors=True)
    work = _beside(entry)
    try:
        folder = work / "new"
        folder.mkdir()
        marker = await make(folder)
        (folder / MARKER).write_text(json.dumps(marker), "utf-8")
        (folder / "users").mkdir()
        await asyncio.to_thread(_sync, folder)
        if entry.exists():  # it does not work
            entry.rename(work / "old")
        folder.rename(entry)
        sync_folder(entry.parent)
    finally:
        await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)


def _beside(entry: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=entry.parent))


def _sync(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            if not path.is_symlink():
                sync_file(path)
        sync_folder(Path(root))


def _point(link: Path, entry: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    user = hashlib.sha256(os.fsencode(link)).hexdigest()[:16]
    (entry / "users" / user).write_text(str(link), "utf-8")
    fresh = link.with_name(f".{link.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(entry)
    fresh.replace(link)
    sync_folder(link.parent)


def _users(entry: Path) -> Iterator[Path]:
    """Yields the links of data directories to this entry."""
    for user in (entry / "users").iterdir():
        link = Path(user.read_text("utf-8"))
        if link.is_symlink() and link.readlink() == entry:
            yield link
