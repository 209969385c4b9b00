"""Files that are either wholly there or not there at all, also after a power cut: written under a temporary name,
synced, renamed, and their folder synced."""

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from modelrunner.errors import BadRequest, InsufficientDisk, StorageFailed
from modelrunner.units import format_bytes

_TEMPORARY = ".tmp"


@contextlib.contextmanager
def translated(what: str, folder: Path) -> Iterator[None]:
    """Turns an `OSError` of the block into `InsufficientDisk` or `StorageFailed`."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            free = shutil.disk_usage(folder).free
            raise InsufficientDisk(
                f"{what} failed: the disk is full. At least {format_bytes(Reserve.SIZE)} are needed and "
                f"{format_bytes(free)} free in {folder}: make room, for example with `modelrunner rm MODEL`"
            ) from error
        raise StorageFailed(f"{what} failed: {error.strerror} ({error.filename or folder})") from error


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def open_regular(path: Path) -> FileIO:
    """For reading. Raises `BadRequest` for anything else, at once, and `OSError`."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise BadRequest(f"{path.name!r} is not a regular file")
    # Without O_NONBLOCK the open of a FIFO that took its place would wait for a writer.
    return FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK))


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


class Reserve:
    """A little disk space kept back, so that a model can be removed when none is left: the smaller index that says so
    has to be written before anything may be deleted."""

    SIZE = 1 << 18  # room for an index of over a thousand models

    def __init__(self, path: Path) -> None:
        self._path = path

    def fill(self) -> None:
        """As far as there is room."""
        if self._path.exists():
            return
        try:
            # Random bytes, since some file systems store zeros in no space at all.
            self._path.write_bytes(os.urandom(self.SIZE))
        except OSError:
            self.spend()

    def spend(self) -> None:
        self._path.unlink(missing_ok=True)
