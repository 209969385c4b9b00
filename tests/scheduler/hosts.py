"""A second host, as another machine would be one: it has a folder, files and a budget of its own, gets a run as JSON,
and puts each engine behind TLS and a key. The scheduler knows nothing of it but `Host` and `Runner`."""

import asyncio
import secrets
import shutil
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from modelrunner.daemon.certificates import self_signed
from modelrunner.engine.abandoned import Abandoned
from modelrunner.engine.connections import UpstreamPool
from modelrunner.engine.localrunner import LocalRunner
from modelrunner.engine.runner import EngineProcess, Runner
from modelrunner.engineapi import OPENAI
from modelrunner.errors import EngineFailed, EngineProtocolError, ModelRunnerError
from modelrunner.models.rendering import Renderings, TemplateFiles
from modelrunner.models.runspecs import RunSpecs, values_of
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.scheduler import Held, Host, LocalHost, MemoryProbe
from modelrunner.scheduler.devices import Device
from modelrunner.scheduler.state import RunnerId
from modelrunner.store import Store
from modelrunner.types import Endpoint, RequiredMemory, RunSpec, Served
from tests.waiting import HUNG


class Files:
    """The models of one machine, and how a run is made of them."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "data")
        self.specs = RunSpecs(self.store, TemplateFiles(folder / "templates", Renderings(folder / "templates.json")))

    def has(self, model_id: str) -> bool:
        return any(model.id == model_id for model in self.store.list())

    def copy(self, spec: RunSpec) -> None:
        """Takes the files of the run's model from where they are."""
        blobs = {}
        for name, path in spec.bundle.files.items():
            shutil.copyfile(path, part := self.store.partial / name)
            blobs[name] = self.store.ingest(part)
        assert self.store.create(blobs, "copied").id == spec.model_id


class SecondHost:
    def __init__(self, name: str, folder: Path, registry: BackendRegistry, budget: int) -> None:
        self.name, self.folder = name, folder
        (folder / "run").mkdir(parents=True)
        self.files = Files(folder)
        self.local = LocalHost(registry, lambda: folder / "run", folder / "logs", probe=MemoryProbe(budget))
        self.tls = self_signed(folder, [f"{name}.internal"]).current()
        self.trusted = ssl.create_default_context(cafile=str(folder / "certificate.pem"))
        self.gone = asyncio.Event()
        self.received: list[bytes] = []
        self.open = 0

    def budget(self, runners: Iterable[Held]) -> RequiredMemory | None:
        return None if self.gone.is_set() else self.local.budget(())

    def devices(self) -> tuple[Device, ...]:
        return self.local.devices()

    def numbers(self, backend: str) -> tuple[int, ...] | None:
        return self.local.numbers(backend)

    def kind(self, devices: tuple[int, ...]) -> str:
        return self.local.kind(devices)

    def has(self, model_id: str) -> bool:
        return self.files.has(model_id)

    labels: Collection[str] = ()

    def lacks(self, backend: str) -> bool:
        return False

    is_joining = False

    def joins(self, model_id: str, devices: Collection[int]) -> bool:
        return self.is_joining

    def start(self, runner: RunnerId, spec: RunSpec, others: Sequence[Host] = ()) -> Runner:
        return HostedRunner(self, runner, spec)

    def log(self, runner: Runner, lines: int | None, ending: asyncio.Event | None) -> AsyncIterator[bytes]:
        if self.gone.is_set():
            raise EngineFailed(f"the host {self.name} does not answer: its logs cannot be read")
        assert isinstance(runner, HostedRunner)
        return self.local.log(runner.there, lines, ending)

    async def close(self) -> None: ...


class HostedRunner:
    """The head's side of a runner there, and what stands before its engine."""

    there: LocalRunner

    def __init__(self, host: SecondHost, runner: RunnerId, spec: RunSpec) -> None:
        self.id, self.key, self.spec = secrets.token_hex(4), runner.key, spec
        self.served = Served(spec.bundle.name, self.key.backend, self.id)
        self.names: tuple[str, ...] | None = None
        self.api = OPENAI
        self.secret = secrets.token_hex(8)
        self.host = host
        self.upstream = UpstreamPool(self._endpoint(1))
        self.abandoned = Abandoned(self._settled)
        self.stage = "starting"
        self.ready_at: float | None = None
        self.failure: ModelRunnerError | None = None
        self.owners: set[str] = set()
        self.sleep_level = 0
        self.process: EngineProcess | None = None
        self._expected = RequiredMemory(0)
        self._runner, self._values = runner, values_of(spec)

    def _endpoint(self, port: int) -> Endpoint:
        headers = (("Authorization", f"Bearer {self.secret}"),)
        name = f"{self.host.name}.internal"
        return Endpoint(host="127.0.0.1", port=port, tls=self.host.trusted, name=name, headers=headers)

    async def run(self, changed: Callable[[], None], loaded_for: Callable[[], str | None] = lambda: "") -> NoReturn:
        def told() -> None:
            for name in ("stage", "api", "names", "sleep_level", "process", "ready_at"):
                setattr(self, name, getattr(self.there, name))
            changed()

        if not self.host.has(self.spec.model_id):
            await asyncio.to_thread(self.host.files.copy, self.spec)
        there = self.host.local.start(self._runner, self.host.files.specs.opened(self._values))
        assert isinstance(there, LocalRunner)
        self.there = there
        self.there.expect(self._expected)
        front = await asyncio.start_server(self._relay, "127.0.0.1", 0, ssl=self.host.tls)
        self.upstream.move(self._endpoint(front.sockets[0].getsockname()[1]))
        engine = asyncio.create_task(self.there.run(told, loaded_for))
        gone = asyncio.create_task(self.host.gone.wait())
        try:
            await asyncio.wait([engine, gone], return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise EngineFailed(f"the host {self.host.name} does not answer any more, and its engines are lost")
            await engine
            raise AssertionError
        except ModelRunnerError as error:
            self.failure = error
            raise
        finally:
            front.close()
            engine.cancel()
            gone.cancel()
            await asyncio.gather(engine, gone, return_exceptions=True)
            self.process = None
            self.upstream.close()
            self.abandoned.end()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes one connection on, if it has the key."""
        self.host.open += 1
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                self.host.received.append(head)
                if f"Authorization: Bearer {self.secret}\r\n".encode() in head:
                    engine, to_engine = await asyncio.open_unix_connection(self.there.endpoint.path)
                    to_engine.write(head)
                    answer = asyncio.create_task(_pass_on(engine, writer))
                    await _pass_on(reader, to_engine)
                    await answer
        finally:
            self.host.open -= 1
            writer.close()

    def mark_stopping(self) -> None:
        self.stage = "stopping"

    def expect(self, memory: RequiredMemory) -> None:
        self._expected = memory

    async def memory(self) -> RequiredMemory | None:
        return await self.there.memory()

    async def sleep(self) -> None:
        await self.there.sleep()

    async def wake(self) -> None:
        await self.there.wake()

    async def request_error(self, status: int, message: str, fields: Mapping[str, Any]) -> ModelRunnerError | None:
        return await self.there.request_error(status, message, fields)

    async def fault_of_answer(self, error: EngineProtocolError) -> EngineProtocolError:
        return await self.there.fault_of_answer(error)

    async def _settled(self) -> None:
        if self.api.settled is not None:
            await self.upstream.fetch("GET", self.api.settled, timeout=HUNG)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
