"""One folder of models: it changes them, each change wholly or not at all. Its files refer to no other folder."""

import logging
import os
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from modelrunner.defaults import ModelDefaults
from modelrunner.durable import discard, is_full, translated, write
from modelrunner.store import startup
from modelrunner.store.blobs import Blob, ReadProgress
from modelrunner.store.catalog import Catalog, Entry, StoredModel
from modelrunner.store.digests import Digest
from modelrunner.store.draft import Draft
from modelrunner.store.files import Reserve
from modelrunner.store.folderreader import FolderReader
from modelrunner.store.index import Index
from modelrunner.store.manifests import UnpackedFile
from modelrunner.store.references import Reference
from modelrunner.store.sweeping import Leftover, PathTest, Sweeper, leftovers

log = logging.getLogger(__name__)


class ModelFolder(FolderReader):
    """A folder of models that changes them, each time only if it is still there. The daemon's own folder `is_home`:
    only that folder is made if it is missing when it is opened."""

    def __init__(
        self,
        data: Path,
        lock: threading.RLock,
        changed: Callable[["ModelFolder", Sequence[Digest]], None],
        require_quota: Callable[["ModelFolder", Mapping[Digest, int]], None],
        next_version: Callable[[], int],
        owner: Callable[[Reference], Digest | None],
        *,
        is_home: bool,
    ) -> None:
        """Opens the folder `data`, or makes it. `lock` is held during each change. `changed` is called after each
        change with the changed models, `require_quota` before one that adds blobs, with their sizes. `next_version` is
        higher than that of any record in all folders, and `owner` the model that a name means among all. Raises
        `StorageFailed` for a folder of a newer release, which is left untouched, and for a disk that fails."""
        super().__init__(data, lock, is_home=is_home)
        self._changed = changed
        self._require_quota = require_quota
        self._next_version = next_version
        self._owner = owner
        self._reserve = Reserve(data / "reserve")
        self._sweeper = Sweeper(data, self._records, self._blobs, self._bundles)
        self._robbed: set[Digest] = set()  # models whose records still hold a tag of another model
        with translated("opening the store", data):
            self.catalog = self._open()

    def _open(self) -> Catalog:
        format = startup.check_format(self.data)
        if self.is_home:
            self.data.parent.mkdir(parents=True, exist_ok=True)
        startup.make_folders(self.data)
        startup.upgrade(self.data, format, self._records)
        catalog, self._robbed, pending = startup.load(self._records, Index(self.data), self._blobs)
        self._sweeper.finish(catalog, pending)
        self._sweeper.tidy()
        self._reserve.fill()
        self._opened = os.stat(self.data)
        return catalog

    def create(
        self,
        files: Mapping[str, Blob],
        tag: Reference | None,
        *,
        trust: bool,
        manifest: bytes | None,
        unpacked: Sequence[UnpackedFile] | None,
        defaults: ModelDefaults | None,
        licences: Sequence[Blob],
        progress: ReadProgress,
        then: Callable[[Entry], StoredModel],
    ) -> StoredModel:
        """Makes a model as `Store.create` does, from files on the folder's own file system. Returns the result of
        `then`, which is called with the lock held."""
        with translated("storing the model", self.data):
            paths = {name: self._blobs.locate(blob) for name, blob in files.items()}
            if manifest is None:
                draft = Draft.of(files, paths, trust, defaults, licences)
            else:
                draft = Draft.published(manifest, unpacked, files, paths, trust)
            blobs = [blob for blob in (*files.values(), *licences) if blob.digest in draft.contents.blobs]
            intact = self._blobs.intact(blobs, progress)
            with self._lock:
                self._require_quota(self, draft.contents.blobs)
                self.require()
                startup.make_folders(self.data)
                entry = draft.entry(self._mine(draft.id), tag, self._next_version(), int(time.time()))
                self._write(draft, entry, blobs, intact)
                self._settle(blobs)
                return then(self.catalog.entries[draft.id])

    def _write(self, draft: Draft, entry: Entry, blobs: Iterable[Blob], intact: Container[Digest]) -> None:
        """Writes the pending record, blobs, manifest and bundle, and makes the record valid. Each is durable before the
        next. `intact` are the blobs that were stored before the lock was taken."""
        try:
            self._records.prepare(entry.record)
            for blob in blobs:
                if blob.digest not in intact or self._blobs.size(blob.digest) != blob.size:
                    self._blobs.adopt(blob)
            self._blobs.put(draft.config_data)
            if draft.unpacked is not None:
                self._records.unpacked(draft.id).save(list(draft.unpacked))
            write(draft.id.within(self._records.folder), draft.manifest)
            self._bundles.lay_out(draft.id, draft.contents)
            self._bundles.remember(draft.id, draft.header)
            self._rewrite(entry)
        finally:
            self._sweeper.finish(self.catalog, [draft.id])

    def _settle(self, blobs: Iterable[Blob]) -> None:
        try:
            for blob in blobs:
                self._blobs.settle(blob)
        except OSError as error:
            log.warning("finished downloads are still there: %s", error)

    def tag(self, id: Digest, tag: Reference) -> None:
        """Gives the model one more name, which no model of another folder has then; another model of the folder with
        that name loses it."""
        with self._changing("storing the name"):
            entry = self._mine(id)
            assert entry is not None
            startup.make_folders(self.data)
            self._rewrite(replace(entry, tags=(*entry.tags, tag), version=self._next_version()))

    def untag(self, tag: Reference) -> None:
        """Takes the name away from the model that has it. Works on a full disk."""
        if self.catalog.tagged(tag) is None:
            return
        with self._changing("removing the name"):
            if (found := self.catalog.tagged(tag)) and (entry := self._mine(found.id)):
                rest = tuple(other for other in entry.tags if other != tag)
                self._with_reserve(lambda: self._rewrite(replace(entry, tags=rest, version=self._next_version())))
                self._reserve.fill()

    def remove(self, id: Digest) -> None:
        """Removes the model with all of its names. Works on a full disk and for a damaged model."""
        with self._changing("removing the model"):
            self._remove(self.catalog.entries[id])
            self._reserve.fill()

    def _remove(self, entry: Entry) -> None:
        self._with_reserve(self._settle_robbed)
        if self._records.read(entry.id) is None:
            self._with_reserve(lambda: self._records.write(entry.record))
        self._records.withdraw(entry.id)
        self._show(self.catalog.without(entry), [entry.id])
        self._bundles.forget(entry.id)
        self._sweeper.finish(self.catalog, [entry.id])

    def leftovers(self, is_busy: PathTest) -> tuple[Leftover, ...]:
        """Returns the leftovers, as `Store.leftovers` does."""
        with self._changing("looking for leftovers"):
            return tuple(leftovers(self._sweeper.unnamed(self.catalog), self.data, is_busy))

    def prune(self, is_busy: PathTest) -> tuple[Leftover, ...]:
        """Removes leftovers, as `Store.prune` does."""
        with self._changing("removing leftovers"):
            found = []
            for leftover in self.leftovers(is_busy):
                if not is_busy(leftover.path):  # a pull may have continued it meanwhile
                    discard(leftover.path)
                    found.append(leftover)
            return tuple(found)

    @contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """Holds the lock for a change. Raises `FolderMissing` before it, and its `OSError` as `translated` does."""
        with self._lock, translated(what, self.data):
            self.require()
            yield

    def _mine(self, id: Digest) -> Entry | None:
        """Returns the model without the names that mean a model of another folder. A new record has a higher version
        than that model's, and would take these names back."""
        if (entry := self.catalog.entries.get(id)) is None:
            return None
        return replace(entry, tags=tuple(tag for tag in entry.tags if self._owner(tag) in (None, id)))

    def _rewrite(self, entry: Entry) -> None:
        """Puts the entry into the catalog once its record is written. Models that lose a tag to it get their new
        records afterwards: until then its higher version decides."""
        self._settle_robbed()
        catalog, robbed = self.catalog.with_entry(entry)
        size = self._records.write(entry.record)
        self._show(catalog, [entry.id, *(other.id for other in robbed)])
        self._robbed.update(other.id for other in robbed)
        try:
            self._settle_robbed()
        except OSError as error:
            log.warning("a name that was moved is still in the record of the other model as well: %s", error)
        self._reserve.fill(size)

    def _settle_robbed(self) -> None:
        for id in tuple(self._robbed):
            if id in self.catalog.entries:
                self._records.write(self.catalog.entries[id].record)
            self._robbed.discard(id)

    def _show(self, catalog: Catalog, changed: Sequence[Digest]) -> None:
        self.catalog = catalog
        self._changed(self, changed)

    def _with_reserve(self, change: Callable[[], object]) -> None:
        """Makes a change that is part of a deletion, with the disk space of the reserve if the disk is full."""
        try:
            change()
        except OSError as error:
            if not is_full(error):
                raise
            self._reserve.spend()
            change()
