"""Files that are either wholly there or not there at all, also after a power cut: written under a temporary name,
synced, renamed, and their folder synced."""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from modelrunner.errors import InsufficientDisk, StorageFailed
from modelrunner.units import format_bytes

_TEMPORARY = ".tmp"
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_LEAST = 1 << 18  # bytes; room for an index of over a thousand models


@contextlib.contextmanager
def translated(what: str, folder: Path) -> Iterator[None]:
    """Turns an `OSError` of the block into `InsufficientDisk` or `StorageFailed`, which name the path and the remedy.
    `what` is what failed, `folder` where it was at work."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            require_room(what, folder, _LEAST, full=True)
        path = error.filename or folder
        remedy = f": make {path} writable for user {os.getuid()}" if error.errno in _REFUSED else ""
        raise StorageFailed(f"{what} failed: {error.strerror or error} ({path}){remedy}") from error


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def require_room(what: str, folder: Path, needed: int, *, full: bool = False) -> None:
    """Raises `InsufficientDisk` unless `needed` bytes are free in `folder`; in any case if the disk has said that it is
    `full`."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    if full or free < needed:
        raise InsufficientDisk(
            f"{what} failed: the disk is full. At least {format_bytes(needed)} are needed and {format_bytes(free)} "
            f"free in {folder}: make room, for example with `modelrunner rm MODEL`"
        )


def write(path: Path, data: bytes) -> None:
    """Replaces `path`. On any failure the old file is still there. Raises `OSError`."""
    temporary = temporary_name(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            sync(descriptor)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Private and durable. The folder above has to exist. Raises `OSError`."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return
    sync_folder(path.parent)


def sync(descriptor: int) -> None:
    """A failure is final: the kernel reports a lost write once, so a second fsync of the same file would succeed."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync alone leaves the data in the drive's cache
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def sync_file(path: Path) -> None:
    """For a file that somebody else has written. Raises `OSError`."""
    with open(path, "rb") as file:
        sync(file.fileno())


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(path: Path) -> Path:
    """Beside `path` and unlike any other writer's, so that correctness never rests on a lock."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{_TEMPORARY}")


def sweep_temporaries(folder: Path) -> None:
    """Removes what writers that were killed left behind."""
    for entry in os.scandir(folder):
        if entry.name.startswith(".") and entry.name.endswith(_TEMPORARY):
            os.unlink(entry.path)
