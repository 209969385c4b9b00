"""Records of the models and their names: one for each model, in `HEX.names` beside the model's manifest `HEX`.

The record is written last when a model is made, and renamed first, to `HEX.pending`, when it is removed. Only a pending
record without a `HEX.names` allows the removal of its model's files, besides a user's `prune`. A record that is lost or
damaged is made again from its second copy, `HEX.copy`; without both, a model loses at most its names.
"""

import errno
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from modelrunner import durable
from modelrunner.errors import InvalidReference
from modelrunner.jsonfile import JsonFile
from modelrunner.store.digests import Digest
from modelrunner.store.manifests import UnpackedFile
from modelrunner.store.references import Reference

_NAMES, _PENDING, _COPY, _UNPACKED = ".names", ".pending", ".copy", ".unpacked"
log = logging.getLogger(__name__)


class Record(msgspec.Struct, frozen=True):
    """The record of a model. `tags` are normal forms; `created` is the time when the model was stored, in Unix seconds;
    `blobs` are the digests of all of its files. `number` is the model's place in the list. Every change of the record
    raises its `version`: a tag that two records have belongs to the higher one."""

    id: str
    tags: list[str]
    created: int
    blobs: list[str] = []
    number: int = 0
    version: int = 0

    def references(self) -> tuple[Reference, ...]:
        """Returns the tags that are references; the others are logged."""
        references = []
        for text in self.tags:
            try:
                references.append(Reference.parse(text))
            except InvalidReference as error:
                log.error("a name of the model %s was dropped: %s", self.id, error.message)
        return tuple(dict.fromkeys(references))

    def digests(self) -> tuple[Digest, ...]:
        try:
            return tuple(map(Digest.parse, self.blobs))
        except InvalidReference:
            log.error("the record of the model %s names files with invalid digests", self.id)
            return ()


Stamp = tuple[int, int, int]
"""Size in bytes, time of the last change in nanoseconds, and inode: another file at the same path has another one."""


def stamp(status: os.stat_result) -> Stamp:
    return status.st_size, status.st_mtime_ns, status.st_ino


@dataclass(slots=True)
class Files:
    """The files of one model in the folder: the stamps of record and manifest, None for a missing one."""

    record: Stamp | None = None
    manifest: Stamp | None = None
    pending: bool = False


class Records:
    """The folder of manifests and records. Not locked: `Store` lets one call at a time change it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self) -> dict[Digest, Files]:
        """Returns every model that has a file. Opens none. Raises `OSError`."""
        models: defaultdict[str, Files] = defaultdict(Files)
        # By the folder's descriptor: the kernel need not walk the path for each of thousands of files.
        with durable.opened_folder(self.folder) as folder, os.scandir(folder) as files:
            for file in files:
                stem, _, suffix = file.name.partition(".")
                match suffix:
                    case "":
                        models[stem].manifest = stamp(file.stat(follow_symlinks=False))
                    case "names":
                        models[stem].record = stamp(file.stat(follow_symlinks=False))
                    case "pending":
                        models[stem].pending = True
                    case "copy":
                        _ = models[stem]
        return {id: files for stem, files in models.items() if (id := Digest.named(stem))}

    def read(self, id: Digest) -> Record | None:
        """Returns the record; None if it is missing, or damaged, or if the disk cannot read it: then it is set aside.
        Raises `OSError`."""
        try:
            return self._file(id, _NAMES).load()
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EACCES):
                raise
            durable.set_aside(self.path(id), error)
            return None

    def write(self, record: Record) -> int:
        """Writes the record and returns its size in bytes. Raises `OSError`; then the record is unchanged."""
        size = self._file(Digest.parse(record.id), _NAMES).save(record)
        self._copy(record)
        return size

    def prepare(self, record: Record) -> int:
        """Writes the record of a model that is about to be made, as pending, and returns its size. Raises `OSError`."""
        return self._file(Digest.parse(record.id), _PENDING).save(record)

    def withdraw(self, id: Digest) -> None:
        """Makes the model's record pending, which takes no space on the disk. Raises `OSError`; then the record is
        unchanged."""
        names, pending = self.path(id, _NAMES), self.path(id, _PENDING)
        with durable.opened_folder(self.folder) as folder:
            os.rename(names, pending)
            try:
                os.fsync(folder)
            except OSError:
                os.rename(pending, names)
                raise

    def pending(self, id: Digest) -> Record | None:
        """Returns the pending record; None if it is missing, or damaged, which is set aside. Raises `OSError`."""
        return self._file(id, _PENDING).load()

    def settle(self, id: Digest) -> None:
        """Removes the pending record. Raises `OSError`."""
        durable.discard(self.path(id, _PENDING))

    def forget(self, id: Digest) -> None:
        """Removes the rest of the records of a removed model. Raises `OSError`."""
        durable.discard(self.path(id, _COPY))
        durable.discard(self.unpacked(id).path)
        self.settle(id)

    def unpacked(self, id: Digest) -> JsonFile[list[UnpackedFile]]:
        """Returns the file with the list of files that were unpacked from the archives of a model."""
        return JsonFile(self.path(id, _UNPACKED), list[UnpackedFile])

    def recover(self, id: Digest) -> Record:
        """Makes the record of a model that has lost it. Raises `OSError`."""
        record = self._file(id, _COPY).load()
        if record is None:
            record = Record(str(id), [], int(time.time()))
        log.error("the model %s (%s) has lost its record: it is made again", id, ", ".join(record.tags))
        self.write(record)
        return record

    def _copy(self, record: Record) -> None:
        self._file(Digest.parse(record.id), _COPY, cache=True).save(record)

    def path(self, id: Digest, suffix: str = _NAMES) -> Path:
        return self.folder / f"{id.hex}{suffix}"

    def _file(self, id: Digest, suffix: str, *, cache: bool = False) -> JsonFile[Record]:
        def check(record: Record) -> None:
            if record.id != str(id):
                raise ValueError(f"it is the record of {record.id[:80]!r}")

        return JsonFile(self.path(id, suffix), Record, cache=cache, check=check)


class _FirstIndex(msgspec.Struct, frozen=True):
    """`index.json` of a store of format 1, which held all names."""

    models: list[Record]


def migrate_first(data: Path, records: Records, blobs: Callable[[Digest], Iterable[Digest]]) -> None:
    """Migrates from format 1 to 2: gives each model of the index a record of its own, in the order of the index.
    Records that the index does not know were second copies, and stay. If it is killed, it can be done again. Raises
    `OSError`."""
    index = JsonFile(data / "index.json", _FirstIndex)
    content = index.load()
    for number, record in enumerate(content.models if content else (), start=1):
        id = Digest.named(record.id.removeprefix("sha256:"))
        if id is not None:
            of_model = [str(digest) for digest in blobs(id)]
            records.write(msgspec.structs.replace(record, number=number, version=number, blobs=of_model))
    durable.discard(index.path)


def without_stolen(names: Mapping[Digest, tuple[int, tuple[Reference, ...]]]) -> dict[Digest, tuple[Reference, ...]]:
    """Returns the tags of each model, by its ID. `names` has the version of each record and its tags: a tag stays with
    the highest version that has it."""
    owners: dict[Reference, tuple[int, Digest]] = {}
    for id, (version, tags) in names.items():
        for tag in tags:
            owners[tag] = max(owners.get(tag, (version, id)), (version, id))
    return {id: tuple(tag for tag in tags if owners[tag][1] == id) for id, (_, tags) in names.items()}
