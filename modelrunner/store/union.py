"""The models of several folders as one catalog.

A name that several models have belongs to the one whose record has the highest version: the last one to get it. With
equal versions the first folder has it, and usable folders go before absent ones. A
model that lies in several folders is one model, with all of its names there.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from modelrunner.store.catalog import Catalog, Entry
from modelrunner.store.digests import Digest
from modelrunner.store.references import Reference


@dataclass(frozen=True, slots=True)
class AbsentFolder:
    """A folder that cannot be used now. `reason` says why; `catalog` has the models that it had, without their
    files."""

    path: Path
    reason: str
    catalog: Catalog

    @property
    def message(self) -> str:
        return f"the folder {self.path} {self.reason}"


def united(catalogs: Sequence[Catalog]) -> Catalog:
    """Returns the models by their age. The catalogs are in the order of their folders."""
    largest = max(catalogs, key=lambda catalog: len(catalog.entries))
    others = [id for catalog in catalogs if catalog is not largest for id in catalog.entries]
    return updated(largest, catalogs, others).by_age() if others else largest


def updated(union: Catalog, catalogs: Sequence[Catalog], ids: Iterable[Digest]) -> Catalog:
    """Returns the union after the models `ids` have changed in some of the catalogs."""
    affected = dict.fromkeys(ids)
    for tag in [tag for id in affected for entry in _copies((union, *catalogs), id) for tag in entry.tags]:
        for entry in (union.tagged(tag), _owner(catalogs, tag)):
            if entry is not None:
                affected[entry.id] = None
    return union.changed(affected, [united for id in affected if (united := _united(catalogs, id))])


def _united(catalogs: Sequence[Catalog], id: Digest) -> Entry | None:
    copies = list(_copies(catalogs, id))
    if not copies:
        return None
    best = next((entry for entry in copies if entry.contents), copies[0])
    mine = (tag for entry in copies for tag in entry.tags if (owner := _owner(catalogs, tag)) and owner.id == id)
    tags = tuple(dict.fromkeys(mine))
    return best if tags == best.tags else replace(best, tags=tags)


def _copies(catalogs: Iterable[Catalog], id: Digest) -> Iterator[Entry]:
    return (catalog.entries[id] for catalog in catalogs if id in catalog.entries)


def _owner(catalogs: Iterable[Catalog], tag: Reference) -> Entry | None:
    entries = [entry for catalog in catalogs if (entry := catalog.tagged(tag))]
    return max(entries, key=lambda entry: (not entry.absent, entry.version), default=None)
