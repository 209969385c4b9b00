"""Which models there are and what they are called.

`index.json` holds all of it and is replaced whole. Each model's record lies once more beside its manifest, as
`HEX.names`: an index that is damaged or lost is made again from these. A record is removed before its model leaves the
index, so a manifest that has a record and is not in the index belongs to a model that the index has lost.
"""

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from modelrunner import durable
from modelrunner.durable import JsonFile
from modelrunner.store.digests import Digest

_NAMES = ".names"
log = logging.getLogger(__name__)


class IndexEntry(msgspec.Struct, frozen=True):
    """`tags` are normal forms; `created` is when the model came here, in Unix seconds."""

    id: str
    tags: list[str]
    created: int


class _IndexFile(msgspec.Struct, frozen=True):
    """`complete` is False from the time that something damaged was met until a person prunes the store."""

    models: list[IndexEntry]
    complete: bool = True


class Index:
    """Not locked: `Store` lets one call at a time change it.

    `complete` is True while everything in the store that no model names may be removed. It is False after damage: then
    the files of a model that nobody knows any more may be among them.
    """

    def __init__(self, folder: Path, manifests: Path) -> None:
        self._file = JsonFile(folder / "index.json", _IndexFile)
        self._manifests = manifests
        self.complete = True

    def load(self, *, new: bool) -> list[IndexEntry]:
        """The records, oldest first. A store that is not `new` has an index, or has lost it. Raises `OSError`."""
        content = self._file.load()
        records = content.models if content is not None else []
        lost = self._beyond({record.id for record in records}, named=content is not None)
        self.complete = not lost and (new if content is None else content.complete)
        return sorted([*records, *lost], key=lambda record: record.created) if lost else records

    def save(self, records: Iterable[IndexEntry]) -> int:
        """Returns the size of the file in bytes. Raises `OSError`; then the file is as before."""
        return self._file.save(_IndexFile(list(records), self.complete))

    def note(self, record: IndexEntry) -> None:
        """Writes the second copy of a record. A failure is only logged, since the index holds the record as well."""
        try:
            self._copy(Digest.parse(record.id)).save(record)
        except OSError as error:
            log.warning("the names of the model %s have no second copy: %s", record.id, error)

    def forget(self, id: Digest) -> None:
        """Removes the second copy of a record, before the model leaves the index. Raises `OSError`."""
        durable.discard(self._copy(id).path)
        durable.sync_folder(self._manifests)

    def copies(self) -> dict[Digest, Path]:
        """The files of the second copies, by model ID."""
        return {Digest(path.stem): path for path in self._manifests.glob(f"{'[0-9a-f]' * 64}{_NAMES}")}

    def _copy(self, id: Digest) -> JsonFile[IndexEntry]:
        return JsonFile(self._manifests / f"{id.hex}{_NAMES}", IndexEntry)

    def _beyond(self, known: set[str], *, named: bool) -> list[IndexEntry]:
        """The models that the index does not know, from their second copies, and unless `named` also those that have
        only a manifest. A name that two of them have belongs to the one whose copy is newer."""
        copies = {id: path for id, path in self.copies().items() if str(id) not in known}
        found = [self._recovered(id) for id in sorted(copies, key=lambda id: -copies[id].lstat().st_mtime_ns)]
        if not named:
            found += [self._nameless(id) for id in sorted(Digest.among(self._manifests) - copies.keys())]
        taken: set[str] = set()
        lost = []
        for record in found:
            lost.append(msgspec.structs.replace(record, tags=[tag for tag in record.tags if tag not in taken]))
            taken.update(record.tags)
            log.error("the index has lost the model %s (%s): it is taken in again", record.id, ", ".join(record.tags))
        return lost

    def _recovered(self, id: Digest) -> IndexEntry:
        record = self._copy(id).load()
        return record if record is not None and record.id == str(id) else self._nameless(id)

    def _nameless(self, id: Digest) -> IndexEntry:
        try:
            created = int(os.lstat(id.within(self._manifests)).st_mtime)
        except FileNotFoundError:
            created = 0
        return IndexEntry(str(id), [], created)
