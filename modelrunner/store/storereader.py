"""The reading side of the store: its models, their files, the damaged ones, their folders, and the disk space."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from modelrunner.errors import FolderMissing, InvalidModel, ModelNotFound, StorageFailed
from modelrunner.store import diskusage
from modelrunner.store.blobs import Blob, ReadProgress, ignore
from modelrunner.store.catalog import Catalog, Entry, StoredModel
from modelrunner.store.digests import Digest
from modelrunner.store.diskusage import StoreUsage
from modelrunner.store.folder import ModelFolder
from modelrunner.store.folders import Folders
from modelrunner.store.records import Stamp
from modelrunner.store.union import AbsentFolder, united
from modelrunner.types import Bundle

log = logging.getLogger(__name__)


class PlacedBlob(NamedTuple):
    """A file of models in one place: the folder's data directory, and the digest of its content."""

    folder: Path
    digest: Digest


class StoreReader:
    """The part of a `Store` that changes no model. `data` is the data directory. `watchers` are called after each
    change of a model or a folder; `looks` counts how often a folder came or went."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.watchers: list[Callable[[], None]] = []
        self.looks = 0
        self._lock = threading.RLock()
        self.folders: Sequence[Path] = ()
        """All folders, usable or not, the preferred first."""
        self._folders: Folders
        self._present: tuple[ModelFolder, ...] = ()
        self._catalog = Catalog()
        self._version = 0  # the highest of any record in all folders

    def list(self, *, unusable: bool = False) -> list[StoredModel]:
        """Returns the usable models, oldest first; their tags are in the short form. A model with a file that was found
        damaged is among them, and its `damage` says so. With `unusable`, those that cannot be used follow, and `damage`
        says why: another pull heals one, `remove` removes it; the models of a folder that is away come back with it."""
        catalog, suspect = self._catalog, self._suspect
        usable, others = [], []
        for entry in catalog.entries.values():
            if not entry.contents:
                others.append(catalog.models[entry.id])
            else:
                usable.append(self._shown(catalog, entry, suspect) if suspect else catalog.models[entry.id])
        return usable + others if unusable else usable

    def whole(self, text: str) -> tuple[StoredModel, str | None]:
        """Returns the model with the name or the ID `text`, damaged or not, and the name in its short form, None if
        `text` is an ID. A part of a name is refused. Raises `ModelNotFound`, `InvalidReference`."""
        catalog = self._catalog
        entry, named = catalog.find(text, whole=True)
        return self._shown(catalog, entry, self._suspect), named[0].short if named else None

    def find(self, text: str) -> StoredModel:
        """As `get`, damaged or not."""
        catalog = self._catalog
        return self._shown(catalog, catalog.find(text)[0], self._suspect)

    def files_id(self, text: str) -> str:
        """Returns `Bundle.files_id` of a model, damaged or not. Raises `ModelNotFound`, `InvalidReference`."""
        entry, _ = self._catalog.find(text)
        return entry.contents.digest if entry.contents else str(entry.id)

    def get(self, text: str) -> StoredModel:
        """Returns the model by reference, model ID, at least 8 hexadecimal digits of it, or a part of a name that only
        one model has. Raises `ModelNotFound`, `InvalidReference` (also for an ambiguous text), `InvalidModel` for a
        damaged model, `FolderMissing` for one whose folder is away."""
        catalog = self._catalog
        entry, _ = catalog.find(text)
        entry.usable()
        return self._shown(catalog, entry, self._suspect)

    def have(self, digest: str) -> Blob | None:
        """Returns the stored blob with this digest, for `create`: a source need not fetch it again. Returns None if it
        is not here, or `verify` has found it damaged. Its content is not read. Raises `InvalidReference` for an invalid
        digest."""
        wanted = Digest.parse(digest)
        return next((found for folder in self._present if (found := folder.have(wanted))), None)

    def holders(self, digest: str) -> Sequence[StoredModel]:
        """Returns the usable models with a file of this digest. Raises `InvalidReference` for an invalid digest."""
        wanted, catalog, suspect = Digest.parse(digest), self._catalog, self._suspect
        return [self._shown(catalog, entry, suspect) for entry in catalog.entries.values() if wanted in entry.blobs]

    def files(self, text: str) -> dict[str, Blob]:
        """Returns the model's files by their names in the bundle, for `create`. Raises the errors of `get`, and
        `InvalidModel` for a file that is missing or damaged."""
        folder, entry = self._found(text)
        found = {name: folder.have(file.digest) for name, file in entry.usable().files.items()}
        if not all(found.values()):
            raise InvalidModel(f"files of {text} are missing or damaged: pull it again")
        return {name: blob for name, blob in found.items() if blob is not None}

    def manifest(self, text: str) -> bytes:
        """Returns the model's manifest, byte for byte; its sha256 is the model's ID. Reads a file. Raises the errors of
        `get`, and `StorageFailed`."""
        folder, entry = self._found(text)
        return folder.manifest(entry)

    def bundle(self, text: str) -> Bundle:
        """Returns the model laid out for an engine. The first call for a model may link files and parse its header.
        Raises the errors of `get`, and `InvalidModel` if a file is missing or damaged."""
        folder, entry = self._found(text)
        try:
            return folder.bundle(entry)
        except (InvalidModel, StorageFailed, FolderMissing):
            self.look()
            self._found(str(entry.id))  # its folder may be gone
            raise

    def missing(self, text: str) -> tuple[Digest, ...]:
        """Returns the model's digests whose file is missing, of another size, or was found damaged by `verify`; the ID
        of a damaged model. Takes microseconds. Another pull of the model heals them. Raises the errors of `whole`."""
        entry, _ = self._catalog.find(text)
        return self._folder_of(entry).missing(entry) if entry.contents else (entry.id,)

    def verify(self, text: str, progress: ReadProgress = ignore) -> tuple[Digest, ...]:
        """Reads every byte of the model again, about a second per gigabyte. Returns its digests whose file is missing
        or damaged. From then on they count as missing, so the model is not served until another pull heals it, or is
        served from another folder that has it. `progress` gets the size of each piece in bytes; it may stop the reading
        by raising."""
        entry, _ = self._catalog.find(text)
        return self._folder_of(entry).verify(entry, progress) if entry.contents else (entry.id,)

    def check(self, file: PlacedBlob, progress: ReadProgress = ignore) -> bool:
        """Reads every byte of a file of models, and returns whether it has its digest; a damaged one counts as missing
        from then on. `progress` is that of `verify`. Raises `StorageFailed`."""
        folder = self._present_at(file.folder)
        return folder is None or folder.check(file.digest, progress)

    def mark_damaged(self, file: PlacedBlob, stamp: Stamp) -> None:
        """Marks the file as missing, if it still has the stamp, until a healthy one replaces it. Raises
        `StorageFailed`."""
        if (folder := self._present_at(file.folder)) is not None:
            folder.mark_damaged(file.digest, stamp)

    def stamps(self) -> dict[PlacedBlob, Stamp]:
        """Returns every file of the usable models that is here, with its stamp. Takes a tenth of a second for
        thousands. Leaves out a folder whose disk fails, with a warning in the log."""
        found: dict[PlacedBlob, Stamp] = {}
        for folder in self._present:
            try:
                stamps = folder.stamps()
            except StorageFailed as error:
                log.warning("the files of models cannot be looked at now: %s", error)
                continue
            found |= {PlacedBlob(folder.data, digest): stamp for digest, stamp in stamps.items()}
        return found

    def names_with(self, file: PlacedBlob) -> tuple[str, ...]:
        """Returns the models that have this file, each by its first name or its ID."""
        catalog, folder = self._catalog, self._present_at(file.folder)
        entries = folder.catalog.entries.values() if folder is not None else ()
        having = [entry.id for entry in entries if file.digest in entry.blobs]
        return tuple(catalog.models[id].name for id in having if id in catalog.models)

    def absent(self) -> tuple[AbsentFolder, ...]:
        """Returns the folders that cannot be used now."""
        return self._folders.absent

    def look(self) -> None:
        """Checks which folders can be used. Takes microseconds with one folder, and else waits for the disks."""
        if not self._folders.is_current:
            with self._lock:
                if self._folders.look():
                    self._unite()

    def _unite(self) -> None:
        """Makes the union anew after a change of the folders."""
        self.folders, self._present = self._folders.places, self._folders.present
        self._catalog = united(self._catalogs)
        versions = (entry.version for catalog in self._catalogs for entry in catalog.entries.values())
        self._version = max(versions, default=self._version)
        self.looks += 1
        self._tell()

    @property
    def _catalogs(self) -> Sequence[Catalog]:
        away = [folder.catalog for folder in self._folders.absent if folder.catalog.entries]
        return [*(folder.catalog for folder in self._present), *away]

    def _tell(self) -> None:
        for tell in self.watchers:
            tell()

    def disk_usage(self) -> StoreUsage:
        """Returns the disk usage. Reads the folders, which is slow."""
        shown = self._catalog.models
        models = [size for folder in self._present for size in diskusage.sizes(folder.catalog, folder.data, shown)]
        folders = [folder.disk_usage() for folder in self._present]
        total, partial = sum(folder.total for folder in folders), sum(folder.partial for folder in folders)
        return StoreUsage(models, total, partial, folders)

    def used(self) -> int:
        """Returns the bytes of all models; files that models of one folder share count once. Takes milliseconds for
        thousands of models."""
        return sum(diskusage.used(folder.catalog) for folder in self._present)

    def freed(self, ids: Iterable[str]) -> tuple[int, ...]:
        """Returns the bytes that removing these models would free, one after the other."""
        wanted = list(map(Digest.parse, ids))
        freed: Counter[Digest] = Counter()
        for folder in self._present:
            here = [id for id in wanted if id in folder.catalog.entries]
            freed.update(dict(zip(here, diskusage.freed(folder.catalog, here), strict=True)))
        return tuple(freed[id] for id in wanted)

    @property
    def _suspect(self) -> Sequence[ModelFolder]:
        """Returns the folders with files that were found damaged."""
        return [folder for folder in self._present if folder.damaged]

    def _shown(self, catalog: Catalog, entry: Entry, suspect: Sequence[ModelFolder]) -> StoredModel:
        model = catalog.models[entry.id]
        if model.damage or all(entry.blobs.keys().isdisjoint(folder.damaged) for folder in suspect):
            return model
        served = _best(self._present, entry)  # None: it was removed meanwhile
        if served is None or entry.blobs.keys().isdisjoint(served.damaged):
            return model
        return replace(model, damage="one of its files is damaged: pull or package the model again")

    def _found(self, text: str) -> tuple[ModelFolder, Entry]:
        """Returns the usable model `text`, and its folder."""
        entry, _ = self._catalog.find(text)
        entry.usable()
        return self._folder_of(entry), entry

    def _folder_of(self, entry: Entry) -> ModelFolder:
        """Returns the folder from which the model is served. Raises `FolderMissing`."""
        copies = self._copies(entry)
        return _best(copies, entry) or copies[0]

    def _copies(self, entry: Entry) -> Sequence[ModelFolder]:
        """Returns the folders that have the model. Raises `FolderMissing`."""
        if entry.absent:
            entry.usable()
        found = [folder for folder in self._present if entry.id in folder.catalog.entries]
        if not found:
            raise ModelNotFound(f"the model {entry.id} was removed meanwhile", param="model")
        return found

    def _present_at(self, path: Path) -> ModelFolder | None:
        return next((folder for folder in self._present if folder.data == path), None)


def _best(folders: Sequence[ModelFolder], entry: Entry) -> ModelFolder | None:
    """Returns the first folder that has the model without a known damage, else the first with a manifest that can be
    read."""
    whole = [folder for folder in folders if folder.has_whole(entry.id)]
    sound = (folder for folder in whole if entry.blobs.keys().isdisjoint(folder.damaged))
    return next(sound, whole[0] if whole else None)
