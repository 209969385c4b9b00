"""The models on disk. One `Store` owns a data directory's models; the daemon's lock keeps others away."""

import logging
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from modelrunner.defaults import ModelDefaults
from modelrunner.durable import discard, is_full, translated, write
from modelrunner.errors import Conflict
from modelrunner.store import startup, usage
from modelrunner.store.blobs import Blob, ReadProgress, ignore, verify
from modelrunner.store.catalog import Catalog, Entry, StoredModel
from modelrunner.store.digests import Digest
from modelrunner.store.draft import Draft
from modelrunner.store.files import Reserve
from modelrunner.store.index import Index
from modelrunner.store.leftovers import Leftover, leftovers
from modelrunner.store.manifests import UnpackedFile
from modelrunner.store.reading import StoreReader
from modelrunner.store.references import Reference
from modelrunner.store.sweeping import Sweeper

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoveResult:
    """The names that were taken away, and the ID of the model that was deleted, None if the model is still there."""

    names: tuple[str, ...]
    deleted: str | None = None


class Store(StoreReader):
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
        super().__init__(data)
        self.watchers: list[Callable[[], None]] = []
        self.quota = quota
        self._reserve = Reserve(data / "reserve")
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
