"""Engines of any behaviour, byte by byte, and a scheduler that grants at once: what the proxy's tests stand on."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from modelrunner.daemon.certificates import self_signed
from modelrunner.defaults import RequestParameters
from modelrunner.engine.abandoned import Abandoned
from modelrunner.engine.connections import UpstreamConnection, UpstreamPool
from modelrunner.engineapi import OPENAI_ENDPOINTS, ApiShape, EndpointApi, EngineApi
from modelrunner.errors import (
    BadRequest,
    EngineFailed,
    EngineProtocolError,
    Misdirected,
    ModelNotFound,
    ModelRunnerError,
    RunnerNotFound,
)
from modelrunner.progress import LoadProgress
from modelrunner.scheduler import Replicas
from modelrunner.types import NO_LIMITS, Endpoint, KeepAlive, Mode, RunnerKey, Served
from tests.waiting import HUNG

FAKE_API = EngineApi({**OPENAI_ENDPOINTS, "/v1/messages": EndpointApi(ApiShape.MESSAGES)})
OK = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{"ok":true}'
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


async def until(condition: Callable[[], bool]) -> None:
    """Lets the event loop run until `condition` holds."""
    async with asyncio.timeout(HUNG):
        while not condition():  # noqa: ASYNC110  what is watched has no event of its own
            await asyncio.sleep(0.001)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str) -> bytes:
    return chunk(b"data: %b\n\n" % text.encode())


@dataclass
class Received:
    """A request as an engine saw it."""

    head: bytes
    body: bytes

    @property
    def path(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    def header(self, name: str) -> str | None:
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name.lower().encode():
                return value.strip().decode()
        return None


class Call:
    """One request at a scripted engine, to be answered with raw bytes."""

    def __init__(
        self, engine: "ScriptedEngine", request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.engine, self.request, self._reader, self._writer = engine, request, reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        self._writer.transport.abort()

    async def left(self) -> None:
        """Until the other side has closed the connection."""
        while await self._reader.read(65536):
            pass


Script = Callable[[Call], Awaitable[None]]


async def answer_ok(call: Call) -> None:
    await call.send(OK)


@dataclass
class ScriptedEngine:
    """An HTTP server on a Unix socket whose answers are what `script` sends. `received` are the requests seen;
    `connections` counts those that were opened, `open` those that still are."""

    endpoint: Endpoint
    script: Script = answer_ok
    received: list[Received] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                request = Received(head, b"")
                request.body = await reader.readexactly(int(request.header("content-length") or 0))
                self.received.append(request)
                await self._notify()
                await self.script(Call(self, request, reader, writer))
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the other side left, or the test is over
        finally:
            self.open -= 1
            writer.close()
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, predicate: Callable[["ScriptedEngine"], bool]) -> None:
        async with asyncio.timeout(HUNG), self._changed:
            await self._changed.wait_for(lambda: predicate(self))


@asynccontextmanager
async def scripted_engine(
    path: Path, script: Script = answer_ok, *, remote: bool = False
) -> AsyncIterator[ScriptedEngine]:
    """On a Unix socket; or, as an engine of another host, behind TLS and with a header of its own."""
    engine = ScriptedEngine(Endpoint(path=path), script)
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await engine.serve(reader, writer)

    if remote:
        tls = self_signed(path.parent / "tls", ["engine.internal"]).current()
        server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
        trusted = ssl.create_default_context(cafile=str(path.parent / "tls/certificate.pem"))
        port, headers = server.sockets[0].getsockname()[1], (("Authorization", "Bearer of-this-runner"),)
        engine.endpoint = Endpoint(host="127.0.0.1", port=port, tls=trusted, name="engine.internal", headers=headers)
    else:
        server = await asyncio.start_unix_server(accept, str(path))
    try:
        yield engine
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


class FakeRunner:
    """A ready runner on an engine of the test's making. `die` ends its process, with a failure that explains it. What
    clients have left is settled once `settling` is set, at once without one."""

    def __init__(self, endpoint: Endpoint, model: str = "m", mode: Mode = Mode.COMPLETION) -> None:
        self.id = f"runner-{model}"
        self.key = RunnerKey("fake", model, mode)
        self.served = Served(f"ai/{model}", "fake", self.id)
        self.endpoint = endpoint
        self.upstream = UpstreamPool(endpoint)
        self.abandoned = Abandoned(self._settled)
        self.settling: asyncio.Event | None = None
        self.names: tuple[str, ...] | None = None
        self.spec = SimpleNamespace(
            model_id=model,
            bundle=SimpleNamespace(name=f"ai/{model}", capabilities=frozenset({"chat", "completion"}), defaults=None),
            context_size=4096,
            parallel=4,
        )
        self.failure: EngineFailed | None = None
        self.gone = asyncio.Event()

    def die(self, message: str = "the engine ran out of luck") -> None:
        self.failure = EngineFailed(message)
        self.gone.set()

    async def _settled(self) -> None:
        if self.settling is not None:
            await self.settling.wait()

    api = FAKE_API

    def change(self, paths: Iterable[str], **changes: Any) -> None:
        """Changes fields of some endpoints (`EndpointApi`)."""
        changed = {path: replace(self.api.endpoints[path], **changes) for path in paths}
        self.api = replace(self.api, endpoints={**self.api.endpoints, **changed})

    async def request_error(self, status: int, message: str, fields: Mapping[str, Any]) -> ModelRunnerError | None:
        return BadRequest(message) if "too large to process" in message else None

    async def fault_of_answer(self, error: EngineProtocolError) -> EngineProtocolError:
        return error.saying(error.message.replace("the engine", f"the engine {self.key.backend}", 1))


class FakeLease:
    def __init__(self, scheduler: "FakeScheduler", runner: FakeRunner, waited: float = 0.0, crashes: int = 0) -> None:
        self.runner, self.waited, self.loaded, self.crashes = runner, waited, waited / 2, crashes
        self.variant = scheduler.variant
        self.limits = scheduler.limits
        self.parameters = scheduler.parameters
        self.served = runner.served
        self.preset = ""
        self.target = SimpleNamespace(spec=runner.spec, model_id=runner.spec.model_id)
        self.tries = 2
        self._scheduler = scheduler
        self._held = True
        scheduler.leases += 1

    def release(self) -> None:
        if self._held:
            self._held = False
            self._scheduler.leases -= 1

    def answered(self) -> None:
        """Takes the end of a turn."""

    def abandon(self, connection: UpstreamConnection, freed: Callable[[], None]) -> None:
        def free() -> None:
            self.release()
            freed()

        self.runner.abandoned.add(connection, free)

    async def engine_ended(self, within: float) -> bool:
        try:
            async with asyncio.timeout(within):
                await self.runner.gone.wait()
        except TimeoutError:
            return False
        return True


class FakeScheduler:
    """Grants `runner` at once if `is_warm`, else when `gate` opens. `refusal` is raised instead of a grant. `leases`
    are those held now; `granted` counts them all; `waiting` those that stand at the gate;
    `asked` has the caller and the priority of each that stood there, `prefixes` what each was asked with, `unloaded`
    the models. Leases are of `variant`,
    each alone with its engine; their model has `limits` and `parameters`."""

    def __init__(self, runner: FakeRunner) -> None:
        self.runner = runner
        self.is_warm = True
        self.variant = ""
        self.limits = NO_LIMITS
        self.parameters: RequestParameters | None = None
        self.gate = asyncio.Event()
        self.refusal: ModelRunnerError | None = None
        self.leases = self.granted = self.waiting = 0
        self.keep_alive: KeepAlive | None = None
        self.asked: list[tuple[str, bool]] = []
        self.prefixes: list[int | None] = []
        self.unloaded: list[str] = []
        self.diagnostics = self

    def warm(
        self,
        target: Any,
        keep_alive: KeepAlive | None = None,
        batch: bool = False,
        owner: str | None = None,
        prefix: int | None = None,
    ) -> FakeLease | None:
        self.keep_alive = keep_alive
        self.prefixes.append(prefix)
        return self._grant() if self.is_warm and self.refusal is None else None

    async def acquire(
        self,
        target: Any,
        keep_alive: KeepAlive | None = None,
        caller: str = "",
        batch: bool = False,
        owner: str | None = None,
        broken: FakeLease | None = None,
        prefix: int | None = None,
    ) -> FakeLease:
        self.prefixes.append(prefix)
        self.asked.append((caller, batch))
        self.waiting += 1
        try:
            if not self.is_warm:
                await self.gate.wait()
        finally:
            self.waiting -= 1
        if self.refusal is not None:
            raise self.refusal
        self.keep_alive = keep_alive
        return self._grant(1.0, 0 if broken is None else broken.crashes + 1)

    async def unload(self, *, model_ids: list[str]) -> None:
        self.unloaded += model_ids

    def lease_runner(self, runner_id: str, owner: str | None = None, asked: Any = None) -> FakeLease:
        if runner_id != self.runner.id:
            raise RunnerNotFound(f"there is no runner {runner_id}")
        return self._grant()

    def progress(self, target: Any) -> LoadProgress:
        return LoadProgress("loading weights", 1, 2.04)

    def _grant(self, waited: float = 0.0, crashes: int = 0) -> FakeLease:
        self.granted += 1
        return FakeLease(self, self.runner, waited, crashes)


class FakeResolver:
    """Knows the models m and other; m is known from the start, other after `prepare`."""

    stage = "queued"

    def __init__(self) -> None:
        self.prepared = {"m"}
        self.most = 1  # runners of a model

    @property
    def known(self) -> Any:
        return self

    def get(self, address: tuple[str | None, str, Mode]) -> Any:
        return self._target(*address) if address[1] in self.prepared else None

    async def prepare(self, backend: str | None, model: str, mode: Mode) -> None:
        await asyncio.sleep(0)
        if model in ("m", "other"):
            self.prepared.add(model)

    def __call__(self, backend: str | None, model: str, mode: Mode) -> Any:
        if model not in ("m", "other"):
            raise ModelNotFound(f"there is no model {model!r}", param="model")
        return self._target(backend, model, mode)

    def names(self, model: str) -> tuple[str, ...]:
        return (model,)

    def _target(self, backend: str | None, model: str, mode: Mode) -> Any:
        if backend not in (None, "fake"):
            raise Misdirected(f"{backend} cannot serve {model}")
        spec = SimpleNamespace(bundle=SimpleNamespace(name=model, references=(model,), defaults=None))
        key, replicas = RunnerKey("fake", model, mode), Replicas(1, self.most)
        return SimpleNamespace(
            api=FAKE_API,
            key=key,
            model_id=model,
            keep_alive=KeepAlive(300.0),
            spec=spec,
            replicas=replicas,
            parameters=None,
            fallback=None,
        )
