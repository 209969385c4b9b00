"""The host's side of a cluster: runs what its head orders, and tells it the state of this machine.

Every request needs the key that was made for this head. An engine is asked at a port of its own, whose connections
begin with a request that has the runner's secret; from then on bytes pass both ways as they come."""

import asyncio
import hmac
import logging
import math
import os
import platform
import secrets
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httpx
import msgspec
from aiohttp import web

from modelrunner import __version__
from modelrunner.cluster.messages import (
    HEADLESS,
    SILENCE,
    Fault,
    HostAddress,
    HostReport,
    ModelAnnounced,
    Received,
    RunnerOrder,
    RunnerReport,
    RunnerStarted,
    models_of,
)
from modelrunner.cluster.transfers import rest_of
from modelrunner.engine.localrunner import LocalRunner
from modelrunner.errors import (
    BadRequest,
    EngineFailed,
    InsufficientDisk,
    ModelNotFound,
    ModelRunnerError,
    RunnerNotFound,
    Unauthorized,
)
from modelrunner.models.disk import LastUsed
from modelrunner.models.installs import Installer
from modelrunner.models.library import Library
from modelrunner.models.runspecs import RunSpecs
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.progress import WorkProgress
from modelrunner.sandbox import Sandbox
from modelrunner.scheduler.host import Held
from modelrunner.scheduler.localhost import LocalHost
from modelrunner.scheduler.state import RunnerId
from modelrunner.store import Store
from modelrunner.store.elsewhere import bundle_at
from modelrunner.store.layout import archive_of
from modelrunner.types import Bundle, Mode, RequiredMemory, RunnerKey, RunSpec
from modelrunner.units import format_bytes

log = logging.getLogger(__name__)
_BEAT = 1.0  # seconds between two reports
_LARGEST_ORDER = 4 << 20
_LARGEST_HEAD = 64 << 10
_PATIENCE = 10.0  # seconds in which a connection must say its secret
_PIECE = 1 << 20
_STEP = 16 << 20  # bytes: smaller changes of the free memory are no news
_CLAIM = 60.0  # seconds for which room is kept for a model of which nothing comes


@dataclass(eq=False)
class _Coming:
    """Room of `size` bytes that is kept for a model until this time of `time.monotonic`; infinity while it comes. Of
    these, so many were `unpacked`."""

    size: int
    until: float
    unpacked: int = 0
    transfer: asyncio.Task[object] | None = None


class HostServer:
    """Listens on `address` with the certificate of `tls`. `folder` keeps models that have come in part. For a model
    that has no room on the disk, or within the store's quota, those go that were not used for longest."""

    def __init__(
        self,
        local: LocalHost,
        registry: BackendRegistry,
        specs: RunSpecs,
        store: Store,
        library: Library,
        installer: Installer,
        last_used: LastUsed,
        *,
        key: str,
        address: str,
        tls: ssl.SSLContext,
        folder: Path,
    ) -> None:
        self._local, self._registry, self._specs = local, registry, specs
        self._store, self._library, self._installer = store, library, installer
        self._last_used = last_used
        self._coming: dict[Path, _Coming] = {}  # the models that have room, by their archives
        self._shared: dict[str, Path] = {}  # the head's models that are read where they are, by their IDs
        self._placing = asyncio.Lock()  # while room is made, and while a runner takes its files
        self._key, self._address, self._tls, self._folder = key, address, tls, folder
        self._runners: dict[str, HostedRun] = {}
        self._starting: set[str] = set()  # the runners whose orders were not carried out yet
        self._changes = asyncio.Event()
        self._heads = 0
        self._left = asyncio.Event()  # while there is none
        self._left.set()
        self._closing = False
        app = web.Application(middlewares=[self._guarded], client_max_size=_LARGEST_ORDER)
        app.add_routes(
            [
                web.get("/state", self._state),
                web.put("/runners/{id}", self._start),
                web.delete("/runners/{id}", self._stop),
                web.post("/runners/{id}/sleep", self._sleep),
                web.post("/runners/{id}/wake", self._wake),
                web.get("/runners/{id}/memory", self._memory),
                web.get("/runners/{id}/log", self._log),
                web.post("/models/{digest}", self._expect),
                web.put("/models/{digest}", self._receive),
                web.get("/models/{digest}", self._give),
                web.post("/models/{digest}/copy", self._copy),
                web.post("/engines/{backend}", self._install),
            ]
        )
        self._app = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def start(self) -> int:
        """Begins to listen, and returns the port."""
        await self._app.setup()
        site = web.TCPSite(self._app, self._address, 0, ssl_context=self._tls)
        await site.start()
        self._watch = asyncio.create_task(self._watch_head(), name="head")
        port: int = self._app.addresses[0][1]
        return port

    async def close(self) -> None:
        """Ends every runner. Returns when nothing is left of them. The head is told first, and cannot come again: it
        asks elsewhere then."""
        self._watch.cancel()
        for site in list(self._app.sites):
            await site.stop()
        self._closing = True
        self._changes.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._left.wait(), _BEAT)
        await self._end_all()
        await self._app.cleanup()

    async def _watch_head(self) -> None:
        """Ends the runners of a head that is gone: another one, or the same one later, begins anew."""
        quiet = 0.0
        while True:
            await asyncio.sleep(_BEAT)
            quiet = 0.0 if self._heads else quiet + _BEAT
            if quiet >= HEADLESS and self._runners:
                log.warning("no head has asked for %d s: its runners end", HEADLESS)
                await self._end_all()

    async def _end_all(self) -> None:
        self._starting.clear()
        await asyncio.gather(*(self._end(id) for id in list(self._runners)))

    async def _end(self, id: str) -> None:
        if (run := self._runners.get(id)) is not None:
            await run.stop()
            self._note_use(run.runner.spec)
            self._runners.pop(id, None)
            self._changes.set()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Callable[..., object]) -> web.StreamResponse:
        try:
            token = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(token.encode("utf-8", "replace"), self._key.encode()):
                raise Unauthorized("this host belongs to another head: its key is needed")
            answer: web.StreamResponse = await handler(request)  # type: ignore[misc]
            return answer
        except ModelRunnerError as error:
            return _json(Fault.of(error), error.status)
        except (OSError, msgspec.MsgspecError) as error:
            return _json(Fault("BadRequest" if isinstance(error, ValueError) else "EngineFailed", str(error)), 400)

    def _report(self) -> HostReport:
        held = [Held(run.runner, run.memory) for run in self._runners.values() if not run.task.done()]
        return HostReport(
            __version__,
            platform.machine(),
            _rounded(self._local.budget(held)),
            self._local.devices(),
            {backend.name: self._local.numbers(backend.name) for backend in self._registry},
            self._own(),
            frozenset(self._shared),
            {id: run.report() for id, run in self._runners.items()},
        )

    def _own(self) -> frozenset[str]:
        return frozenset([model.id for model in self._library])

    def _bundle(self, id: str) -> Bundle:
        """Returns the files of a model, its own or those that it sees. It may block."""
        if (folder := self._shared.get(id)) is None:
            return self._store.bundle(id)
        try:
            return bundle_at(folder, id)
        except ModelNotFound:
            self._shared.pop(id, None)  # the next run gets it sent
            raise

    async def _state(self, request: web.Request) -> web.StreamResponse:
        """Sends a report each second, and after each change of a runner, one in a line."""
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        if request.transport is not None:
            _limit_silence(request.transport)
        self._heads += 1
        self._left.clear()
        try:
            while not self._closing:
                self._changes.clear()
                await response.write(msgspec.json.encode(self._report()) + b"\n")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changes.wait(), _BEAT)
            await response.write_eof()
        finally:
            self._heads -= 1
            if not self._heads:
                self._left.set()
        return response

    async def _start(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        if id in self._runners or id in self._starting:
            raise BadRequest(f"there is a runner {id} already")
        self._starting.add(id)
        try:
            run = await self._begin(id, msgspec.json.decode(await request.read(), type=RunnerOrder))
        finally:
            self._starting.discard(id)
        await run.listen(self._address, self._tls)
        return _json(RunnerStarted(run.port, run.secret))

    async def _begin(self, id: str, order: RunnerOrder) -> "HostedRun":
        """Raises `BadRequest` if the head has the runner ended before there is one: nobody would end it later."""
        async with self._placing:
            spec = await asyncio.to_thread(self._specs.opened, bytes(order.values), self._bundle)
            if id not in self._starting:
                raise BadRequest(f"the runner {id} was ended before it began")
            key = RunnerKey(order.backend, order.files, Mode(order.mode), order.revision)
            runner = self._local.start(RunnerId(key, order.number), spec)
            if not isinstance(runner, LocalRunner):
                raise BadRequest(f"{order.backend} runs no engine, so it is asked by the head itself")
            runner.expect(order.memory)
            self._note_use(spec)
            run = self._runners[id] = HostedRun(runner, order.memory, self._changes.set)
        return run

    async def _stop(self, request: web.Request) -> web.Response:
        self._starting.discard(request.match_info["id"])
        await self._end(request.match_info["id"])
        return web.Response(status=204)

    def _note_use(self, spec: RunSpec) -> None:
        for model_id in models_of(spec):
            self._last_used.note(model_id)

    def _of(self, request: web.Request) -> "HostedRun":
        if (run := self._runners.get(request.match_info["id"])) is None:
            raise RunnerNotFound(f"there is no runner {request.match_info['id']} on this host")
        return run

    async def _sleep(self, request: web.Request) -> web.Response:
        await self._of(request).runner.sleep()
        return web.Response(status=204)

    async def _wake(self, request: web.Request) -> web.Response:
        await self._of(request).runner.wake()
        return web.Response(status=204)

    async def _memory(self, request: web.Request) -> web.Response:
        return _json(await self._of(request).runner.memory())

    async def _log(self, request: web.Request) -> web.StreamResponse:
        """Sends the log's last `lines`, all without; with `follow` it goes on until the runner ends or the head
        leaves."""
        run, lines = self._of(request), _number(request, "lines") if "lines" in request.query else None
        ending = asyncio.Event()
        pieces = self._local.log(run.runner, lines, ending if "follow" in request.query else None)
        response = web.StreamResponse()
        await response.prepare(request)

        async def end() -> None:
            while request.transport is not None and not run.task.done():
                await asyncio.wait([run.task], timeout=_BEAT)
            ending.set()

        watch = asyncio.create_task(end(), name=f"log of {run.runner.id}")
        try:
            async for piece in pieces:
                await response.write(piece)
        finally:
            watch.cancel()
        return response

    def _partial(self, digest: str) -> Path:
        if not digest.isalnum():
            raise BadRequest(f"{digest[:80]!r} is no digest")
        return self._folder / f"{digest}.tar"

    async def _expect(self, request: web.Request) -> web.Response:
        """Makes room for a model. Raises `InsufficientDisk` if there cannot be enough."""
        digest = request.match_info["digest"]
        path, expected = self._partial(digest), msgspec.json.decode(await request.read(), type=ModelAnnounced)
        if expected.size and (former := self._coming.get(path)) is not None and former.transfer is not None:
            former.transfer.cancel()  # of a head that has left it
            await asyncio.wait([former.transfer])
        async with self._placing:
            id = f"sha256:{digest}"
            if expected.folder:
                with suppress(ModelNotFound):
                    await asyncio.to_thread(bundle_at, Path(expected.folder), id)
                    self._shared[id] = Path(expected.folder)
            complete = id in self._own() or id in self._shared
            if expected.size and not complete:
                await self._make_room(expected, path)
            received = _size(path)
        return _json(Received(received, complete, self._own(), frozenset(self._shared)))

    async def _make_room(self, expected: ModelAnnounced, path: Path) -> None:
        """Keeps room for a model, whose archive and files are on the disk for a moment. First what is left of other
        archives goes, then the models that were not used for longest, if they suffice; else `InsufficientDisk`."""
        in_use = expected.keep.union(*[models_of(run.runner.spec) for run in self._runners.values()])
        idle = sorted([m for m in self._library if m.id not in in_use], key=self._last_used.of)
        now = time.monotonic()
        self._coming = {other: claim for other, claim in self._coming.items() if now < claim.until}
        self._coming[path] = _Coming(expected.size, now + _CLAIM)
        try:
            if await asyncio.to_thread(self._lack) > 0:
                for left in set(self._folder.glob("*.tar")) - self._coming.keys():
                    left.unlink(missing_ok=True)
            lack, going = await asyncio.to_thread(self._lack), []
            for model, frees in zip(
                idle, await asyncio.to_thread(self._store.freed, [m.id for m in idle]), strict=True
            ):
                if lack <= 0:
                    break
                going.append(model)
                lack -= frees
            if lack > 0:
                quota = self._store.quota
                limit = (
                    "" if quota is None else f", and its models may have {format_bytes(quota)} in all (models_quota)"
                )
                raise InsufficientDisk(
                    f"the model needs {format_bytes(expected.size)}, twice that while it comes: {platform.node()} "
                    f"lacks {format_bytes(int(lack))} for it{limit}"
                )
            for model in going:
                log.info("%s goes, since another model needs its room", model.name)
                await self._library.remove(model.id, force=True)
                self._changes.set()
        except BaseException:
            self._coming.pop(path, None)
            raise

    def _lack(self) -> float:
        """Returns the bytes that are missing for all models that come: their archives on the disk of the data folder,
        their files on that of the folder of models where the least is missing. For a thread."""
        coming = self._coming.copy()  # models come and end meanwhile
        quota, claims = self._store.quota, coming.values()
        needed = sum([claim.size for claim in claims])
        room = math.inf if quota is None else quota - self._store.used()
        home, unpacked = self._store.data, sum([claim.unpacked for claim in claims])
        free = shutil.disk_usage(home).free + sum(map(_size, coming))

        def lack_in(folder: Path) -> float:
            if folder.stat().st_dev == home.stat().st_dev:
                return 2 * needed - free - unpacked
            return needed - min(free, shutil.disk_usage(folder).free + unpacked)

        return max(needed - room, min([lack_in(folder.data) for folder in self._store.places()]))

    async def _receive(self, request: web.Request) -> web.Response:
        """Takes the rest of a model's archive from `offset` on, and stores the model."""
        path = self._partial(request.match_info["digest"])
        try:
            await self._take(path, _number(request, "offset"), request.content.iter_chunked(_PIECE))
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.abort()  # nobody is there to take leave of
            raise
        return web.Response(status=204)

    async def _copy(self, request: web.Request) -> web.Response:
        """Gets the rest of a model's archive from another host, and stores the model."""
        path = self._partial(request.match_info["digest"])
        source, offset = msgspec.json.decode(await request.read(), type=HostAddress), _size(path)
        try:
            async with (
                httpx.AsyncClient(
                    verify=ssl.create_default_context(cadata=source.certificate), trust_env=False, timeout=_CLAIM
                ) as client,
                client.stream(
                    "GET",
                    f"https://{source.address}:{source.port}/models/{path.stem}?offset={offset}",
                    headers={"Authorization": f"Bearer {source.key}"},
                ) as answer,
            ):
                if answer.is_error:
                    raise msgspec.json.decode(await answer.aread(), type=Fault).error()
                await self._take(path, offset, answer.aiter_raw())
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise EngineFailed(f"the host at {source.address} does not send the model any more ({why})") from None
        return web.Response(status=204)

    async def _give(self, request: web.Request) -> web.StreamResponse:
        """Sends a model's archive from `offset` on to another host, slower if engines run here."""
        id, offset = f"sha256:{request.match_info['digest']}", _number(request, "offset")
        archive = await asyncio.to_thread(archive_of, self._store, id)
        response = web.StreamResponse(headers={"Content-Length": str(max(0, archive.size - offset))})
        await response.prepare(request)
        try:
            async for piece in rest_of(archive, offset, lambda: bool(self._runners)):
                await response.write(piece)
        except BaseException:
            if request.transport is not None:
                request.transport.abort()  # the other one learns of it at once
            raise
        return response

    async def _take(self, path: Path, offset: int, pieces: AsyncIterator[bytes]) -> None:
        if (claim := self._coming.get(path)) is None or claim.transfer is not None:
            raise BadRequest("a model must be announced before each part of it that is sent")
        claim.until, claim.transfer = math.inf, asyncio.current_task()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with await asyncio.to_thread(open, path, "ab") as file:
                if file.tell() != offset:
                    raise BadRequest(f"{file.tell()} bytes have come, so the rest cannot begin at {offset}")
                while piece := await _within(_CLAIM, pieces):
                    offset += len(piece)
                    if offset > claim.size:
                        path.unlink()  # it is not what was announced
                        raise BadRequest(f"a model of {claim.size} bytes was announced, and more come")
                    await asyncio.to_thread(file.write, piece)

            def unpacked(step: WorkProgress) -> None:
                claim.unpacked = step.current

            try:
                size = path.stat().st_size
                await self._library.load(_pieces(path), unpacked, name=None, trust=True, size=size)
            finally:
                path.unlink(missing_ok=True)
        finally:
            if self._coming.get(path) is claim:
                del self._coming[path]
        self._changes.set()

    async def _install(self, request: web.Request) -> web.StreamResponse:
        """Installs the engine if it is missing. Sends a line of progress each second, and a fault if it fails."""
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        last = WorkProgress("Looking for the engine", "install")

        def told(step: WorkProgress) -> None:
            nonlocal last
            last = step

        work = asyncio.ensure_future(self._installer.need(request.match_info["backend"], told))
        while not work.done():
            await asyncio.wait([work], timeout=_BEAT)
            await response.write(msgspec.json.encode({"message": last.message}) + b"\n")
        if (error := work.exception()) is not None:
            await response.write(msgspec.json.encode({"fault": Fault.of(error)}) + b"\n")
        return response


class HostedRun:
    """A runner of the head's on this host, and the port at which its engine is asked."""

    def __init__(self, runner: LocalRunner, memory: RequiredMemory, changed: Callable[[], None]) -> None:
        self.runner, self.memory = runner, memory
        self.secret = runner.endpoint.key or secrets.token_hex(16)  # an engine on TCP has a key already
        self.port = 0
        self._changed = changed
        self._failure: Fault | None = None
        self._front: asyncio.Server | None = None
        self._is_ending = False
        self.task: asyncio.Task[None] = asyncio.create_task(self._run(), name=f"runner {runner.id}")

    async def _run(self) -> None:
        try:
            await self.runner.run(self._changed, lambda: None)
        except ModelRunnerError as error:
            self._failure = Fault.of(error)
        except Exception as error:  # of a backend
            log.exception("the runner %s failed", self.runner.id)
            self._failure = Fault("EngineFailed", f"{type(error).__name__}: {error}")
        finally:
            self._changed()

    async def listen(self, address: str, tls: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        self._front = await loop.create_server(lambda: _Front(self.runner, self.secret), address, 0, ssl=tls)
        self.port = self._front.sockets[0].getsockname()[1]
        if self._is_ending:
            self._front.close()

    async def stop(self) -> None:
        self._is_ending = True
        if self._front is not None:
            self._front.close()
        if not self.task.done():
            self.runner.mark_stopping()
            self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def report(self) -> RunnerReport:
        runner = self.runner
        reads = {path: endpoint.reads for path, endpoint in runner.api.endpoints.items() if endpoint.reads is not None}
        return RunnerReport(
            runner.stage,
            runner.ready_at is not None,
            runner.names,
            reads,
            runner.sleep_level,
            runner.pid,
            runner.process.sandbox if runner.process else Sandbox(),
            self._failure,
        )


class _Pass(asyncio.Protocol):
    """Passes the bytes of one connection on to another one, no faster than that takes them."""

    transport: asyncio.Transport
    other: "asyncio.Transport | None" = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.write(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.close()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.is_closing():
            self.other.resume_reading()


class _Front(_Pass):
    """A connection of the head's: the head of its first request must have the secret."""

    def __init__(self, runner: LocalRunner, secret: str) -> None:
        self._runner = runner
        self._line = f"\r\nAuthorization: Bearer {secret}\r\n".encode()
        self._begun = bytearray()
        self._dialing: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._limit = asyncio.get_running_loop().call_later(_PATIENCE, transport.close)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.write(data)
            return
        self._begun += data
        if self._dialing is None and (end := self._begun.find(b"\r\n\r\n")) >= 0:
            self._limit.cancel()
            if self._line not in self._begun[: end + 2]:
                self.transport.close()
                return
            self._dialing = asyncio.create_task(self._dial())
        elif self._dialing is None and len(self._begun) > _LARGEST_HEAD:
            self.transport.close()

    async def _dial(self) -> None:
        loop, endpoint, engine = asyncio.get_running_loop(), self._runner.endpoint, _Pass()
        self.transport.pause_reading()
        try:
            if endpoint.path is not None:
                await loop.create_unix_connection(lambda: engine, str(endpoint.path))
            else:
                await loop.create_connection(lambda: engine, endpoint.host or "127.0.0.1", endpoint.port or 0)
        except OSError:
            self.transport.close()
            return
        engine.other, self.other = self.transport, engine.transport
        if self.transport.is_closing():
            engine.transport.close()
            return
        engine.transport.write(bytes(self._begun))
        self._begun.clear()
        self.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._limit.cancel()
        super().connection_lost(error)


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise BadRequest(f"{name} must be a number of at least 0, and is {text[:80]!r}")
    return int(text)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


async def _within(seconds: float, pieces: AsyncIterator[bytes]) -> bytes:
    """Returns the next piece, b"" at the end."""
    try:
        async with asyncio.timeout(seconds):
            return await anext(pieces, b"")
    except TimeoutError:
        raise BadRequest(f"nothing has come for {seconds:.0f} s, and the model is not whole yet") from None


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(open, path, "rb")
    with file:
        while piece := await asyncio.to_thread(file.read, _PIECE):
            yield piece


def _limit_silence(transport: asyncio.Transport) -> None:
    """Has the connection end if the peer does not take what is sent for `SILENCE`: packets are dropped, and nothing is
    closed. Linux: tcp(7)."""
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SILENCE * 1000))


def _rounded(budget: RequiredMemory) -> RequiredMemory:
    """Whole steps: then hosts with equal machines are equal to a plan, and the free memory does not change all the
    time."""
    vram = tuple([size - size % _STEP for size in budget.vram])
    return RequiredMemory(budget.ram - budget.ram % _STEP, vram, budget.shared)


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
