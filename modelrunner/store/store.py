"""The models on disk. One `Store` owns a data directory's models; the daemon's lock keeps others away."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from modelrunner import api
from modelrunner.durable import is_full, make_folder, translated, write
from modelrunner.errors import Conflict, InvalidModel, InvalidReference
from modelrunner.store import formats, safetensors_model, startup
from modelrunner.store.blobs import Blob, Blobs, is_intact, verify
from modelrunner.store.bundles import Bundles
from modelrunner.store.catalog import Catalog, Entry
from modelrunner.store.digests import Digest
from modelrunner.store.draft import Draft
from modelrunner.store.files import Reserve
from modelrunner.store.index import Index, Record
from modelrunner.store.manifests import Contents
from modelrunner.store.references import Reference
from modelrunner.types import Bundle

# Outside the class, whose method `list` hides the type.
Removed = list[api.Untagged | api.Deleted]
DiskUsage = tuple[list[api.ModelUsage], int, int]
log = logging.getLogger(__name__)


class Store:
    """`get`, `list` and a second `bundle` of a model take microseconds and never wait for a writer, so the event loop
    may call them; everything else waits for the disk and belongs in a thread. Any number of threads may call at once.

    What a call has answered is on disk; what failed or was cut off is wholly done or not at all. Calls raise
    `InsufficientDisk` where space ran out and `StorageFailed` where the disk failed; nothing else is lost then.
    """

    def __init__(self, data: Path) -> None:
        """Opens the store in `data`, or makes it. Raises `StorageFailed` for the store of a newer release, which is
        left untouched."""
        self.data = data
        self.partial = data / "partial"
        self.generation = 0
        self._manifests = data / "manifests" / "sha256"
        self._lock = threading.RLock()
        self._reserve = Reserve(data / "reserve")
        self._index = Index(data, self._manifests)
        self._blobs = Blobs(data / "blobs" / "sha256")
        self._bundles = Bundles(data / "bundles", self._blobs)
        with translated("opening the store", data):
            self._catalog = self._open()

    def _open(self) -> Catalog:
        exists = startup.check_format(self.data)
        self.data.parent.mkdir(parents=True, exist_ok=True)
        for name in ("", "manifests", "manifests/sha256", "blobs", "blobs/sha256", "bundles", "partial"):
            make_folder(self.data / name)
        records = self._index.load()
        catalog = startup.load(records, self._manifests, self._blobs)
        if not self._index.exists:
            self._index.save(records)
        if not exists:
            write(self.data / "format", f"{startup.FORMAT}\n".encode())
        startup.sweep(catalog, self.data, self._manifests, self._blobs, self._bundles)
        self._reserve.fill()
        return catalog

    def list(self) -> list[api.Model]:
        """The usable models, oldest first; their tags in the short form."""
        catalog = self._catalog
        return [catalog.models[entry.id] for entry in catalog.entries.values() if entry.contents]

    def get(self, text: str) -> api.Model:
        """By reference, model ID, at least 8 hexadecimal digits of it, or a part of a name that only one model has.
        Raises `ModelNotFound`, `InvalidReference` (also for what means several), `InvalidModel` for a damaged one."""
        catalog = self._catalog
        entry, _ = catalog.find(text)
        _contents(entry)
        return catalog.models[entry.id]

    def bundle(self, text: str) -> Bundle:
        """The model laid out for an engine. The first call for a model may link files and parse its header. Raises as
        `get` does, and `InvalidModel` if a file is missing."""
        entry, _ = self._catalog.find(text)
        contents = _contents(entry)
        if ready := self._bundles.ready(entry, contents):
            return ready
        with self._lock, translated("laying out the model", self.data):
            return self._bundles.make(entry, contents)

    def ingest(self, file: Path, *, digest: str | None = None) -> Blob:
        """Verifies and syncs a file on the store's file system (in `partial`), which `create` then takes from there.
        Raises `SourceFailed` if its sha256 is not `digest`, `BadRequest` for what is no regular file."""
        with translated("storing a file", self.data):
            return verify(file, Digest.parse(digest) if digest is not None else None)

    def create(self, files: Mapping[str, Blob], reference: str | None, *, trust: bool = False) -> api.Model:
        """Makes a model of ingested files and gives it the name `reference`, which another model that has it loses. The
        same files always make the same model. On any failure the files are where they were. Raises `InvalidModel` for
        files that are not a model's, `UnsupportedModel` for one that carries code unless `trust` is set."""
        tag = _tag(reference) if reference is not None else None
        paths = {name: self._blobs.locate(blob) for name, blob in files.items()}
        if not trust:
            safetensors_model.require_no_code(paths)
        draft = Draft.of(files, formats.reader_of(paths).read(paths))
        with self._lock, translated("storing the model", self.data):
            self._write(draft, files.values())
            before = self._catalog.entries.get(draft.id)
            self._commit(self._catalog.with_entry(draft.entry(before, tag, int(time.time()))))
            self._settle(files.values())
            return self._catalog.models[draft.id]

    def _write(self, draft: Draft, blobs: Iterable[Blob]) -> None:
        """Blobs, manifest, bundle: each is durable before the next refers to it; the index comes after all of them."""
        try:
            for blob in blobs:
                self._blobs.adopt(blob)
            self._blobs.put(draft.config_data)
            write(draft.id.within(self._manifests), draft.manifest)
            self._bundles.lay_out(draft.id, draft.contents)
            self._bundles.remember(draft.id, draft.header)
        except BaseException:
            if draft.id not in self._catalog.entries:
                self._delete(draft.id, draft.contents.blobs)
            raise

    def _settle(self, blobs: Iterable[Blob]) -> None:
        try:
            for blob in blobs:
                self._blobs.settle(blob)
        except OSError as error:
            log.warning("finished downloads are still in %s: %s", self.partial, error)

    def tag(self, source: str, target: str) -> None:
        """Gives the model `source` one more name; another model that has it loses it."""
        tag = _tag(target)
        with self._lock, translated("storing the name", self.data):
            entry, _ = self._catalog.find(source)
            _contents(entry)
            if tag not in entry.tags:
                self._commit(self._catalog.with_entry(replace(entry, tags=(*entry.tags, tag))))

    def remove(self, text: str, *, force: bool = False) -> Removed:
        """Takes the name away, and the model with its last name. Works on a full disk. A model ID, or a part of several
        names, means the whole model: with more than one name that takes `force`, or `Conflict` is raised. Whether
        the model is in use is the caller's to know."""
        with self._lock, translated("removing the model", self.data):
            entry, named = self._catalog.find(text)
            if len(named) == 1 and len(entry.tags) > 1:
                removed = self._untag(entry, named[0])
            elif len(entry.tags) > 1 and not force:
                names = ", ".join(entry.names)
                raise Conflict(f"the model has the names {names}: remove them one by one, or all of them with force")
            else:
                removed = self._remove(entry)
            self._reserve.fill()
            return removed

    def _untag(self, entry: Entry, tag: Reference) -> Removed:
        rest = tuple(other for other in entry.tags if other != tag)
        self._commit_smaller(self._catalog.with_entry(replace(entry, tags=rest)))
        return [api.Untagged(tag.short)]

    def _remove(self, entry: Entry) -> Removed:
        self._commit_smaller(self._catalog.without(entry))
        self._delete(entry.id, entry.blobs)
        return [*(api.Untagged(name) for name in entry.names), api.Deleted(str(entry.id))]

    def _delete(self, id: Digest, blobs: Iterable[Digest]) -> None:
        """The files of a model that is not in the index: what cannot be deleted now is swept at the next start."""
        self._bundles.remove(id)
        used = {digest for entry in self._catalog.entries.values() for digest in entry.blobs}
        try:
            id.within(self._manifests).unlink(missing_ok=True)
            for digest in set(blobs) - used:
                self._blobs.remove(digest)
        except OSError as error:
            log.warning("files of the model %s are still there: %s", id, error)

    def verify(self, text: str) -> tuple[Digest, ...]:
        """Reads every byte of the model again. Those of its digests whose file is missing or damaged; pulling the model
        again heals them."""
        entry, _ = self._catalog.find(text)
        if entry.contents is None:
            return (entry.id,)
        with translated("reading the model", self.data):
            paths = {digest: self._blobs.path(digest) for digest in entry.contents.blobs}
            paths[entry.id] = entry.id.within(self._manifests)
            return tuple(digest for digest, path in paths.items() if not is_intact(path, digest))

    def disk_usage(self) -> DiskUsage:
        """Per model; bytes of all blobs, each counted once; bytes of partial downloads."""
        entries = [entry for entry in self._catalog.entries.values() if entry.contents]
        users = Counter(digest for entry in entries for digest in entry.blobs)
        with translated("measuring the store", self.data):
            partial = sum(p.lstat().st_size for p in self.partial.rglob("*") if p.is_file())
            return [_usage(entry, users) for entry in entries], self._blobs.total(), partial

    def _commit(self, catalog: Catalog) -> None:
        self._index.save(Record(str(e.id), [str(t) for t in e.tags], e.created) for e in catalog.entries.values())
        self._catalog = catalog
        self.generation += 1

    def _commit_smaller(self, catalog: Catalog) -> None:
        """A change that takes away, for which space was kept back."""
        try:
            self._commit(catalog)
        except OSError as error:
            if not is_full(error):
                raise
            self._reserve.spend()
            self._commit(catalog)


def _contents(entry: Entry) -> Contents:
    if entry.contents is None:
        raise InvalidModel(f"{', '.join(entry.names) or entry.id}: {entry.damage}; pull it again, or remove it")
    return entry.contents


def _tag(text: str) -> Reference:
    reference = Reference.parse(text)
    if reference.digest:
        raise InvalidReference(f"{text!r} cannot be given as a name: leave the digest out", param="tag")
    return reference


def _usage(entry: Entry, users: Counter[Digest]) -> api.ModelUsage:
    sizes = _contents(entry).blobs
    shared = sum(size for digest, size in sizes.items() if users[digest] > 1)
    total = sum(sizes.values())
    return api.ModelUsage(str(entry.id), entry.names, total, shared, total - shared)
