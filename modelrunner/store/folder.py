"""One folder of models: their files, and the changes of them, each wholly or not at all. Its files refer to no other
folder."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from modelrunner.defaults import ModelDefaults
from modelrunner.durable import discard, is_full, make_folder, read, translated, write
from modelrunner.errors import FolderMissing, InvalidModel
from modelrunner.store import startup
from modelrunner.store.blobs import Blob, Blobs, ReadProgress, is_intact
from modelrunner.store.bundles import Bundles
from modelrunner.store.catalog import Catalog, Entry, StoredModel
from modelrunner.store.digests import Digest
from modelrunner.store.diskusage import FolderSize
from modelrunner.store.draft import Draft
from modelrunner.store.files import Reserve, size_of
from modelrunner.store.index import Index
from modelrunner.store.manifests import LARGEST, UnpackedFile
from modelrunner.store.records import Records, Stamp
from modelrunner.store.references import Reference
from modelrunner.store.startup import FORMAT_FILE
from modelrunner.store.sweeping import Leftover, PathTest, Sweeper, leftovers
from modelrunner.types import Bundle

log = logging.getLogger(__name__)


class ModelFolder:
    """A folder of models that changes them, each time only if it is still there. The daemon's own folder `is_home`:
    only that folder is made if it is missing when it is opened. The methods that read take entries of models in the
    folder, and raise the errors of the methods of `Store`."""

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
        self.data, self.is_home = data, is_home
        self._lock = lock
        self._records = Records(data / "manifests" / "sha256")
        self._blobs = Blobs(data / "blobs" / "sha256")
        self._bundles = Bundles(data / "bundles", self._blobs)
        self.damaged = self._blobs.damaged
        """The digests of the damaged files."""
        self._opened: os.stat_result | None = None  # the folder as it was when it was opened
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
            if (tagged := self.catalog.tagged(tag)) and (entry := self._mine(tagged.id)):
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
            removed = []
            for leftover in self.leftovers(is_busy):
                if not is_busy(leftover.path):  # a pull may have continued it meanwhile
                    discard(leftover.path)
                    removed.append(leftover)
            return tuple(removed)

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

    # reading

    @property
    def partial(self) -> Path:
        """Returns the folder for incomplete files. It is made again if it was removed."""
        self.require()
        folder = self.data / "partial"
        make_folder(folder, synced=False)
        return folder

    def require(self) -> None:
        """Raises `FolderMissing` if the folder is gone, or another one is in its place: files there would be hidden
        under the disk that comes back, or lost. Raises `OSError`."""
        if not self._is_there():
            raise FolderMissing(f"the folder {self.data} is not there any more: mount its disk, or put it back")

    def _is_there(self) -> bool:
        try:
            status = os.stat(self.data)
        except (FileNotFoundError, NotADirectoryError):
            return False
        same = self._opened is None or os.path.samestat(status, self._opened)
        return same and (self.is_home or (self.data / FORMAT_FILE).exists())

    def contains(self, path: Path) -> bool:
        """Returns whether `path` is that of a stored file, or of an incomplete one."""
        return path.is_relative_to(self._blobs.folder) or self.waits(path)

    def waits(self, path: Path) -> bool:
        """Returns whether `path` is that of an incomplete file."""
        return path.is_relative_to(self.data / "partial")

    def have(self, digest: Digest) -> Blob | None:
        """Returns the blob; None if it is not here, or the disk fails: another folder may have it."""
        try:
            size = self._blobs.size(digest)
        except OSError:
            return None
        return Blob(digest, size, self._blobs.path(digest)) if size is not None else None

    def has_whole(self, id: Digest) -> bool:
        """Returns whether the model `id` lies here, with a manifest that can be read."""
        entry = self.catalog.entries.get(id)
        return entry is not None and entry.contents is not None

    def manifest(self, entry: Entry) -> bytes:
        with translated("reading the manifest", self.data):
            data = read(entry.id.within(self._records.folder), LARGEST)
        if Digest.of(data) != entry.id:
            raise InvalidModel("its manifest is damaged: pull the model again")
        return data

    def unpacked(self, entry: Entry) -> list[UnpackedFile] | None:
        """Returns the files that were unpacked from the archives of its manifest, None without archives."""
        return self._records.unpacked(entry.id).load()

    def bundle(self, entry: Entry) -> Bundle:
        contents = entry.usable()
        if ready := self._bundles.ready(entry, contents):
            return ready
        with self._lock, translated("laying out the model", self.data):
            self.require()
            return self._bundles.make(entry, contents)

    def missing(self, entry: Entry) -> tuple[Digest, ...]:
        if not entry.id.within(self._records.folder).is_file():
            return (entry.id,)
        return tuple(digest for digest, size in entry.blobs.items() if self._blobs.size(digest) != size)

    def verify(self, entry: Entry, progress: ReadProgress) -> tuple[Digest, ...]:
        damaged = [digest for digest in entry.blobs if not self.check(digest, progress)]
        with translated("reading the model", self.data):
            if not is_intact(entry.id.within(self._records.folder), entry.id):
                damaged.append(entry.id)
        return tuple(damaged)

    def check(self, digest: Digest, progress: ReadProgress) -> bool:
        with translated("reading the model", self.data):
            return self._blobs.check(digest, progress)

    def mark_damaged(self, digest: Digest, stamp: Stamp) -> None:
        with translated("looking at a file of models", self.data):
            if self._blobs.stamp(digest) == stamp:
                self._blobs.damaged.add(digest)

    def stamps(self) -> dict[Digest, Stamp]:
        with translated("looking at the files of models", self.data):
            digests = {digest for entry in self.catalog.entries.values() for digest in entry.blobs}
            return {digest: stamp for digest in digests if (stamp := self._blobs.stamp(digest)) is not None}

    def disk_usage(self) -> FolderSize:
        """Returns the disk usage. Reads the folder, which is slow."""
        self.require()
        with translated("measuring the store", self.data):
            free = shutil.disk_usage(self.data).free
            return FolderSize(self.data, self._blobs.total(), size_of(self.partial), free)
