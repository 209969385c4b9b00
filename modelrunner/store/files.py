"""File helpers of the store: opening regular files only, and keeping some room back for deletions."""

import os
import stat
from io import FileIO
from pathlib import Path

from modelrunner.errors import BadRequest


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
