"""What a store can tell: its models, their files, what is damaged, and how much disk they use."""

import threading
from collections.abc import Collection, Iterable
from pathlib import Path

from msgspec.structs import replace

from modelrunner.durable import make_folder, read, translated
from modelrunner.errors import InvalidModel
from modelrunner.store import usage
from modelrunner.store.blobs import Blob, Blobs, ReadProgress, ignore, is_intact
from modelrunner.store.bundles import Bundles
from modelrunner.store.catalog import Catalog, Entry, StoredModel
from modelrunner.store.digests import Digest
from modelrunner.store.files import size_of
from modelrunner.store.manifests import LARGEST
from modelrunner.store.records import Records, Stamp
from modelrunner.store.usage import StoreUsage
from modelrunner.types import Bundle


class StoreReader:
    """The part of a `Store` that changes no model."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self._records = Records(data / "manifests" / "sha256")
        self._lock = threading.RLock()
        self._blobs = Blobs(data / "blobs" / "sha256")
        self._bundles = Bundles(data / "bundles", self._blobs)
        self._catalog = Catalog()

    @property
    def partial(self) -> Path:
        """The folder for files that are on their way into the store. It is made again if it was removed."""
        folder = self.data / "partial"
        make_folder(folder, synced=False)
        return folder

    def list(self) -> list[StoredModel]:
        """The usable models, oldest first; their tags in the short form. One of which a file was found damaged is among
        them, and its `damage` says so."""
        catalog = self._catalog
        return [_shown(catalog, entry, self._blobs.damaged) for entry in catalog.entries.values() if entry.contents]

    def damaged(self) -> tuple[StoredModel, ...]:
        """The models that cannot be used; `damage` says why. Pulling one again heals it, `remove` removes it."""
        return self._catalog.damaged

    def whole(self, text: str) -> tuple[StoredModel, str | None]:
        """The model that has the name or the ID `text`, damaged or not, and the name in its short form, None where
        `text` is an ID. A part of a name is refused. Raises `ModelNotFound`, `InvalidReference`."""
        catalog = self._catalog
        entry, named = catalog.find(text, whole=True)
        return _shown(catalog, entry, self._blobs.damaged), named[0].short if named else None

    def get(self, text: str) -> StoredModel:
        """By reference, model ID, at least 8 hexadecimal digits of it, or a part of a name that only one model has.
        Raises `ModelNotFound`, `InvalidReference` (also for what means several), `InvalidModel` for a damaged one."""
        catalog = self._catalog
        entry, _ = catalog.find(text)
        entry.usable()
        return _shown(catalog, entry, self._blobs.damaged)

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
        found = [digest for digest in entry.blobs if not self.check(digest, progress)]
        with translated("reading the model", self.data):
            if not is_intact(entry.id.within(self._records.folder), entry.id):
                found.append(entry.id)
        return tuple(found)

    def check(self, digest: Digest, progress: ReadProgress = ignore) -> bool:
        """Reads every byte of a model's file, and returns whether it has its digest; from then on it counts as missing
        if it has not. `progress` as in `verify`. Raises `StorageFailed`."""
        with translated("reading the model", self.data):
            return self._blobs.check(digest, progress)

    def mark_damaged(self, digest: Digest) -> None:
        """Lets a file count as missing until a healthy one takes its place."""
        self._blobs.damaged.add(digest)

    def stamps(self) -> dict[Digest, Stamp]:
        """Every file of the usable models that is here, with its stamp. Takes a tenth of a second for thousands."""
        with translated("looking at the files of models", self.data):
            digests = {digest for entry in self._catalog.entries.values() for digest in entry.blobs}
            return {digest: found for digest in digests if (found := self._blobs.stamp(digest)) is not None}

    def names_with(self, digest: Digest) -> tuple[str, ...]:
        """The models that have this file, each by its first name or its ID."""
        catalog = self._catalog
        return tuple(catalog.models[entry.id].name for entry in catalog.entries.values() if digest in entry.blobs)

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


def _shown(catalog: Catalog, entry: Entry, damaged: Collection[Digest]) -> StoredModel:
    model = catalog.models[entry.id]
    if not damaged or model.damage or entry.blobs.keys().isdisjoint(damaged):
        return model
    return replace(model, damage="a file of it is damaged: pull or package it again")
