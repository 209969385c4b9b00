"""The folders of partial files: one for each pull that was begun, kept for the next attempt, cleared when it is old."""

import contextlib
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelrunner.units import format_bytes

OLD = 7 * 86_400.0
_ABOUT = "origin"  # a file in each folder: what the pull was of
_LONGEST_ABOUT = 1000
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Leftover:
    """What an unfinished pull left: `origin` is its model ("" if unknown), `size` in bytes, `age` in seconds since
    something was last written to it."""

    folder: Path
    origin: str
    size: int
    age: float


class Leftovers:
    """`in_use` are the folders of running pulls, which are never cleared. All methods block."""

    def __init__(self, place: Path) -> None:
        self.in_use: set[Path] = set()
        self._place = place

    def folder_of(self, key: str) -> Path:
        return self._place / hashlib.sha256(key.encode()).hexdigest()[:32]

    def prepare(self, folder: Path, origin: str) -> None:
        """Makes the folder, in place of anything there that is none. Raises `OSError`."""
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink()
            folder.mkdir(mode=0o700)
        with contextlib.suppress(OSError):  # only for people
            about = os.open(folder / _ABOUT, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(about, "wb") as file:
                file.write(origin.encode())

    def holds_bytes(self, folder: Path) -> bool:
        return any(size for size, _ in _files(folder))

    def list(self) -> list[Leftover]:
        """Those of pulls that do not run now, the largest first."""
        found = []
        for folder in self._place.iterdir():
            if folder not in self.in_use:
                files = list(_files(folder))
                newest = max([modified for _, modified in files], default=folder.lstat().st_mtime)
                size = sum(size for size, _ in files)
                found.append(Leftover(folder, _about(folder), size, max(0.0, time.time() - newest)))
        return sorted(found, key=lambda leftover: -leftover.size)

    def clear(self, older_than: float = OLD) -> int:
        """Removes those that nothing was written to for `older_than` seconds. Returns the bytes that became free."""
        freed = 0
        for leftover in self.list():
            if leftover.age >= older_than:
                log.info("clearing an unfinished pull of %s: %s", leftover.origin, format_bytes(leftover.size))
                if leftover.folder.is_dir() and not leftover.folder.is_symlink():
                    shutil.rmtree(leftover.folder, ignore_errors=True)
                else:
                    leftover.folder.unlink(missing_ok=True)
                freed += leftover.size
        return freed


def _files(folder: Path) -> Iterator[tuple[int, float]]:
    """Bytes and time of the last change of every file but the note."""
    for path in folder.rglob("*") if folder.is_dir() and not folder.is_symlink() else (folder,):
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat()
            if path.is_file() and not path.is_symlink() and path.name != _ABOUT:
                yield found.st_size, found.st_mtime


def _about(folder: Path) -> str:
    try:
        about = os.open(folder / _ABOUT, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with open(about, "rb") as file:
        return file.read(_LONGEST_ABOUT).decode(errors="replace")
