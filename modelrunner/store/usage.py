"""How much disk models use, what removing some of them would free, and the quota."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from modelrunner.errors import InsufficientDisk
from modelrunner.store.catalog import Catalog, StoredModel
from modelrunner.store.digests import Digest
from modelrunner.units import format_bytes


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes of one model; `shared` is the part that other models use too."""

    model: StoredModel
    size: int
    shared: int

    @property
    def reclaimable(self) -> int:
        """Bytes that removing the model would free."""
        return self.size - self.shared


class StoreUsage(NamedTuple):
    """`total` is the bytes of all blobs, each counted once; `partial` those of unfinished downloads."""

    models: list[ModelSize]
    total: int
    partial: int


def sizes(catalog: Catalog) -> list[ModelSize]:
    found = []
    for entry in catalog.entries.values():
        if entry.contents:
            shared = sum(size for digest, size in entry.blobs.items() if catalog.users[digest] > 1)
            found.append(ModelSize(catalog.models[entry.id], sum(entry.blobs.values()), shared))
    return found


def used(catalog: Catalog) -> int:
    """Bytes of all models, what they share counted once."""
    blobs: dict[Digest, int] = {}
    for entry in catalog.entries.values():
        blobs |= entry.blobs
    return sum(blobs.values())


def freed(catalog: Catalog, ids: Iterable[str]) -> Iterator[int]:
    """The bytes that each removal would free, one model after the other."""
    users = Counter(catalog.users)
    for id in ids:
        blobs = catalog.entries[Digest.parse(id)].blobs
        users.subtract(blobs.keys())
        yield sum(size for digest, size in blobs.items() if not users[digest])


def require_quota(catalog: Catalog, quota: int | None, blobs: Mapping[Digest, int], unknown: int = 0) -> None:
    """Raises `InsufficientDisk` if `blobs`, with their sizes, and `unknown` bytes more do not fit into the quota beside
    the models that are here."""
    if quota is None:
        return
    here = used(catalog)
    needed = unknown + sum(size for digest, size in blobs.items() if not catalog.users[digest])
    if needed and here + needed > quota:
        raise InsufficientDisk(
            f"the quota for models is {format_bytes(quota)} (models_quota): the models here have {format_bytes(here)}"
            f" and {format_bytes(needed)} are needed. Remove models with `modelrunner rm`, or those that were not used"
            + (f" for longest with `modelrunner prune --to {quota - needed}`" if needed <= quota else "")
            + ("; or raise the quota" if needed <= quota else ": even then it would not fit; raise the quota")
        )
