"""The steps of one pull: check for the model in the store, fetch it, verify it, and store it."""

import asyncio
import contextlib
import logging
import shutil
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from modelrunner.concurrency.threads import HASHING, TRANSFERS, in_thread
from modelrunner.durable import discard, make_folder, translated
from modelrunner.errors import (
    BadRequest,
    InvalidReference,
    ModelNotFound,
    ModelRunnerError,
    SourceFailed,
    StorageFailed,
    UnsupportedModel,
)
from modelrunner.jsonfile import JsonFile
from modelrunner.progress import ProgressReport, WorkProgress
from modelrunner.pull.archives import unpacked_files
from modelrunner.pull.claims import Claim
from modelrunner.pull.places import PullTarget
from modelrunner.pull.source import Context, Fetcher, FetchResult, LocalOrigin, Making, PullResult, PullSpec, make_way
from modelrunner.store import Blob, Digest, Reference, Store, formats
from modelrunner.store.blobs import ReadProgress
from modelrunner.store.files import size_of
from modelrunner.store.names import TEMPLATE
from modelrunner.types import ModelHeader
from modelrunner.web.download import Downloader
from modelrunner.web.partial import RemoteFile
from modelrunner.web.transfers import Transfers

log = logging.getLogger(__name__)
HeaderCheck = Callable[[ModelHeader, bool], None]


class JournalEntry(msgspec.Struct, frozen=True):
    """The source of a name: `text` as it was written, `origin` its normal form; `model` is the ID. `version` is the
    source's own word for `revision`; `base` is `LocalOrigin.made_of`."""

    origin: str
    model: str
    revision: str
    text: str = ""
    version: str = ""
    base: str = ""


class Journal:
    """The sources of the pulled models, so that an unchanged model is not fetched twice. Without it a pull takes
    longer; nothing else changes. One JSON file; `Puller` is its only writer. Its methods may be called from any thread,
    one at a time."""

    def __init__(self, path: Path) -> None:
        self._file = JsonFile(path, dict[str, JournalEntry], cache=True)
        self._entries = self._file.load() or {}

    def __iter__(self) -> Iterator[tuple[str, JournalEntry]]:
        """Yields the entries by the normal form of the names."""
        return iter(self._entries.items())

    def revision(self, reference: Reference, origin: str, model: str) -> str | None:
        """Returns the source's revision at which `reference` became this model from `origin`."""
        entry = self._entries.get(str(reference))
        return entry.revision if entry is not None and (entry.origin, entry.model) == (origin, model) else None

    def record(self, reference: Reference, entry: JournalEntry) -> None:
        self._entries = {**self._entries, str(reference): entry}
        self._file.save(self._entries)


class SharedDownloads:
    """Downloads that pulls share: a file with a known sha256 has one partial file for all models that need it. It
    belongs to one event loop."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()
        self._users: Counter[Path] = Counter()

    def is_busy(self, path: Path) -> bool:
        """Returns whether a pull uses the partial file. Any thread may call it."""
        return path in self._users

    @asynccontextmanager
    async def alone(self, *paths: Path) -> AsyncIterator[None]:
        """Holds the files for one pull at a time, which downloads one, stores all of its own, or removes some."""
        async with contextlib.AsyncExitStack() as held:
            for path in sorted(set(paths)):  # in one order, so that no two wait for each other
                await held.enter_async_context(self._locks.setdefault(path, asyncio.Lock()))
            yield

    def use(self, path: Path) -> None:
        """Marks `path` as used by one more pull, until `release`."""
        self._users[path] += 1

    def release(self, paths: Iterable[Path]) -> list[Path]:
        """Ends one pull's use of `paths`. Returns those that no other pull uses."""
        self._users.subtract(paths)
        free = [path for path in paths if self._users[path] <= 0]
        for path in free:
            del self._users[path]
        return free


class _SharedFileRemoved(SourceFailed):
    """A file that the store had for another model is gone."""


class PullJob:
    """The steps of one pull. Partial files lie in `folder`; `claim` holds its part of the quota; `check` raises
    `BadRequest` for a model that must not be made of files of this machine; it gets its header, and True for a model
    whose chat template is a file of its own."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        shared: SharedDownloads,
        transfers: Transfers,
        source: Fetcher,
        wanted: PullSpec,
        target: PullTarget,
        claim: Claim,
        check: HeaderCheck | None = None,
    ) -> None:
        self._store, self._journal, self._shared = store, journal, shared
        self._claim = claim
        self._check = check if isinstance(source, LocalOrigin) else None
        self.transfers = transfers
        self._source, self._wanted, self._target = source, wanted, target
        self.folder = target.folder
        self._used: set[Path] = set()
        self._hashed: dict[Path, tuple[int, int]] = {}
        self._clear_soon = False

    def prepare(self) -> None:
        """Makes the folder. Blocks. Raises `InsufficientDisk`, `StorageFailed`, `FolderMissing`."""
        with translated(f"pulling {self._wanted.text}", self._target.place.data):
            make_folder(self._target.place.partial / self._target.name, synced=False)

    def left_behind(self, others: Iterable[PullTarget]) -> list[Path]:
        """Returns the folders and files that attempts in other places may have left, and that no other pull uses."""
        names = [path.name for path in self._used]
        places = [path for other in others for path in (other.folder, *(other.partial / name for name in names))]
        return [path for path in places if not self._shared.is_busy(path)]

    async def run(self, report: ProgressReport) -> PullResult:
        """Runs the steps. In every case the folder stays only if it holds bytes with which another attempt can
        continue."""
        wanted = self._wanted
        with translated(f"pulling {wanted.text}", self._target.place.data):
            try:
                return await self._run(report)
            except (BadRequest, UnsupportedModel):  # another attempt could not use its files
                self._clear_soon = True
                raise
            except (ModelRunnerError, OSError):
                raise
            except Exception as error:  # no source may end a connection without an answer
                log.exception("pulling %s", wanted.text)
                self._clear_soon = True
                raise SourceFailed(
                    f"the files of {wanted.text} cannot be read ({type(error).__name__}: {str(error)[:200]}); nothing"
                    " of them is kept. Check the name; the daemon's log has the details"
                ) from error
            finally:
                free = self._shared.release(self._used)
                async with self._shared.alone(*free):
                    await in_thread(lambda _: self._tidy(free))

    async def _run(self, report: ProgressReport) -> PullResult:
        if (unchanged := await self._unchanged(report)) is not None:
            report(WorkProgress("Using cached model", "cached"))
            self._clear_soon = True
            return unchanged
        try:
            id = await self._fetch_and_store(report)
        except _SharedFileRemoved:  # with another model, which somebody has removed meanwhile: fetch it as well
            id = await self._fetch_and_store(report)
        self._clear_soon = True
        return PullResult(id, self._name(id))

    async def _fetch_and_store(self, report: ProgressReport) -> str:
        fetched = await self._source.fetch(self._wanted, _PullContext(self, report))
        report(WorkProgress("Verifying and storing", "storing"))
        try:
            async with self._shared.alone(
                *self._used, *fetched.files.values()
            ):  # the store takes them away from others
                return await in_thread(lambda stop: self._keep(fetched, _until(stop)), HASHING)
        except ModelRunnerError as error:
            if any(self._store.have(f"sha256:{sha256}") is None for sha256 in fetched.stored.values()):
                raise _SharedFileRemoved(f"files of {self._wanted.text} were removed: pull again") from error
            raise

    def _name(self, id: str) -> str:
        """Returns the model's name from now on. The digest of an image index is not the digest of a model."""
        digest = self._wanted.reference.digest
        return self._wanted.reference.short if digest is None or str(digest) == id else id

    async def _unchanged(self, report: ProgressReport) -> PullResult | None:
        """Returns the model that the store has, undamaged, unless its source has another one by now."""
        wanted, id = self._wanted, self._stored()
        if id is None:
            return None
        if await in_thread(lambda stop: self._damage(id, stop), HASHING if wanted.verify else TRANSFERS):
            report(WorkProgress("Files of the model are missing or damaged here: fetching them again", warning=True))
            return None
        model = PullResult(id, self._name(id), cached=True)
        if wanted.reference.digest and not self._source.must_ask(wanted):  # the digest names these bytes
            return model
        remembered = self._journal.revision(wanted.reference, wanted.origin, id)
        if remembered is None:
            return None
        try:
            revision = await self._source.revision(wanted)
        except (SourceFailed, ModelNotFound) as error:
            if wanted.verify_key is not None:
                raise
            report(WorkProgress(f"{error.message}; the model in the store stays in use", warning=True))
            return model
        return model if revision == remembered else None

    def _stored(self) -> str | None:
        """Returns the ID of the model that has the wanted name, damaged or not."""
        try:
            model, name = self._store.whole(str(self._wanted.reference))
        except (ModelNotFound, InvalidReference):
            return None
        return model.id if name or self._wanted.reference.digest else None

    def _damage(self, id: str, stop: threading.Event) -> tuple[Digest, ...]:
        """Returns the digests of the model's files that are missing or damaged. Reads every byte if the caller asked to
        verify."""

        return self._store.verify(id, _until(stop)) if self._wanted.verify else self._store.missing(id)

    async def stored(self, sha256: str) -> Path | None:
        return await in_thread(lambda stop: self._intact(f"sha256:{sha256}", _until(stop)), HASHING)

    def _intact(self, digest: str, go_on: ReadProgress) -> Path | None:
        """Returns the stored file with the digest. Reads every byte: a file of another model may be damaged."""
        blob = self._store.have(digest)
        if blob is None:
            return None
        try:
            self._store.ingest(blob.path, digest=digest, progress=go_on)
        except SourceFailed:
            return None
        return blob.path

    async def require_quota(self, files: Mapping[Hashable, int]) -> None:
        await in_thread(lambda _: self._claim.require(files))

    def partial(self, file: RemoteFile) -> Path:
        if file.sha256 is None:
            return self.folder / file.partial_name
        path = self._target.partial / file.sha256
        if path not in self._used:
            self._used.add(path)
            self._shared.use(path)
        return path

    async def fetch(self, file: RemoteFile, downloader: Downloader, advanced: Callable[[int], None]) -> Path | None:
        path = self.partial(file)
        async with self._shared.alone(path):
            begun = await in_thread(lambda _: _stamp(path))
            # Another pull may have downloaded and stored it since this one looked.
            if file.sha256 is not None and begun is None and await self.stored(file.sha256):
                return None
            await downloader.fetch(file, path, advanced, self.transfers)
            if file.sha256 is not None and (stamp := await in_thread(lambda _: _stamp(path))):
                self._hashed[path] = stamp
        return path

    def _keep(self, fetched: FetchResult, go_on: ReadProgress) -> str:
        """Stores the fetched model and returns its ID. Blocks. `go_on` stops it only before anything is stored."""
        wanted = self._wanted
        blobs = {name: self._verified(path, fetched.digests.get(name), go_on) for name, path in fetched.files.items()}
        for name, sha256 in fetched.stored.items():
            if (blob := self._store.have(f"sha256:{sha256}")) is None:
                raise _SharedFileRemoved(f"{name} of {wanted.text} was removed while the other files came; pull again")
            blobs[name] = blob
        reference = None if wanted.reference.digest else str(wanted.reference)
        making = wanted.making or fetched.making or Making()
        if making.template is not None:
            blobs[TEMPLATE] = self._text(making.template)
        if self._check is not None:
            paths = {name: blob.path for name, blob in blobs.items()}
            with contextlib.suppress(UnsupportedModel):  # the store refuses it, with all that is wrong with it
                self._check(formats.reader_of(paths).read(paths).header, TEMPLATE in blobs)
        model = self._store.create(
            blobs,
            reference,
            trust=wanted.trust,
            manifest=fetched.manifest,
            unpacked=unpacked_files(fetched.unpacked, blobs) if fetched.manifest else None,
            defaults=making.defaults,
            licences=[self._text(text) for text in making.licences],
            progress=go_on,
            folder=self._target.place.data if self._target.fixed else None,
        )
        if fetched.revision is not None:
            base = self._source.made_of if isinstance(self._source, LocalOrigin) else ""
            entry = JournalEntry(wanted.origin, model.id, fetched.revision, wanted.text, fetched.version, base)
            self._journal.record(wanted.reference, entry)
        return model.id

    def _text(self, text: str) -> Blob:
        """Makes a file with this text."""
        data = text.encode()
        path = make_way(self.folder, f"text-{Digest.of(data).hex}")
        path.write_bytes(data)
        return self._store.ingest(path)

    def _verified(self, path: Path, sha256: str | None, go_on: ReadProgress) -> Blob:
        """Returns the verified file for the store. Another pull that downloaded it may have stored it meanwhile."""
        digest = f"sha256:{sha256}" if sha256 is not None else None
        try:
            unchanged = path in self._hashed and self._hashed[path] == _stamp(path)
            return self._store.ingest(path, digest=digest, hashed=unchanged, progress=go_on)
        except (StorageFailed, FileNotFoundError):
            if path.exists() or digest is None or (blob := self._store.have(digest)) is None:
                raise
            return blob

    def _tidy(self, free: Iterable[Path]) -> None:
        """Removes the folder and the files of the pull. `free` are the shared downloads that no other pull uses."""
        with contextlib.suppress(OSError):
            if self._clear_soon or size_of(self.folder) == 0:
                shutil.rmtree(self.folder)
            for path in free:
                if self._clear_soon or size_of(path) == 0:
                    discard(path)


def _until(stop: threading.Event) -> ReadProgress:
    """Returns a progress function that stops the reading of a file once `stop` is set."""

    def go_on(count: int) -> None:
        if stop.is_set():
            raise asyncio.CancelledError

    return go_on


def _stamp(path: Path) -> tuple[int, int] | None:
    """Returns a value that changes with the file; None without a file. Raises `OSError`."""
    try:
        status = path.lstat()
    except FileNotFoundError:  # another pull has stored it already
        return None
    return status.st_mtime_ns, status.st_size


class _PullContext(Context):
    """The context of one pull; its downloads are shared with all pulls."""

    def __init__(self, job: PullJob, report: ProgressReport) -> None:
        super().__init__(job.folder, report, job.stored, job.transfers)
        self._job = job

    async def require_quota(self, files: Mapping[Hashable, int]) -> None:
        await self._job.require_quota(files)

    def partial(self, file: RemoteFile) -> Path:
        return self._job.partial(file)

    async def fetch(self, file: RemoteFile, downloader: Downloader, advanced: Callable[[int], None]) -> Path | None:
        return await self._job.fetch(file, downloader, advanced)
