"""File helpers of the store: open regular files only, measure them and the room for them, keep a reserve for
deletions."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from modelrunner import durable
from modelrunner.errors import BadRequest, InsufficientDisk
from modelrunner.units import format_bytes

# File systems slow down, and some fail, when they are filled to the last block.
_SPARE = 0.05


def open_regular(path: Path) -> FileIO:
    """Opens a regular file for reading. Raises `BadRequest` for anything else, at once, and `OSError`."""
    try:
        return durable.open_regular(path)
    except durable.UnusableFile:
        raise BadRequest(f"{path.name!r} is not a regular file") from None


def within(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields what is at `path` and below it, each with its state. Links are not followed. What is removed meanwhile,
    may not be read, or lies too deep for a path is left out. Raises `OSError`."""
    waiting = [path]
    while waiting:
        place = waiting.pop()
        try:
            status = os.lstat(place)
            if stat.S_ISDIR(status.st_mode):
                waiting += [place / name for name in os.listdir(place)]
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EACCES, errno.ENAMETOOLONG):
                raise
        else:
            yield place, status


def size_of(path: Path) -> int:
    """Returns the bytes of the regular files at `path`, a file or a folder. Links are not followed."""
    return sum(status.st_size for _, status in within(path) if stat.S_ISREG(status.st_mode))


def with_spare(size: int) -> int:
    """Returns the bytes that must be free for files of `size` bytes: 5 % more."""
    return int(size * (1 + _SPARE))


def require_space(folder: Path, needed: int) -> None:
    """Raises `InsufficientDisk` unless `needed` bytes and 5 % more are free where `folder` lies, and `OSError`."""
    needed, free = with_spare(needed), shutil.disk_usage(folder).free
    if needed > free:
        raise InsufficientDisk(
            f"not enough room on the disk: needed {needed} bytes ({format_bytes(needed)}), free {free} bytes"
            f" ({format_bytes(free)}) in {folder.parent}; remove models with `modelrunner rm`"
        )


class Reserve:
    """Disk space that is kept back, so that a model can be removed when the disk is full: the index without the model
    must be written before its files may be deleted."""

    SIZE = 1 << 18  # bytes, the least that is kept

    def __init__(self, path: Path) -> None:
        self._path = path

    def fill(self, index: int = 0) -> None:
        """Keeps enough for an index of `index` bytes, if the disk has room for it. Never raises."""
        needed = max(self.SIZE, 1 << index.bit_length())
        with contextlib.suppress(OSError):  # without room the old reserve stays
            if not self._is_kept(needed):
                # Random bytes, since some file systems store zeros in no space at all.
                durable.write(self._path, os.urandom(needed), synced=False)

    def _is_kept(self, needed: int) -> bool:
        try:
            status = os.lstat(self._path)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size >= needed

    def spend(self) -> None:
        """Frees the space. Raises `OSError`."""
        durable.discard(self._path)
