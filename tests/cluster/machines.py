"""Machines of a cluster in one process: two daemons' parts, and real engine processes."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelrunner.cluster.hostserver import HostServer
from modelrunner.cluster.messages import NAME, HostAddress
from modelrunner.cluster.remotehost import RemoteHost
from modelrunner.cluster.transfers import SendTurns
from modelrunner.config.modelconfig import ModelConfiguration
from modelrunner.daemon.certificates import self_signed
from modelrunner.daemon.parts import Parts, build
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.scheduler import Lease, Target
from modelrunner.types import KeepAlive, Mode, RequiredMemory, RunnerKey
from tests.api.conftest import make_settings
from tests.fakes import FakeBackend
from tests.gateway.fakes import until
from tests.store.samples import add_model
from tests.waiting import HUNG

MIB = 1 << 20
MODEL = 64 * MIB


@dataclass
class Machine:
    parts: Parts
    backend: FakeBackend
    folder: Path

    @classmethod
    def make(cls, folder: Path, budget: str) -> "Machine":
        (folder / "data_dir").mkdir(parents=True)
        backend = FakeBackend(folder, memory=RequiredMemory(MODEL))
        settings = make_settings(folder, memory_budget=budget)
        return cls(build(settings, BackendRegistry({"fake": backend})), backend, folder)

    def serve(self, key: str = "key") -> HostServer:
        parts = self.parts
        tls = self_signed(self.folder / "tls", ["127.0.0.1", NAME]).current()
        return HostServer(
            parts.host,
            parts.registry,
            parts.specs,
            parts.store,
            parts.library,
            parts.installer,
            parts.last_used,
            key=key,
            address="127.0.0.1",
            tls=tls,
            folder=self.folder / "cluster",
        )

    @property
    def certificate(self) -> str:
        return (self.folder / "tls/certificate.pem").read_text()


class Cluster:
    """This machine, on which nothing fits, and the host b with room for one model."""

    def __init__(self, folder: Path) -> None:
        self.head, self.there = Machine.make(folder / "head", "1MiB"), Machine.make(folder / "there", "100MiB")
        self.scheduler = self.head.parts.scheduler
        self.hosts: dict[str, RemoteHost] = {}
        self.turns = SendTurns(self.hosts.values)
        self.others: list[HostServer] = []

    async def start(self, *, shared: bool = False) -> None:
        self.shared = shared
        self.server = self.there.serve()
        self.where = HostAddress("127.0.0.1", await self.server.start(), "key", self.there.certificate)
        self.join()

    def join(self) -> None:
        """The head begins to follow the host."""
        self.host = self._added("b", self.where)

    def _added(self, name: str, where: HostAddress) -> RemoteHost:
        registry, store = self.head.parts.registry, self.head.parts.store
        host = RemoteHost(
            name, where, registry, store, self.scheduler.hosts_changed, turns=self.turns, shared=self.shared
        )
        self.hosts[name] = host
        self.scheduler.add_host(host)
        return host

    async def another(self, name: str) -> tuple[Machine, RemoteHost]:
        """A further host."""
        machine = Machine.make(self.head.folder.parent / name, "100MiB")
        server = machine.serve()
        self.others.append(server)
        host = self._added(name, HostAddress("127.0.0.1", await server.start(), "key", machine.certificate))
        await until(lambda: host.state == "ready")
        return machine, host

    async def ready(self) -> None:
        await until(lambda: self.host.state == "ready")

    def target(self, name: str, **options: Any) -> Target:
        """A model of the head. `options` are those of `write_gguf`."""
        parts = self.head.parts
        if name not in (names := {ref for model in parts.store.list() for ref in model.tags}):
            add_model(parts.store, name, seed=len(names), **options)
        bundle = parts.store.bundle(name)
        key = RunnerKey("fake", bundle.model_id, Mode.COMPLETION)
        spec, api = parts.specs.make(self.head.backend, bundle, ModelConfiguration(), key.mode)
        return Target(key, spec, KeepAlive(300), api=api)

    async def lease(self, name: str = "smol") -> Lease:
        async with asyncio.timeout(HUNG):
            return await self.scheduler.acquire(self.target(name))

    async def close(self) -> None:
        await self.scheduler.close(0)
        for server in (self.server, *self.others):
            await server.close()
        assert not list((self.there.folder / "r").glob("*/e.sock")), "no engine is left there"
