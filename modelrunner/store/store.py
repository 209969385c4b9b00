"""The models on disk, in one folder or several. One `Store` owns them; the locks of the folders keep other daemons
away."""

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from modelrunner.defaults import ModelDefaults
from modelrunner.durable import discard, translated
from modelrunner.errors import (
    BadRequest,
    Conflict,
    FolderMissing,
    InsufficientDisk,
    InvalidModel,
    ModelNotFound,
    ModelRunnerError,
    StorageFailed,
)
from modelrunner.store import diskusage
from modelrunner.store.blobs import Blob, ReadProgress, copied, ignore, verify
from modelrunner.store.catalog import Catalog, Entry, StoredModel
from modelrunner.store.digests import Digest
from modelrunner.store.diskusage import StoreUsage
from modelrunner.store.files import require_space
from modelrunner.store.folder import ModelFolder
from modelrunner.store.folders import Folders
from modelrunner.store.manifests import UnpackedFile
from modelrunner.store.records import Stamp
from modelrunner.store.references import Reference
from modelrunner.store.sweeping import Leftover, PathTest, in_no_use
from modelrunner.store.union import AbsentFolder, united, updated
from modelrunner.types import Bundle

log = logging.getLogger(__name__)


class PlacedBlob(NamedTuple):
    """A file of models in one place: the folder's data directory, and the digest of its content."""

    folder: Path
    digest: Digest


@dataclass(frozen=True, slots=True)
class RemoveResult:
    """The result of a removal: the names that were removed, and the ID of the deleted model, None if the model still
    exists."""

    names: tuple[str, ...]
    deleted: str | None = None


class Store:
    """`data` is the data directory. `watchers` are called after each change of a model or a folder; `looks` counts how
    often a folder came or went.

    The event loop may call `get`, `list`, `find`, `have`, `missing` and a second `bundle` of a model:
    they take microseconds and never wait for a writer. The other calls wait for the disk and belong in a thread. Any
    number of threads may call at once.

    When a call returns, its change is on disk. When it raises, nothing has changed, here or on disk; when the daemon is
    killed meanwhile, the change is wholly done or not at all. Calls raise `InsufficientDisk` for a full disk and
    `StorageFailed` for one that fails.
    """

    def __init__(self, data: Path, quota: int | None = None, folders: Sequence[Path] = ()) -> None:
        """Opens the store in `data`, or makes it. `quota` is the most bytes that models may have. Models may also lie
        in `folders`, the preferred first; those that cannot be used now are `absent`. Raises `StorageFailed` for the
        store of a newer release, which is left untouched, and for a disk that fails."""
        self.data = data
        self.quota = quota
        self.watchers: list[Callable[[], None]] = []
        self.looks = 0
        self.folders: Sequence[Path] = ()
        """All folders, usable or not, the preferred first."""
        self._lock = threading.RLock()
        self._present: tuple[ModelFolder, ...] = ()
        self._catalog = Catalog()
        self._version = 0  # the highest of any record in all folders
        self._copying: set[Path] = set()
        self._folders = Folders(self._open(data), folders, self._open)
        self._folders.look()
        self._unite()

    def _open(self, path: Path) -> ModelFolder:
        return ModelFolder(
            path,
            self._lock,
            self._folder_changed,
            self._require_quota,
            self._next_version,
            self._owner,
            is_home=path == self.data,
        )

    def set_folders(self, folders: Sequence[Path]) -> None:
        """Replaces the folders beside `data`."""
        with self._lock:
            self._folders.set_places(folders)
            self._folders.look()
            self._unite()

    def close(self) -> None:
        """Lets other daemons use the folders. Only needed if the process continues."""
        self._folders.close()

    def places(self, name: str | None = None, wanted: Path | None = None) -> Sequence[ModelFolder]:
        """Returns the folders that a new model may go to, the best first: `wanted`, or the one that has the model
        `name`, or all. Raises `BadRequest` for a folder that is not one of them, `FolderMissing` for one that is away,
        and `Conflict` if the model lies in another one than `wanted`."""
        here = self._place_of(name) if name is not None else None
        if wanted is None:
            return (here,) if here else self._present
        folder_here = next((folder for folder in self._present if folder.data == wanted), None)
        if folder_here is None:
            for folder in self._folders.absent:
                if folder.path == wanted:
                    raise FolderMissing(folder.message, param="folder")
            known = ", ".join(str(folder.data) for folder in self._present)
            raise BadRequest(
                f"{wanted} is not a folder of models, only {known}: add it to model_dirs in config.toml, then "
                "`modelrunner reload`",
                param="folder",
            )
        if here and here is not folder_here:
            raise Conflict(f"the model lies in {here.data}: remove it, then pull it to {wanted}", param="folder")
        return (folder_here,)

    def _place_of(self, name: str) -> ModelFolder | None:
        try:
            entry, _ = self._catalog.find(name, whole=True)
            return self._folder_of(entry)
        except (ModelNotFound, FolderMissing):
            return None

    @property
    def partial(self) -> Path:
        """Returns the preferred folder for incomplete files. It is made again if it was removed."""
        return self._present[0].partial

    def ingest(
        self, file: Path, *, digest: str | None = None, hashed: bool = False, progress: ReadProgress = ignore
    ) -> Blob:
        """Verifies and syncs a file on the store's file system (in `partial`), which `create` then takes from there.
        With `hashed`, the caller has checked that it has the `digest`. Raises `SourceFailed` if its sha256 is not
        `digest`, `BadRequest` for a file that is not regular."""
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
        folder: Path | None = None,
    ) -> StoredModel:
        """Makes a model of ingested files, or of those that `have` returned, and gives it the name `reference`; another
        model with that name loses it. The same files always make the same model. A `manifest` is kept byte for byte and
        its digest is the model's ID; then the files are all that it names, and those that were `unpacked` from its
        archives, under any names. Without one, the model carries `defaults` and `licences`. `progress` is called while
        stored files are read, and not after the first change. The model goes to `folder`, or to the folder that has
        most of its bytes; the other files are copied. After a failure the files are where they were. Raises
        `InvalidModel` for files that do not make a model, `UnsupportedModel` for one that carries code unless `trust`
        is set."""
        tag = Reference.parse_name(reference) if reference is not None else None
        (target,) = self.places(wanted=folder) if folder else [self._nearest([*files.values(), *licences])]
        with self._brought(target, [*files.values(), *licences], progress) as own:
            return target.create(
                {name: own[blob.path] for name, blob in files.items()},
                tag,
                trust=trust,
                manifest=manifest,
                unpacked=unpacked,
                defaults=defaults,
                licences=[own[blob.path] for blob in licences],
                progress=progress,
                then=lambda entry: self._created(entry, tag, target),
            )

    def _created(self, entry: Entry, tag: Reference | None, target: ModelFolder) -> StoredModel:
        """Returns the new model. The lock is held since it was made: nobody removes it, or its name, in between."""
        if tag is not None:
            self._take_away(tag, target)
        return self._shown(self._catalog, entry, ())

    def _nearest(self, blobs: Sequence[Blob]) -> ModelFolder:
        return max(self._present, key=lambda folder: sum(blob.size for blob in blobs if folder.contains(blob.path)))

    @contextmanager
    def _brought(
        self, target: ModelFolder, blobs: Sequence[Blob], progress: ReadProgress
    ) -> Iterator[dict[Path, Blob]]:
        """Yields the blobs by their paths; those of other folders are copied into `target`: hard links do not cross
        disks, and no folder depends on another one. Blobs that have waited elsewhere are removed in the end."""
        others = [folder for folder in self._present if folder is not target]
        own = {blob.path: blob for blob in blobs}
        foreign = [blob for blob in own.values() if any(folder.contains(blob.path) for folder in others)]
        if needed := sum(blob.size for blob in foreign if target.have(blob.digest) is None):
            with translated("copying files", target.data):
                require_space(target.partial, needed)
        passing: list[Path] = []
        try:
            for blob in foreign:
                if (here := target.have(blob.digest)) and target.check(blob.digest, progress):
                    own[blob.path] = here
                    continue
                passing.append(target.partial / f"copy-{blob.digest.hex}-{secrets.token_hex(8)}")
                self._copying.add(passing[-1])
                with translated("copying a file", target.data):
                    own[blob.path] = copied(blob, passing[-1], progress)
            yield own
            passing += [path for path, blob in own.items() if path != blob.path and any(f.waits(path) for f in others)]
        finally:
            for path in passing:
                discard(path)
                self._copying.discard(path)

    def _take_away(self, tag: Reference, target: ModelFolder) -> None:
        """Takes the name, which `target` has got, away from a model of another folder. A failure is logged: the record
        in `target` has the higher version."""
        for folder in self._present:
            if folder is not target:
                try:
                    folder.untag(tag)
                except (StorageFailed, InsufficientDisk, FolderMissing) as error:
                    log.warning("the name %s is still in a record of %s as well: %s", tag.short, folder.data, error)

    def tag(self, source: str, target: str) -> None:
        """Gives the model `source`, a whole name or an ID, one more name; another model with that name loses it. Raises
        the errors of `get`."""
        tag = Reference.parse_name(target)
        with self._lock:
            self.look()
            entry, _ = self._catalog.find(source, whole=True)
            entry.usable()
            if self._owner(tag) != entry.id:
                folder = self._folder_of(entry)
                folder.tag(entry.id, tag)
                self._take_away(tag, folder)

    def move(self, text: str, folder: Path, progress: ReadProgress = ignore) -> StoredModel:
        """Moves the model, with all of its names, to another of the folders. Its files are copied and checked; those
        elsewhere go when the model is complete there, so both have room for a moment. The caller makes sure that it is
        not in use. `progress` is called for each piece that is copied, and may stop it by raising. Raises as `get` and
        `create`, `BadRequest` for a folder that is not one of them, `FolderMissing`, and `InvalidModel` for a file that
        is missing or damaged."""
        source, entry = self._find(text)
        self.places(wanted=folder)
        if source.data == folder:
            return self.get(text)
        files = {digest.hex: blob for digest in entry.blobs if (blob := source.have(digest))}
        if len(files) < len(entry.blobs):
            raise InvalidModel(f"files of {text} are missing or damaged: pull it again")
        manifest, unpacked = source.manifest(entry), source.unpacked(entry)
        self.create(files, None, trust=True, manifest=manifest, unpacked=unpacked, progress=progress, folder=folder)
        with self._lock:
            entry, _ = self._catalog.find(str(entry.id), whole=True)
            (target,) = self.places(wanted=folder)
            for tag in entry.tags:
                if self._owner(tag) == entry.id:
                    target.tag(entry.id, tag)
            for other in self._copies(entry):
                if other is not target:
                    other.remove(entry.id)
            return self._shown(self._catalog, self._catalog.entries[entry.id], ())

    def remove(self, text: str, *, force: bool = False) -> RemoveResult:
        """Takes the name `text` away, and the model with its last name, in every folder that it lies in. Works on a
        full disk and for a damaged model. A model ID means the model with all of its names: more than one needs
        `force`, or `Conflict` is raised. The caller makes sure that the model is not in use. If it raises for a model
        of several folders, some of them may have lost it. Raises the errors of `whole`, and `FolderMissing`, also for a
        model that lies in another folder as well that is away: it would come back with it."""
        with self._lock:
            self.look()
            entry, named = self._catalog.find(text, whole=True)
            copies = self._copies(entry)
            if named and len(entry.tags) > 1:
                self._require_here(entry, named[0])
                for folder in copies:
                    folder.untag(named[0])
                return RemoveResult((named[0].short,))
            if len(entry.tags) > 1 and not force:
                raise Conflict(
                    f"it has the names {', '.join(entry.names)}: remove them one by one, or use force for all"
                )
            self._require_here(entry)
            for folder in copies:
                folder.remove(entry.id)
            return RemoveResult(tuple(entry.names), str(entry.id))

    def _require_here(self, entry: Entry, tag: Reference | None = None) -> None:
        """Raises `FolderMissing` if a folder that is away has a copy of the model, with the name `tag` if given."""
        for away in self._folders.absent:
            if (kept := away.catalog.entries.get(entry.id)) and (tag is None or tag in kept.tags):
                raise FolderMissing(f"the model has a copy elsewhere: {away.message}", param="model")

    def leftovers(self, is_busy: PathTest = in_no_use) -> tuple[Leftover, ...]:
        """Returns the leftovers that `prune` would remove. `is_busy` tells whether a file or folder in `partial` is in
        use."""
        return self._of_each_folder(lambda folder: folder.leftovers(self._with_copies(is_busy)))

    def prune(self, is_busy: PathTest = in_no_use) -> tuple[Leftover, ...]:
        """Removes leftovers and returns them. While a model is damaged, blobs of its folder that no model names are
        kept, since they may be its own. If a folder fails, it raises after the other folders were pruned."""
        return self._of_each_folder(lambda folder: folder.prune(self._with_copies(is_busy)))

    def _of_each_folder(self, work: Callable[[ModelFolder], Iterable[Leftover]]) -> tuple[Leftover, ...]:
        """Returns the leftovers from every folder. Raises the error of the first one that fails, after the others."""
        leftovers: list[Leftover] = []
        failure: ModelRunnerError | None = None
        with self._lock:
            self.look()
            for folder in self._present:
                try:
                    leftovers += work(folder)
                except (StorageFailed, InsufficientDisk, FolderMissing) as error:
                    failure = failure or error
        if failure is not None:
            raise failure
        return tuple(leftovers)

    def _with_copies(self, is_busy: PathTest) -> PathTest:
        return lambda path: path in self._copying or is_busy(path)

    def require_quota(self, needed: int) -> None:
        """Raises `QuotaExceeded` if `needed` bytes more do not fit into the quota."""
        if self.quota is not None:
            diskusage.require_quota(self.quota, self.used(), needed)

    def _require_quota(self, folder: ModelFolder, blobs: Mapping[Digest, int]) -> None:
        users = folder.catalog.users
        self.require_quota(sum(size for digest, size in blobs.items() if not users[digest]))

    def _next_version(self) -> int:
        """Returns the time in nanoseconds, or more: of two daemons that named a model, the last one counts."""
        self._version = max(self._version + 1, time.time_ns())
        return self._version

    def _owner(self, tag: Reference) -> Digest | None:
        entry = self._catalog.tagged(tag)
        return entry.id if entry else None

    def _folder_changed(self, folder: ModelFolder, ids: Sequence[Digest]) -> None:
        self._folders.remember(folder, ids)
        catalogs = self._catalogs
        self._catalog = updated(self._catalog, catalogs, ids) if len(catalogs) > 1 else catalogs[0]
        self._tell()

    # reading

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
        return next((blob for folder in self._present if (blob := folder.have(wanted))), None)

    def holders(self, digest: str) -> Sequence[StoredModel]:
        """Returns the usable models with a file of this digest. Raises `InvalidReference` for an invalid digest."""
        wanted, catalog, suspect = Digest.parse(digest), self._catalog, self._suspect
        return [self._shown(catalog, entry, suspect) for entry in catalog.entries.values() if wanted in entry.blobs]

    def files(self, text: str) -> dict[str, Blob]:
        """Returns the model's files by their names in the bundle, for `create`. Raises the errors of `get`, and
        `InvalidModel` for a file that is missing or damaged."""
        folder, entry = self._find(text)
        blobs = {name: folder.have(file.digest) for name, file in entry.usable().files.items()}
        if not all(blobs.values()):
            raise InvalidModel(f"files of {text} are missing or damaged: pull it again")
        return {name: blob for name, blob in blobs.items() if blob is not None}

    def manifest(self, text: str) -> bytes:
        """Returns the model's manifest, byte for byte; its sha256 is the model's ID. Reads a file. Raises the errors of
        `get`, and `StorageFailed`."""
        folder, entry = self._find(text)
        return folder.manifest(entry)

    def bundle(self, text: str) -> Bundle:
        """Returns the model laid out for an engine. The first call for a model may link files and parse its header.
        Raises the errors of `get`, and `InvalidModel` if a file is missing or damaged."""
        folder, entry = self._find(text)
        try:
            return folder.bundle(entry)
        except (InvalidModel, StorageFailed, FolderMissing):
            self.look()
            self._find(str(entry.id))  # its folder may be gone
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
        placed: dict[PlacedBlob, Stamp] = {}
        for folder in self._present:
            try:
                stamps = folder.stamps()
            except StorageFailed as error:
                log.warning("the files of models cannot be looked at now: %s", error)
                continue
            placed |= {PlacedBlob(folder.data, digest): stamp for digest, stamp in stamps.items()}
        return placed

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

    def _find(self, text: str) -> tuple[ModelFolder, Entry]:
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
        folders = [folder for folder in self._present if entry.id in folder.catalog.entries]
        if not folders:
            raise ModelNotFound(f"the model {entry.id} was removed meanwhile", param="model")
        return folders

    def _present_at(self, path: Path) -> ModelFolder | None:
        return next((folder for folder in self._present if folder.data == path), None)


def _best(folders: Sequence[ModelFolder], entry: Entry) -> ModelFolder | None:
    """Returns the first folder that has the model without a known damage, else the first with a manifest that can be
    read."""
    whole = [folder for folder in folders if folder.has_whole(entry.id)]
    sound = (folder for folder in whole if entry.blobs.keys().isdisjoint(folder.damaged))
    return next(sound, whole[0] if whole else None)
