"""Removes files that belong to no model. Automatically, it removes only those for which a pending record gives the
reason."""

import contextlib
import logging
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from modelrunner import durable
from modelrunner.store import startup
from modelrunner.store.blobs import Blobs
from modelrunner.store.bundles import Bundles
from modelrunner.store.catalog import Catalog
from modelrunner.store.digests import Digest
from modelrunner.store.files import size_of, within
from modelrunner.store.records import Records

_OLD = 7 * 86_400.0  # seconds
log = logging.getLogger(__name__)


class Sweeper:
    """Sweeps the folders of a store. Not locked: `Store` lets one call at a time change it."""

    def __init__(self, data: Path, records: Records, blobs: Blobs, bundles: Bundles) -> None:
        self._data, self._records, self._blobs, self._bundles = data, records, blobs, bundles

    def finish(self, catalog: Catalog, pending: Iterable[Digest]) -> None:
        """Removes the files of models with a pending record that are not in the catalog, except those that its models
        share. While the files of a damaged model are unknown, all stay. The next start removes those that cannot be
        removed now."""
        for id in pending:
            with _tidying(id.within(self._records.folder)):
                record = self._records.pending(id)
                if id in catalog.entries:
                    self._records.settle(id)
                elif record is not None and catalog.is_sound:
                    for digest in set(record.digests()):
                        if not catalog.users[digest]:
                            self._blobs.remove(digest)
                    self._bundles.remove(id)
                    durable.discard(id.within(self._records.folder))
                    self._records.forget(id)

    def tidy(self) -> None:
        """Removes temporary files, and downloads that no pull will continue. Failures are logged."""
        for folder in (
            self._data,
            self._data / "partial",
            self._records.folder,
            self._blobs.folder,
            self._bundles.folder,
        ):
            with _tidying(folder):
                durable.sweep_temporaries(folder)
        with _tidying(self._data / "partial"):
            _sweep_shared(self._data / "partial")
            _sweep_old(self._data / "partial")

    def unnamed(self, catalog: Catalog) -> list[Path]:
        """Returns the blobs and bundles that no model names; no blobs while those of a damaged model are unknown."""
        paths = [id.within(self._bundles.folder) for id in Digest.among(self._bundles.folder) - catalog.entries.keys()]
        if catalog.is_sound:
            paths += [self._blobs.path(digest) for digest in self._blobs.all() if not catalog.users[digest]]
        return sorted(paths)


@contextlib.contextmanager
def _tidying(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning("leftovers in %s could not be removed: %s", path, error)


def _sweep_shared(partial: Path) -> None:
    """Removes finished downloads that a model shares: a write into one of them would change the store."""
    for path, status in within(partial):
        if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
            path.unlink()


def _sweep_old(partial: Path) -> None:
    """Removes unfinished downloads that have not been written for a week."""
    for path in partial.iterdir():
        newest = max((status.st_mtime for _, status in within(path)), default=time.time())
        if time.time() - newest > _OLD:
            log.info("removing an unfinished download of a week ago: %s", path)
            durable.discard(path)


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
