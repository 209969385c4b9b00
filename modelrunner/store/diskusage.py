"""The disk space of models, the space that removals would free, and the quota."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from modelrunner.errors import QuotaExceeded
from modelrunner.store.catalog import Catalog, StoredModel
from modelrunner.store.digests import Digest
from modelrunner.units import format_bytes


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes of one model in a folder; `shared` is the part that other models of the folder use too."""

    model: StoredModel
    folder: Path
    size: int
    shared: int

    @property
    def reclaimable(self) -> int:
        """Returns the bytes that removing the model would free."""
        return self.size - self.shared


class FolderSize(NamedTuple):
    """`total` is the bytes of all blobs, each counted once; `partial` those of unfinished downloads; `free` is the free
    space of the disk."""

    path: Path
    total: int
    partial: int
    free: int


class StoreUsage(NamedTuple):
    """`total` and `partial` are those of all folders."""

    models: list[ModelSize]
    total: int
    partial: int
    folders: list[FolderSize]


def sizes(catalog: Catalog, folder: Path, shown: Mapping[Digest, StoredModel]) -> Iterator[ModelSize]:
    """Yields the sizes of the models of a folder; `shown` has them by their IDs."""
    for entry in catalog.entries.values():
        if entry.contents and entry.id in shown:
            shared = sum(size for digest, size in entry.blobs.items() if catalog.users[digest] > 1)
            yield ModelSize(shown[entry.id], folder, sum(entry.blobs.values()), shared)


def used(catalog: Catalog) -> int:
    """Returns the bytes of all models; shared files count once."""
    blobs: dict[Digest, int] = {}
    for entry in catalog.entries.values():
        blobs |= entry.blobs
    return sum(blobs.values())


def freed(catalog: Catalog, ids: Iterable[Digest]) -> Iterator[int]:
    """Yields the bytes that each removal would free, one model after the other."""
    users = Counter(catalog.users)
    for id in ids:
        blobs = catalog.entries[id].blobs
        users.subtract(blobs.keys())
        yield sum(size for digest, size in blobs.items() if not users[digest])


def require_quota(quota: int, here: int, needed: int) -> None:
    """Raises `QuotaExceeded` if `needed` bytes more do not fit into the quota beside those that models have
    `here`."""
    if needed and here + needed > quota:
        raise QuotaExceeded(
            f"the quota for models is {format_bytes(quota)} (models_quota): the models here have {format_bytes(here)}"
            f" and {format_bytes(needed)} are needed. Remove models with `modelrunner rm`, or the least recently"
            + (f" used with `modelrunner prune --to {quota - needed}`" if needed <= quota else "")
            + (
                "; or raise the quota"
                if needed <= quota
                else ": even without other models it would not fit; raise the quota"
            )
        )
