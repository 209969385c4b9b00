"""Files that survive a crash, power cuts included: a write either succeeds as a whole or changes nothing.

A file is written under a temporary name, synced and renamed, and then its folder is synced. Links, FIFOs and folders in
a file's place are never followed and never waited for."""

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from modelrunner.errors import InsufficientDisk, StorageFailed
from modelrunner.units import format_bytes

_TEMPORARY = ".tmp"
_ASIDE = ".corrupt-"
_LARGEST = 64 << 20  # most bytes of a file that is read and written whole
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_LEAST = 1 << 18  # bytes; room for an index of over a thousand models
log = logging.getLogger(__name__)


@contextlib.contextmanager
def translated(what: str, folder: Path) -> Iterator[None]:
    """Turns an `OSError` of the block into `InsufficientDisk` or `StorageFailed`, which name the path and the remedy.
    `what` is the failed work, `folder` its place."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise InsufficientDisk(
                f"{what} failed: the disk is full. At least {format_bytes(_LEAST)} are needed and {_free(folder)} free "
                f"in {folder}: make room, for example with `modelrunner rm MODEL`"
            ) from error
        path = error.filename or folder
        remedy = f": make {path} writable for user {os.getuid()}" if error.errno in _REFUSED else ""
        raise StorageFailed(f"{what} failed: {error.strerror or error} ({path}){remedy}") from error


def _free(folder: Path) -> str:
    """Returns the free space where the folder is, or would be, as text."""
    try:
        there = next(place for place in (folder, *folder.parents) if place.exists())
        return format_bytes(shutil.disk_usage(there).free)
    except OSError:
        return "an unknown number of bytes are"


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write(path: Path, data: bytes, *, synced: bool = True, mode: int = 0o600) -> None:
    """Replaces `path` with `data`, at most 64 MiB, as `read` takes. Raises `OSError`, with the old content kept or put
    back. Without `synced` a power cut may damage the file. `mode` has its permissions, whatever the umask is."""
    if len(data) > _LARGEST:
        raise OSError(errno.EFBIG, f"a file of more than {_LARGEST} bytes could not be read back", str(path))
    temporary = temporary_name(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(descriptor, mode)
            if synced:
                sync(descriptor)
        replace(temporary, path, synced=synced)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def replace(temporary: Path, path: Path, *, synced: bool = True) -> None:
    """Renames `temporary`, a synced file, to `path` and syncs the folder. A folder at `path` is set aside. Raises
    `OSError`, with the old file kept or put back."""
    if _is_folder(path):
        set_aside(path, "a folder is in the place of a file")
    if not synced:
        os.rename(temporary, path)
        return
    before = _second_link(path)
    try:
        with opened_folder(path.parent) as folder:
            os.rename(temporary, path)
            try:
                os.fsync(folder)
            except OSError:
                os.rename(before, path) if before else os.unlink(path)
                raise
    finally:
        if before:
            with contextlib.suppress(OSError):  # the change is made; the next start sweeps the link
                before.unlink()


def _second_link(path: Path) -> Path | None:
    """Makes a temporary link to the file; returns None without a file."""
    link = temporary_name(path)
    try:
        os.link(path, link)
    except FileNotFoundError:
        return None
    return link


def read(path: Path, most: int = _LARGEST) -> bytes:
    """Reads a regular file of at most `most` bytes. Raises `OSError`, which is `UnusableFile` for a larger file, a
    link, a FIFO, a folder or the like."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UnusableFile(errno.EFBIG, f"it is larger than {most} bytes", str(path))
    return data


def open_ours(path: str, flags: int) -> int:
    """An opener for `open`, for a file that the daemon or the command line keeps: a new one is the user's alone, a link
    is refused, a FIFO is not waited for. Raises `OSError`."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


class UnusableFile(OSError):
    """The file at a path is not regular, or too large."""


def open_regular(path: Path) -> FileIO:
    """Opens a regular file for reading, without following a link or waiting for a writer. Raises `OSError`, which is
    `UnusableFile` for anything but a regular file."""
    try:
        file = FileIO(path, opener=open_ours)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # a link, a socket, a folder
            raise UnusableFile(errno.EINVAL, "it is not a regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UnusableFile(errno.EINVAL, "it is not a regular file", str(path))
    return file


def make_folder(path: Path, *, synced: bool = True) -> bool:
    """Makes a private folder, inside an existing one. Anything else at the path (such as a link) is set aside; then
    returns True. Raises `OSError`."""
    odd = False
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            return False
        set_aside(path, "it is in the place of a folder")
        odd = True
    except FileNotFoundError:
        pass
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if synced:
        sync_folder(path.parent)
    return odd


def set_aside(path: Path, reason: object) -> Path:
    """Renames a damaged file or folder, so that it is neither used nor lost, and logs it. Returns the new path. Raises
    `OSError`."""
    aside = path.with_name(f"{path.name}{_ASIDE}{time.time_ns()}")
    os.rename(path, aside)
    log.error("%s cannot be used (%s): it is set aside as %s", path, reason, aside.name)
    return aside


def is_set_aside(path: Path) -> bool:
    return _ASIDE in path.name


def discard(path: Path) -> None:
    """Removes whatever is at `path`: nothing, a file, a link (not its target) or a folder with its content. Raises
    `OSError`."""
    if not _is_folder(path):
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path)
    except RecursionError:
        _flatten(path)
        shutil.rmtree(path)


def _flatten(path: Path) -> None:
    """Moves folders that lie too deep for `rmtree`, as an engine may make them, up until there are none below
    others."""
    while folders := [entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)]:
        for folder in folders:
            for inner in list(os.scandir(folder)):
                if inner.is_dir(follow_symlinks=False):
                    os.rename(inner.path, path / secrets.token_hex(8))
                else:
                    os.unlink(inner.path)
            os.rmdir(folder)


def sync(descriptor: int) -> None:
    """Syncs the file. A failure is final: the kernel reports a lost write once, and a second fsync of the same file
    would succeed."""
    if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync alone leaves the data in the drive's cache
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def sync_file(path: Path) -> None:
    """Syncs a file that another program has written. Raises `OSError`."""
    with open(path, "rb") as file:
        sync(file.fileno())


def sync_folder(path: Path) -> None:
    with opened_folder(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """Yields a descriptor of the folder, for calls that take `dir_fd`. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def temporary_name(path: Path) -> Path:
    """Returns a name beside `path` that no other writer uses."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{_TEMPORARY}")


def sweep_temporaries(folder: Path) -> None:
    """Removes the temporary files of writers that were killed."""
    for name in os.listdir(folder):
        if name.startswith(".") and name.endswith(_TEMPORARY):
            discard(folder / name)


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False
