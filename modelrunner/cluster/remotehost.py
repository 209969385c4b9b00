"""The head's side of a host: a `Host` and its `Runner`s, over HTTPS."""

import asyncio
import logging
import math
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import quote

import httpcore
import httpx
import msgspec

from modelrunner import __version__
from modelrunner.backend import ExplainsErrors
from modelrunner.cluster.messages import (
    NAME,
    SILENCE,
    Fault,
    HostAddress,
    HostReport,
    HostVersion,
    ModelAnnounced,
    Received,
    RunnerOrder,
    RunnerReport,
    RunnerStarted,
    models_of,
)
from modelrunner.cluster.reservations import Reservations
from modelrunner.cluster.transfers import SendTurns, rest_of
from modelrunner.concurrency.joint import JointWork
from modelrunner.concurrency.threads import ended
from modelrunner.engine.abandoned import Abandoned
from modelrunner.engine.connections import UpstreamPool
from modelrunner.engine.lastwords import fault_of_answer
from modelrunner.engine.questions import settled
from modelrunner.engine.runner import EngineProcess, Runner
from modelrunner.engineapi import OPENAI
from modelrunner.errors import (
    BackendUnavailable,
    EngineFailed,
    EngineProtocolError,
    HostLost,
    InsufficientDisk,
    ModelRunnerError,
)
from modelrunner.models.runspecs import values_of
from modelrunner.plugins.isolation import call_backend, interface_of
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.scheduler.devices import Device, kind_of
from modelrunner.scheduler.host import Held, Host
from modelrunner.scheduler.state import RunnerId
from modelrunner.store import Store
from modelrunner.store.layout import archive_of
from modelrunner.types import RAY_GROUP, Endpoint, RequiredMemory, RunSpec, Served

log = logging.getLogger(__name__)
_AGAIN = 1.0  # seconds between two tries to reach a host
_CALL = 15.0  # seconds of an ordinary call
_LONG = 600.0  # seconds of a call that waits for an engine
_ENDING = 10.0  # seconds in which Ray has ended the workers of a run, and the host has told of it
_UNSEEN = 60.0  # seconds until a host is asked again whether it reads a model where the head has it
_LONGEST = 16 << 20  # bytes of an answer, and of a line of one that goes on: a report with 10,000 models takes 1 MB
_NOWHERE = Endpoint(host="127.0.0.1", port=9)  # of a runner whose port is not known yet
T = TypeVar("T")


class _Lent(NamedTuple):
    """What `workers` of an engine that Ray has started take on a host, whose budget it was `before`; `until` is a time
    of the monotonic clock."""

    workers: RequiredMemory
    before: RequiredMemory
    until: float = math.inf


class RemoteHost:
    """A `Host` that listens at `where`. `changed` is called when it comes, goes, or tells of a runner's change.
    `state` is a word for it: joining, ready, draining, silent, gone, or another version; what a ready one lacks is told
    behind it. What its runners take they have in `reservations`, None where nobody else gives the machine away. Models
    are sent to it when they have a turn of `turns`, slower while this machine `is_busy` with requests; a `shared` one
    reads those that it sees at the same path."""

    def __init__(
        self,
        name: str,
        where: HostAddress,
        registry: BackendRegistry,
        store: Store,
        changed: Callable[[], None],
        reservations: Reservations | None = None,
        labels: Collection[str] = (),
        *,
        turns: SendTurns | None = None,
        is_busy: Callable[[], bool] = lambda: False,
        shared: bool = False,
    ) -> None:
        self.name, self.where, self.labels = name, where, labels
        self.registry, self.reservations = registry, reservations
        self.gone = asyncio.Event()
        """Set once the runners that it had are lost."""
        self.is_draining = False
        self.report: HostReport | None = None
        self._version = ""  # of the last report, also of one that cannot be read
        self.runners: dict[str, HostRunner] = {}
        self.parts: dict[str, HostRunner] = {}
        """Those whose engines run on another host and have workers here."""
        self._lent: dict[str, _Lent] = {}  # by runner
        self._unseen: dict[str, float] = {}  # until when it does not read these models
        self._missing: dict[str, str] = {}  # by backend: why its engine cannot be had there
        self._full = ""  # why the last model could not be brought there
        self.trusted = ssl.create_default_context(cadata=where.certificate)
        self._store, self._changed = store, changed
        self._turns, self._is_busy, self._shared = turns or SendTurns(), is_busy, shared
        self.moved = time.monotonic()
        """When it last came or was lost."""
        self._fetching: dict[str, JointWork[None, None]] = {}
        self._strangers: dict[str, asyncio.Task[None]] = {}
        """What ends the runners that it tells of and nobody has here, by their IDs."""
        self._following = asyncio.create_task(self._follow(), name=f"host {name}")

    def _client(self) -> httpx.AsyncClient:
        """A client for one call at a time. One for all of them would leave connections open: those that it puts away
        when a call is cancelled, and those of calls that begin while it is closed."""
        return httpx.AsyncClient(
            base_url=f"https://{self.where.address}:{self.where.port}",
            headers={"Authorization": f"Bearer {self.where.key}"},
            verify=self.trusted,
            trust_env=False,
            timeout=_CALL,
            event_hooks={"request": [_closes_if_cut]},
        )

    @property
    def state(self) -> str:
        if self._following.done():
            return "gone"
        if self._version not in ("", __version__):
            return f"of version {self._version}, and this daemon of {__version__}: it is not used"
        if self.report is None:
            return "silent" if self.gone.is_set() else "joining"
        lacks = "; ".join(filter(None, [*self._missing.values(), self._full]))
        return ("draining" if self.is_draining else "ready") + (f", but {lacks}" if lacks else "")

    @property
    def is_usable(self) -> bool:
        """True while it answers, in our version."""
        return self.report is not None and self.report.version == __version__

    def budget(self, runners: Iterable[Held]) -> RequiredMemory | None:
        """See `Host`. One that drains has no more than its runners hold."""
        if self.report is None or not self.is_usable:
            return None
        if self.is_draining:
            held = [each.memory for each in runners]
            return sum(held, start=RequiredMemory(0, (0,) * len(self.report.budget.vram)))
        return self.within(self.report.budget)

    def within(self, budget: RequiredMemory) -> RequiredMemory:
        """Returns the part of it that the cluster gives us, with what our workers hold."""
        budget = self._with_workers(budget)
        return self.reservations.within(budget) if self.reservations else budget

    def _with_workers(self, budget: RequiredMemory) -> RequiredMemory:
        """Returns the budget with what workers hold that Ray has started, which are others' processes to the host:
        their devices, which they have alone, and as much main memory as they need, up to what there was before."""
        now, ram = time.monotonic(), budget.ram
        self._lent = {id: lent for id, lent in self._lent.items() if now < lent.until}
        if not self._lent:
            return budget
        for workers, before, _ in self._lent.values():
            ram += workers.ram
            vram = [size if number in workers.devices else 0 for number, size in enumerate(before.vram)]
            budget = budget.most(RequiredMemory(0, tuple(vram)))
        most = max([lent.before.ram for lent in self._lent.values()])
        return budget.most(RequiredMemory(min(ram, most)))

    def lend(self, runner: str, workers: RequiredMemory) -> None:
        """Notes that Ray starts workers of the runner with that ID, which take so much."""
        if self.report is not None:
            self._lent[runner] = _Lent(workers, self._with_workers(self.report.budget))

    def take_back(self, runner: str) -> None:
        """Notes that these workers are ending."""
        if (lent := self._lent.get(runner)) is not None:
            self._lent[runner] = lent._replace(until=time.monotonic() + _ENDING)

    def kind(self, devices: tuple[int, ...]) -> str:
        """See `Host`."""
        return kind_of(self.report.machine, self.report.devices, devices) if self.report else self.name

    def devices(self) -> tuple[Device, ...]:
        """See `Host`."""
        return self.report.devices if self.report else ()

    def numbers(self, backend: str) -> tuple[int, ...] | None:
        """See `Host`. A device that its budget has not, or not yet, counts as the one behind the last: nothing fits
        there."""
        if self.report is None or (numbers := self.report.numbers.get(backend)) is None:
            return None
        return tuple([min(number, len(self.report.budget.vram)) for number in numbers])

    def has(self, model_id: str) -> bool:
        """See `Host`."""
        return self.keeps(model_id) or self.sees(model_id)

    def joins(self, model_id: str, devices: Collection[int]) -> bool:
        """See `Host`: what its workers take is reserved in Ray, and they read a model at the head's path."""
        if self.reservations is None or not self._shared or self.is_draining:
            return False
        known = max(devices, default=-1) < self.reservations.cards
        return known and time.monotonic() >= self._unseen.get(model_id, 0.0)

    def sees(self, model_id: str) -> bool:
        """True if it reads the model where the head has it."""
        return self.report is not None and model_id in self.report.seen

    def keeps(self, model_id: str) -> bool:
        """True if it has the model's files itself, so that it can send them."""
        return self.report is not None and model_id in self.report.models

    def lacks(self, backend: str) -> bool:
        """See `Host`. It is tried again once the host has come anew."""
        return backend in self._missing

    async def fetch(self, spec: RunSpec) -> None:
        """Brings the files of the run's models there that are missing. Raises what `bring` does."""
        for id in models_of(spec):
            await self.bring(id)

    async def show(self, spec: RunSpec) -> None:
        """Has it read the run's models where the head has them. Raises `EngineFailed` if it does not see them."""
        for id in models_of(spec):
            if not self.sees(id) and not await self._sees_now(id):
                self._unseen[spec.model_id] = time.monotonic() + _UNSEEN
                raise EngineFailed(
                    f"the host {self.name} does not read {id[:19]} where the head has it, at the same path, as the "
                    "workers of a run over several hosts have to: mount the folder of models there"
                )

    async def _sees_now(self, id: str) -> bool:
        bundle = await asyncio.to_thread(self._store.bundle, id)
        await self._announce(id, 0, str(bundle.directory.parents[1]))
        return self.sees(id)

    async def bring(self, id: str) -> None:
        """Sends the model there if it lacks it: one transfer for all that wait for it, which goes on where an earlier
        one stopped. Raises `InsufficientDisk` and other `ModelRunnerError`."""
        if not self.has(id):
            while (work := self._fetching.get(id)) is not None and work.abandoned:
                await ended(work.task)
            if work is None:
                work = self._fetching[id] = self._sending(id)
            await work.follow()

    def _sending(self, id: str) -> JointWork[None, None]:
        work: JointWork[None, None] = JointWork(
            lambda report: self._while_there(self._transfer(id)), stops_alone=True, name=f"send {id[:19]}"
        )
        work.task.add_done_callback(lambda task: self._fetching.pop(id, None))
        return work

    async def _transfer(self, id: str) -> None:
        archive = await asyncio.to_thread(archive_of, self._store, id)
        place = _place(id)
        if self._shared and await self._sees_now(id):
            return
        async with self._turns.turn(id) as sender:
            if (there := await self._announce(id, archive.size)).complete:
                return
            if sender is not None:
                log.info("the host %s gets %s from %s", self.name, id[:19], sender.name)
                try:
                    source = msgspec.json.encode(sender.where)
                    await self.call("POST", f"{place}/copy", type(None), content=source, timeout=None)
                except InsufficientDisk:
                    raise
                except ModelRunnerError as error:
                    log.warning("%s, so the head sends the rest", error)
                    sender, there = None, await self._announce(id, archive.size)
            if sender is None and not there.complete:
                begin, size = there.bytes, archive.size
                log.info("sending %s to the host %s, from byte %d of %d", id[:19], self.name, begin, size)
                rest, headers = rest_of(archive, begin, self._is_busy), {"Content-Length": str(size - begin)}
                where = f"{place}?offset={begin}"
                await self.call("PUT", where, type(None), content=rest, headers=headers, timeout=None)
            if self.report is not None:  # so that it can send it at once
                self.report = msgspec.structs.replace(self.report, models=self.report.models | {id})

    async def _announce(self, id: str, size: int, folder: str = "") -> Received:
        ours = (*self.runners.values(), *self.parts.values())
        keep = frozenset([each for runner in ours for each in models_of(runner.spec)])
        body = msgspec.json.encode(ModelAnnounced(size, keep, folder))
        try:
            there = await self.call("POST", _place(id), Received, content=body, timeout=_LONG)
        except InsufficientDisk as error:
            self._full = str(error)
            raise
        if size:
            self._full = ""
        if self.report is not None:  # some may have gone for it
            self.report = msgspec.structs.replace(self.report, models=there.models, seen=there.seen)
        return there

    async def install(self, backend: str, stage: Callable[[str], None]) -> None:
        """Installs the engine there if it is missing; `stage` takes what it does. Raises what the installation
        raises."""
        await self._while_there(self._install(backend, stage))

    async def _install(self, backend: str, stage: Callable[[str], None]) -> None:
        async with self._client() as client, client.stream("POST", f"/engines/{backend}", timeout=None) as answer:
            async for line in _lines(answer):
                step = msgspec.json.decode(line)
                if "fault" in step:
                    error = msgspec.convert(step["fault"], Fault).error()
                    if isinstance(error, BackendUnavailable):
                        self._missing[backend] = f"{backend} cannot be had there: {error}"
                        self._changed()
                    raise error
                stage(f"on {self.name}: {step['message']}")
        if self._missing.pop(backend, None) is not None:
            self._changed()

    def start(self, runner: RunnerId, spec: RunSpec, others: Sequence[Host] = ()) -> Runner:
        """See `Host`."""
        beside = [other for other in others if isinstance(other, RemoteHost)]
        host_runner = HostRunner(self, runner, spec, beside)
        self.runners[host_runner.id] = host_runner
        for other in beside:
            other.parts[host_runner.id] = host_runner
        return host_runner

    def log(self, runner: Runner, lines: int | None, ending: asyncio.Event | None) -> AsyncIterator[bytes]:
        """See `Host`."""
        if self.report is None:
            raise EngineFailed(f"the host {self.name} does not answer: its logs cannot be read")
        return self._log(runner.id, lines, ending)

    async def _log(self, id: str, lines: int | None, ending: asyncio.Event | None) -> AsyncIterator[bytes]:
        query = {"lines": str(lines)} if lines is not None else {}
        query |= {"follow": "1"} if ending is not None else {}
        end = asyncio.ensure_future((ending or asyncio.Event()).wait())
        lost = asyncio.ensure_future(self.gone.wait())
        try:
            with suppress(httpx.HTTPError, EngineFailed, StopAsyncIteration):
                async with self._client() as client:
                    question = client.build_request("GET", f"/runners/{id}/log", params=query, timeout=None)
                    answer = await self._while_there(client.send(question, stream=True))
                    if answer.is_error:  # there is no runner yet, or no more: as empty as its log
                        return
                    pieces = aiter(answer.aiter_bytes())
                    while True:
                        piece: asyncio.Future[bytes] = asyncio.ensure_future(anext(pieces))
                        waits: list[asyncio.Future[Any]] = [piece, end, lost, self._following]
                        try:
                            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                            if not piece.done():
                                return
                        finally:
                            piece.cancel()
                        yield piece.result()
        finally:
            end.cancel()
            lost.cancel()

    async def close(self) -> None:
        """See `Host`."""
        self._following.cancel()
        await asyncio.gather(self._following, *self._strangers.values(), return_exceptions=True)

    def leave(self) -> None:
        """Ends the connection: the cluster says that the host is gone."""
        self._following.cancel()
        self._lost()

    async def call(self, method: str, path: str, kind: type[T], *, timeout: float | None = _CALL, **options: Any) -> T:
        """Asks the host; the answer is of the `kind`. Raises the host's error, and `EngineFailed` if it
        does not answer, or is lost meanwhile."""
        answer = await self._while_there(self._ask(method, path, timeout=timeout, **options))
        try:
            if answer.is_error:
                raise msgspec.json.decode(answer.content, type=Fault).error()
            return msgspec.json.decode(answer.content or b"null", type=kind)
        except msgspec.MsgspecError as error:
            raise EngineFailed(f"the host {self.name} answers in another language: {error}") from error

    async def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        async with self._client() as client, client.stream(method, path, **options) as answer:
            content = bytearray()
            async for piece in answer.aiter_raw():
                content += piece
                if len(content) > _LONGEST:
                    raise EngineFailed(f"the host {self.name} answers with more than {_LONGEST:,} bytes")
            return httpx.Response(answer.status_code, content=bytes(content))

    async def _while_there(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which ends with `HostLost` if the host is lost. Raises `EngineFailed` if it does not
        answer."""
        coming = asyncio.current_task() is self._following  # what is asked before it counts as there
        gone = asyncio.Event() if coming else self.gone
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(work), asyncio.ensure_future(gone.wait())]
        try:
            await asyncio.wait([*waits, self._following], return_when=asyncio.FIRST_COMPLETED)
            if not waits[0].done():
                raise HostLost(f"the host {self.name} does not answer any more")
            result: T = waits[0].result()
            return result
        except httpx.HTTPError as error:
            if not coming:  # the connection on which it tells its state may break a moment later
                await asyncio.wait([waits[1], self._following], timeout=_AGAIN, return_when=asyncio.FIRST_COMPLETED)
            if gone.is_set() or self._following.done():
                raise HostLost(f"the host {self.name} does not answer any more") from error
            raise self.unreachable(error) from error
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def unreachable(self, error: Exception) -> EngineFailed:
        why = str(error) or type(error).__name__
        return EngineFailed(f"the host {self.name} does not answer ({why}): `modelrunner hosts` shows the hosts")

    async def _follow(self) -> NoReturn:
        """Keeps the newest report, for as long as the host tells one."""
        try:
            async with self._client() as client:
                while True:
                    try:
                        timeout = httpx.Timeout(_CALL, read=SILENCE)
                        async with client.stream("GET", "/state", timeout=timeout) as answer:
                            async for line in _lines(answer):
                                self._version = msgspec.json.decode(line, type=HostVersion).version
                                await self._learn(msgspec.json.decode(line, type=HostReport))
                    except Exception as error:  # whatever a host tells, it is tried again
                        if self.report is not None:
                            log.warning("the host %s is lost: %s", self.name, str(error) or type(error).__name__)
                    self._lost()
                    await asyncio.sleep(_AGAIN)
        finally:
            self._lost()

    async def _learn(self, report: HostReport) -> None:
        strangers = report.runners.keys() - self.runners.keys()
        if came := self.report is None:
            for id in strangers:  # of an earlier connection: it holds their memory until they have ended
                await self._end_stranger(id)
            self.gone = asyncio.Event()
            self._missing.clear()
            self.moved = time.monotonic()
        before, self.report = self.report, report
        for id in [] if came else strangers - self._strangers.keys():
            self._strangers[id] = asyncio.create_task(self._end_stranger(id), name=f"end {id[:8]}")
        for id, runner_report in report.runners.items():
            if id in self.runners:
                self.runners[id].learn(runner_report)
        if came or (before is not None and (_offer(before) != _offer(report))):
            self._changed()

    async def _end_stranger(self, id: str) -> None:
        """Ends a runner that nobody has here, and of whose end the host was not told: it did not answer then."""
        with suppress(ModelRunnerError):  # the next report tells of it again
            await self.call("DELETE", f"/runners/{quote(id, safe='')}", type(None), timeout=_LONG)
        self._strangers.pop(id, None)

    def _lost(self) -> None:
        if self.report is not None or not self.gone.is_set():
            self.report, self.moved = None, time.monotonic()
            self.gone.set()
            self._changed()


def _offer(report: HostReport) -> object:
    return report.budget, report.models, report.seen


async def _closes_if_cut(request: httpx.Request) -> None:
    """Has the request's new connection closed if its handshake is cancelled: httpcore leaves it open then."""
    stream: httpcore.AsyncNetworkStream | None = None

    async def trace(event: str, info: dict[str, Any]) -> None:
        nonlocal stream
        if event == "connection.connect_tcp.complete":
            stream = info["return_value"]
        elif event == "connection.start_tls.failed" and stream is not None:
            await stream.aclose()

    request.extensions["trace"] = trace


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of an answer that goes on, without their ends. Raises `ValueError` for one that is too long."""
    line = bytearray()
    async for piece in answer.aiter_raw():
        line += piece
        *whole, rest = line.split(b"\n") if b"\n" in piece else [line]
        for each in whole:
            yield bytes(each)
        line = rest
        if len(line) > _LONGEST:
            raise ValueError(f"it sends a line of more than {_LONGEST:,} bytes")


def _place(id: str) -> str:
    return f"/models/{id.removeprefix('sha256:')}"


class HostRunner:
    """A `Runner` of another host. Workers of its engine run on the `others`, too."""

    def __init__(self, host: RemoteHost, runner: RunnerId, spec: RunSpec, others: Sequence[RemoteHost] = ()) -> None:
        self.id, self.key, self.spec = secrets.token_hex(4), runner.key, spec
        self.served = Served(spec.bundle.name, runner.key.backend, self.id)
        self.names: tuple[str, ...] | None = None
        self.api = OPENAI
        self.upstream = UpstreamPool(_NOWHERE)
        self.abandoned = Abandoned(self._settled)
        self.stage = "starting"
        self.ready_at: float | None = None
        self.failure: ModelRunnerError | None = None
        self.owners: set[str] = set()
        self.sleep_level = 0
        self.process: EngineProcess | None = None
        self.others = others
        self._host, self._number = host, runner.number
        self._backend = host.registry.get(runner.key.backend)
        self._gone = host.gone
        self._lost = [(each, each.gone) for each in (host, *others)]
        self._memory = RequiredMemory(0)
        self._news = asyncio.Event()
        self._report: RunnerReport | None = None

    async def run(self, changed: Callable[[], None], loaded_for: Callable[[], str | None] = lambda: "") -> NoReturn:
        """See `Runner`."""

        def stage(text: str) -> None:
            self.stage = text
            changed()

        host = self._host
        try:
            for each in (host, *self.others):
                await (each.show(self.spec) if self.others else each.fetch(self.spec))
                await each.install(self.key.backend, stage)
                self._check_hosts()
            spec = self.spec
            if self.others:
                group = await self._while_there(self._take_together())
                spec = replace(spec, environment={**spec.environment, RAY_GROUP: group})
            elif host.reservations is not None:
                await self._while_there(host.reservations.take(self.id, self.key.files, self._memory))
            self.api = await self._while_there(call_backend(self._backend.api, self.spec))
            backend, files, mode, revision = self.key
            values = msgspec.Raw(values_of(spec))
            order = RunnerOrder(backend, files, str(mode), revision, self._number, values, self._memory)
            body = msgspec.json.encode(order)
            started = await host.call("PUT", f"/runners/{self.id}", RunnerStarted, content=body)
            headers = (("Authorization", f"Bearer {started.secret}"),)
            where = Endpoint(host=host.where.address, port=started.port, tls=host.trusted, name=NAME, headers=headers)
            self.upstream.move(where)
            while True:
                await self._next()
                if (report := self._report) is not None:
                    self._apply(report)
                    changed()
        except ModelRunnerError as error:
            self.failure = error
            raise
        finally:
            self.process = None
            self.abandoned.end()
            self.upstream.close()
            for other in self.others:
                other.parts.pop(self.id, None)
            try:
                if not self._gone.is_set():
                    with suppress(ModelRunnerError):  # a host that does not answer ends it by itself
                        await host.call("DELETE", f"/runners/{self.id}", type(None), timeout=_LONG)
            finally:
                host.runners.pop(self.id, None)
                if host.reservations is not None:
                    host.reservations.give_back(self.id)
                for each in (host, *self.others):
                    each.take_back(self.id)

    async def _take_together(self) -> str:
        """Reserves in Ray on all of its hosts. Returns the ID of the group."""
        parts, (lead, *others) = list[tuple[Reservations, RequiredMemory]](), self._memory.each
        workers = [replace(lead, ram=min(lead.ram, others[0].ram)), *others]  # the engine itself is the host's process
        for each, memory, its in zip((self._host, *self.others), self._memory.each, workers, strict=True):
            if each.reservations is None:
                raise HostLost(f"the host {each.name} is in no cluster any more")
            each.lend(self.id, its)
            parts.append((each.reservations, memory))
        return await parts[0][0].take_together(self.id, parts)

    async def _while_there(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which ends with `HostLost` when one of its hosts is gone."""
        doing = asyncio.ensure_future(work)
        waits: list[asyncio.Future[Any]] = [doing, *[asyncio.ensure_future(gone.wait()) for _, gone in self._lost]]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            self._check_hosts()
            return await doing
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _next(self) -> None:
        """Waits for the next report. Raises `HostLost` when one of its hosts is gone, and the failure of the engine."""
        await self._while_there(self._news.wait())
        self._news.clear()
        if self._report is not None and self._report.failure is not None:
            raise self._report.failure.error()

    def learn(self, report: RunnerReport) -> None:
        """Takes what the host tells of it."""
        if report != self._report:
            self._report = report
            self._news.set()

    def _apply(self, report: RunnerReport) -> None:
        self.stage = f"on {self._host.name}: {report.stage}" if report.stage else ""
        self.names, self.sleep_level = report.names, report.sleep_level
        self.api = self.api.reading(report.reads)
        self.process = EngineProcess(report.pid, report.sandbox) if report.pid is not None else None
        if report.ready and self.ready_at is None:
            self.ready_at = time.monotonic()

    def mark_stopping(self) -> None:
        """See `Runner`."""
        self.stage = "stopping"

    def _check_hosts(self) -> None:
        """Raises `HostLost` if one of them is gone."""
        for each, gone in self._lost:
            if gone.is_set():
                raise HostLost(f"the host {each.name} does not answer any more, and its engines are lost")

    def expect(self, memory: RequiredMemory) -> None:
        """See `Runner`."""
        self._memory = memory

    async def memory(self) -> RequiredMemory | None:
        """See `Runner`."""
        try:
            return await self._host.call("GET", f"/runners/{self.id}/memory", RequiredMemory | None)  # type: ignore[arg-type]
        except ModelRunnerError:
            return None

    async def sleep(self) -> None:
        """See `Runner`."""
        await self._host.call("POST", f"/runners/{self.id}/sleep", type(None), timeout=_LONG)

    async def wake(self) -> None:
        """See `Runner`."""
        await self._host.call("POST", f"/runners/{self.id}/wake", type(None), timeout=_LONG)

    async def request_error(self, status: int, message: str, fields: Mapping[str, Any]) -> ModelRunnerError | None:
        """See `Runner`."""
        knows = interface_of(self._backend, ExplainsErrors)
        return await call_backend(knows.request_error, status, message, fields) if knows else None

    async def fault_of_answer(self, error: EngineProtocolError) -> EngineProtocolError:
        """See `Runner`."""
        return await fault_of_answer(error, self._backend, self.spec.bundle.name)

    async def _settled(self) -> None:
        if self.api.settled is not None:
            await settled(self.upstream.endpoint, self.api.settled)
