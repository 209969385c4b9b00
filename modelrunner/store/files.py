"""What the store does with files besides: it opens only regular ones, says what the disk refused, and keeps some room
back."""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from modelrunner.errors import BadRequest, InsufficientDisk, StorageFailed
from modelrunner.units import format_bytes

_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)


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
        mend = "; let the daemon's user write there, or set another data_dir" if error.errno in _FORBIDDEN else ""
        raise StorageFailed(f"{what} failed: {error.strerror or error} ({error.filename or folder}){mend}") from error


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def open_regular(path: Path) -> FileIO:
    """For reading. Raises `BadRequest` for anything else, at once, and `OSError`."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise BadRequest(f"{path.name!r} is not a regular file")
    # Without O_NONBLOCK the open of a FIFO that took its place would wait for a writer.
    return FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK))


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
