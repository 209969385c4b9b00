"""Files in a store that belong to no model: leftovers of interrupted pulls and packages, and damaged files that were
set aside."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from modelrunner import durable
from modelrunner.store import startup
from modelrunner.store.files import size_of

PathTest = Callable[[Path], bool]


class LeftoverKind(StrEnum):
    DOWNLOAD = "unfinished download"
    UNNAMED = "file of no model"
    ASIDE = "damaged file set aside"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file or folder of `size` bytes whose removal damages no model."""

    kind: LeftoverKind
    path: Path
    size: int


def in_no_use(path: Path) -> bool:
    return False


def leftovers(unnamed: Iterable[Path], data: Path, is_busy: PathTest) -> Iterator[Leftover]:
    """Yields the leftovers. `unnamed` are the files that no model names. `is_busy` is asked about each path in
    `partial` after it was listed, so that a download that begins meanwhile is in use, or is not seen. Raises
    `OSError`."""
    for path in sorted((data / "partial").iterdir()):
        if not is_busy(path):
            yield Leftover(LeftoverKind.DOWNLOAD, path, size_of(path))
    for path in unnamed:
        yield Leftover(LeftoverKind.UNNAMED, path, size_of(path))
    for name in (*startup.FOLDERS[:-1], "state"):
        for path in sorted((data / name).glob("*")):
            if durable.is_set_aside(path):
                yield Leftover(LeftoverKind.ASIDE, path, size_of(path))
