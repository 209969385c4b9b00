"""The models on disk. One `Store` owns a data directory's models; the daemon's lock keeps others away."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from modelrunner.defaults import ModelDefaults
from modelrunner.durable import discard, is_full, make_folder, read, translated, write
from modelrunner.errors import Conflict, InvalidModel
from modelrunner.store import startup, usage
from modelrunner.store.blobs import Blob, Blobs, ReadProgress, ignore, is_intact, verify
from modelrunner.store.bundles import Bundles
from modelrunner.store.catalog import Catalog, Entry, StoredModel
from modelrunner.store.digests import Digest
from modelrunner.store.draft import Draft
from modelrunner.store.files import Reserve, size_of
from modelrunner.store.index import Index
from modelrunner.store.leftovers import Leftover, leftovers
from modelrunner.store.manifests import LARGEST, UnpackedFile
from modelrunner.store.records import Records
from modelrunner.store.references import Reference
from modelrunner.store.sweeping import Sweeper
from modelrunner.store.usage import StoreUsage
from modelrunner.types import Bundle

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoveResult:
    """The names that were taken away, and the ID of the model that was deleted, None if the model is still there."""

    names: tuple[str, ...]
    deleted: str | None = None


class Store:
    """The event loop may call `get`, `list`, `damaged`, `find`, `have`, `missing` and a second `bundle` of a model:
    they take microseconds and never wait for a writer. The other calls wait for the disk and belong in a thread. Any
    number of threads may call at once.

    When a call returns, its change is on disk. When it raises, nothing has changed, here or on disk; when the daemon is
    killed meanwhile, the change is wholly done or not at all. Calls raise `InsufficientDisk` for a full disk and
    `StorageFailed` for one that fails.
    """

    def __init__(self, data: Path, quota: int | None = None) -> None:
        """Opens the store in `data`, or makes it. `quota` is the most bytes that models may have. Raises
        `StorageFailed` for the store of a newer release, which is left untouched, and for a disk that fails."""
        self.data = data
        self.watchers: list[Callable[[], None]] = []
        self.quota = quota
        self._records = Records(data / "manifests" / "sha256")
        self._lock = threading.RLock()
        self._reserve = Reserve(data / "reserve")
        self._blobs = Blobs(data / "blobs" / "sha256")
        self._bundles = Bundles(data / "bundles", self._blobs)
        self._sweeper = Sweeper(data, self._records, self._blobs, self._bundles)
        self._robbed: set[Digest] = set()  # models whose records still hold a tag that another model has got
        with translated("opening the store", data):
            self._catalog = self._open()

    def _open(self) -> Catalog:
        format = startup.check_format(self.data)
        self.data.parent.mkdir(parents=True, exist_ok=True)
        startup.make_folders(self.data)
        startup.upgrade(self.data, format, self._records)
        catalog, self._robbed, pending = startup.load(self._records, Index(self.data), self._blobs)
        self._sweeper.finish(catalog, pending)
        self._sweeper.tidy()
        self._reserve.fill()
        self._version = max((entry.version for entry in catalog.entries.values()), default=0)
        return catalog

    @property
    def partial(self) -> Path:
        """The folder for files that are on their way into the store. It is made again if it was removed."""
        folder = self.data / "partial"
        make_folder(folder, synced=False)
        return folder

    def list(self) -> list[StoredModel]:
        """The usable models, oldest first; their tags in the short form."""
        catalog = self._catalog
        return [catalog.models[entry.id] for entry in catalog.entries.values() if entry.contents]

    def damaged(self) -> tuple[StoredModel, ...]:
        """The models that cannot be used; `damage` says why. Pulling one again heals it, `remove` removes it."""
        return self._catalog.damaged

    def whole(self, text: str) -> tuple[StoredModel, str | None]:
        """The model that has the name or the ID `text`, damaged or not, and the name in its short form, None where
        `text` is an ID. A part of a name is refused. Raises `ModelNotFound`, `InvalidReference`."""
        catalog = self._catalog
        entry, named = catalog.find(text, whole=True)
        return catalog.models[entry.id], named[0].short if named else None

    def get(self, text: str) -> StoredModel:
        """By reference, model ID, at least 8 hexadecimal digits of it, or a part of a name that only one model has.
        Raises `ModelNotFound`, `InvalidReference` (also for what means several), `InvalidModel` for a damaged one."""
        catalog = self._catalog
        entry, _ = catalog.find(text)
        entry.usable()
        return catalog.models[entry.id]

    def have(self, digest: str) -> Blob | None:
        """The blob that is stored with this digest, for `create`: a source need not fetch it again. None if it is not
        here, or `verify` has found it damaged. Its content is not read. Raises `InvalidReference` for what is no
        digest."""
        wanted = Digest.parse(digest)
        size = self._blobs.size(wanted)
        return Blob(wanted, size, self._blobs.path(wanted)) if size is not None else None

    def files(self, text: str) -> dict[str, Blob]:
        """The model's files by their names in the bundle, for `create`. Raises as `get`, and `InvalidModel` for a file
        that is missing or damaged."""
        entry, _ = self._catalog.find(text)
        found = {name: self.have(str(file.digest)) for name, file in entry.usable().files.items()}
        if not all(found.values()):
            raise InvalidModel(f"files of {text} are missing or damaged: pull it again")
        return {name: blob for name, blob in found.items() if blob is not None}

    def manifest(self, text: str) -> bytes:
        """The model's manifest, byte for byte; its sha256 is the model's ID. Reads a file. Raises as `get`, and
        `StorageFailed`."""
        entry, _ = self._catalog.find(text)
        entry.usable()
        with translated("reading the manifest", self.data):
            data = read(entry.id.within(self._records.folder), LARGEST)
        if Digest.of(data) != entry.id:
            raise InvalidModel("its manifest is damaged: pull the model again")
        return data

    def bundle(self, text: str) -> Bundle:
        """The model laid out for an engine. The first call for a model may link files and parse its header. Raises as
        `get` does, and `InvalidModel` if a file is missing or damaged."""
        entry, _ = self._catalog.find(text)
        contents = entry.usable()
        if ready := self._bundles.ready(entry, contents):
            return ready
        with self._lock, translated("laying out the model", self.data):
            return self._bundles.make(entry, contents)

    def ingest(
        self, file: Path, *, digest: str | None = None, hashed: bool = False, progress: ReadProgress = ignore
    ) -> Blob:
        """Verifies and syncs a file on the store's file system (in `partial`), which `create` then takes from there.
        With `hashed`, its caller has found that it has the `digest`. Raises `SourceFailed` if its sha256 is not
        `digest`, `BadRequest` for what is no regular file."""
        with translated("storing a file", self.data):
            expected = Digest.parse(digest) if digest is not None else None
            return verify(file, expected, progress, hashed=hashed)

    def create(
        self,
        files: Mapping[str, Blob],
        reference: str | None,
        *,
        trust: bool = False,
        manifest: bytes | None = None,
        unpacked: Sequence[UnpackedFile] | None = None,
        defaults: ModelDefaults | None = None,
        licences: Sequence[Blob] = (),
        progress: ReadProgress = ignore,
    ) -> StoredModel:
        """Makes a model of ingested files, or of those that `have` returned, and gives it the name `reference`, which
        another model that has it loses. The same files always make the same model. A `manifest` is kept byte for byte
        and its digest is the model's ID; then the files are all that it names, and those that were `unpacked` from its
        archives, under any names. Without one, the model carries `defaults` and `licences`. `progress` is called while
        files that are stored already are read, and not once anything is changed. On any failure the files are where
        they were. Raises `InvalidModel` for files that are not a model's, `UnsupportedModel` for one that carries code
        unless `trust` is set."""
        tag = Reference.parse_name(reference) if reference is not None else None
        paths = {name: self._blobs.locate(blob) for name, blob in files.items()}
        with translated("storing the model", self.data):
            if manifest is None:
                draft = Draft.of(files, paths, trust, defaults, licences)
            else:
                draft = Draft.published(manifest, unpacked, files, paths, trust)
            blobs = [blob for blob in (*files.values(), *licences) if blob.digest in draft.contents.blobs]
            intact = self._blobs.intact(blobs, progress)
            with self._lock:
                usage.require_quota(self._catalog, self.quota, draft.contents.blobs)
                startup.make_folders(self.data)
                entry = draft.entry(self._catalog.entries.get(draft.id), tag, self._next_version(), int(time.time()))
                self._write(draft, entry, blobs, intact)
                self._settle(blobs)
                return self._catalog.models[draft.id]

    def _write(self, draft: Draft, entry: Entry, blobs: Iterable[Blob], intact: Container[Digest]) -> None:
        """Writes the pending record, blobs, manifest and bundle, and makes the record hold. Each is durable before the
        next. `intact` are the blobs that were stored already before the lock was taken."""
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
            self._sweeper.finish(self._catalog, [draft.id])

    def _settle(self, blobs: Iterable[Blob]) -> None:
        try:
            for blob in blobs:
                self._blobs.settle(blob)
        except OSError as error:
            log.warning("finished downloads are still there: %s", error)

    def tag(self, source: str, target: str) -> None:
        """Gives the model `source`, a whole name or an ID, one more name, which another model that has it loses. Raises
        as `get` does."""
        tag = Reference.parse_name(target)
        with self._lock, translated("storing the name", self.data):
            entry, _ = self._catalog.find(source, whole=True)
            entry.usable()
            if tag not in entry.tags:
                startup.make_folders(self.data)
                self._rewrite(replace(entry, tags=(*entry.tags, tag), version=self._next_version()))

    def remove(self, text: str, *, force: bool = False) -> RemoveResult:
        """Takes the name `text` away, and the model with its last name. Works on a full disk and for a damaged model. A
        model ID means the model with all of its names: more than one needs `force`, or `Conflict` is raised. The caller
        makes sure that the model is not in use. Raises as `whole`."""
        with self._lock, translated("removing the model", self.data):
            entry, named = self._catalog.find(text, whole=True)
            if named and len(entry.tags) > 1:
                removed = self._untag(entry, named[0])
            elif len(entry.tags) > 1 and not force:
                raise Conflict(
                    f"it has the names {', '.join(entry.names)}: remove them one by one, or use force for all"
                )
            else:
                removed = self._remove(entry)
            self._reserve.fill()
            return removed

    def _untag(self, entry: Entry, tag: Reference) -> RemoveResult:
        rest = tuple(other for other in entry.tags if other != tag)
        self._with_reserve(lambda: self._rewrite(replace(entry, tags=rest, version=self._next_version())))
        return RemoveResult((tag.short,))

    def _remove(self, entry: Entry) -> RemoveResult:
        self._with_reserve(self._settle_robbed)
        if self._records.read(entry.id) is None:
            self._with_reserve(lambda: self._records.write(entry.record))
        self._records.withdraw(entry.id)
        self._show(self._catalog.without(entry))
        self._sweeper.finish(self._catalog, [entry.id])
        return RemoveResult(tuple(entry.names), str(entry.id))

    def missing(self, text: str) -> tuple[Digest, ...]:
        """The model's digests whose file is missing, of another size, or was found damaged by `verify`; the ID of a
        damaged model. Takes microseconds. Pulling the model again heals them. Raises `ModelNotFound` and such."""
        entry, _ = self._catalog.find(text)
        if entry.contents is None or not entry.id.within(self._records.folder).is_file():
            return (entry.id,)
        return tuple(digest for digest, size in entry.blobs.items() if self._blobs.size(digest) != size)

    def verify(self, text: str, progress: ReadProgress = ignore) -> tuple[Digest, ...]:
        """Reads every byte of the model again, about a second per gigabyte. Returns its digests whose file is missing
        or damaged. From then on they count as missing, so the model is not served until pulling it again heals it.
        `progress` gets the size of each piece in bytes; it may stop the reading by raising."""
        entry, _ = self._catalog.find(text)
        if entry.contents is None:
            return (entry.id,)
        with translated("reading the model", self.data):
            found = [digest for digest in entry.blobs if not is_intact(self._blobs.path(digest), digest, progress)]
            self._blobs.damaged.difference_update(entry.blobs)
            self._blobs.damaged.update(found)
            if not is_intact(entry.id.within(self._records.folder), entry.id):
                found.append(entry.id)
            return tuple(found)

    def leftovers(self, busy: Collection[Path] = ()) -> tuple[Leftover, ...]:
        """What `prune` would remove. `busy` are the folders in `partial` that downloads use."""
        with translated("looking for leftovers", self.data), self._lock:
            return tuple(leftovers(self._sweeper.unnamed(self._catalog), self.data, busy))

    def prune(self, busy: Collection[Path] = ()) -> tuple[Leftover, ...]:
        """Removes leftovers and returns them. While a model is damaged, blobs that no model names are kept, since they
        may be its own."""
        with self._lock, translated("removing leftovers", self.data):
            found = self.leftovers(busy)
            for leftover in found:
                discard(leftover.path)
            return found

    def disk_usage(self) -> StoreUsage:
        """Reads the folders: slow."""
        with translated("measuring the store", self.data):
            return StoreUsage(usage.sizes(self._catalog), self._blobs.total(), size_of(self.partial))

    def used(self) -> int:
        """Bytes of all models, what they share counted once. Takes milliseconds for thousands of models."""
        return usage.used(self._catalog)

    def freed(self, ids: Iterable[str]) -> tuple[int, ...]:
        """The bytes that removing these models would free, one after the other."""
        return tuple(usage.freed(self._catalog, ids))

    def require_quota(self, needed: int) -> None:
        """Raises `InsufficientDisk` if `needed` bytes more do not fit into the quota."""
        usage.require_quota(self._catalog, self.quota, {}, needed)

    def _next_version(self) -> int:
        self._version += 1
        return self._version

    def _rewrite(self, entry: Entry) -> None:
        """Takes the entry into the catalog when its record is written. Models that lose a tag to it get their new
        records afterwards: until then its higher version tells."""
        self._settle_robbed()
        catalog, robbed = self._catalog.with_entry(entry)
        size = self._records.write(entry.record)
        self._show(catalog)
        self._robbed.update(other.id for other in robbed)
        try:
            self._settle_robbed()
        except OSError as error:
            log.warning("a name that was moved is still in the record of the other model as well: %s", error)
        self._reserve.fill(size)

    def _settle_robbed(self) -> None:
        for id in tuple(self._robbed):
            if id in self._catalog.entries:
                self._records.write(self._catalog.entries[id].record)
            self._robbed.discard(id)

    def _show(self, catalog: Catalog) -> None:
        self._catalog = catalog
        for tell in self.watchers:
            tell()

    def _with_reserve(self, change: Callable[[], object]) -> None:
        """Makes a change that is part of a deletion, with the disk space of the reserve if the disk is full."""
        try:
            change()
        except OSError as error:
            if not is_full(error):
                raise
            self._reserve.spend()
            change()
