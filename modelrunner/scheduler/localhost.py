"""The machine of the daemon as a host: makes runners, each with its socket, log and permissions, and knows the budget
and what runners hold of it."""

import asyncio
import os
import platform
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from pathlib import Path

from modelrunner.backend import RunsElsewhere
from modelrunner.engine.localrunner import LocalRunner
from modelrunner.engine.readiness import free_port
from modelrunner.engine.remoterunner import RemoteRunner
from modelrunner.engine.runner import Runner
from modelrunner.plugins.isolation import interface_of
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.processes.log import read_log
from modelrunner.sandbox import Permissions
from modelrunner.scheduler.devicememory import DeviceMemory, EngineOnDevices
from modelrunner.scheduler.devices import Device, devices, kind_of
from modelrunner.scheduler.host import Held, Host
from modelrunner.scheduler.memory import MemoryProbe
from modelrunner.scheduler.state import RunnerId
from modelrunner.types import Endpoint, Launch, ProcessOptions, RequiredMemory, RunSpec


class LocalHost:
    """A `Host` whose runners are child processes of this daemon, or servers that run already (`RunsElsewhere`). Each
    process gets a folder of its own in the one that
    `runtime_dir` makes and returns, and listens on a Unix socket there, or on a free port of 127.0.0.1 for a backend
    that needs TCP (the runner checks that the listener is its own).

    `logs` is the folder of the engines' logs; `stop_grace`, `stall_limit` and `wedge_limit` are in seconds, and
    described at `ProcessOptions` and `LocalRunner`. `permissions` are those of every engine, None if none is confined.
    `probe` measures the budget."""

    def __init__(
        self,
        registry: BackendRegistry,
        runtime_dir: Callable[[], Path],
        logs: Path,
        *,
        name: str = "",
        probe: MemoryProbe | None = None,
        permissions: Permissions | None = None,
        stop_grace: float = 10.0,
        stall_limit: float = 300.0,
        wedge_limit: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.labels: Collection[str] = ()
        self._registry = registry
        self._runtime_dir = runtime_dir
        self._logs = logs
        self._probe = probe or MemoryProbe()
        self._on_devices = DeviceMemory(devices, self._probe.devices)
        self._permissions = permissions
        self._stop_grace = stop_grace
        self._stall_limit = stall_limit
        self._wedge_limit = wedge_limit
        self._clock = clock

    def budget(self, runners: Iterable[Held]) -> RequiredMemory:
        """See `Host`. The figure was measured after the last call, or at most 1.5 seconds before it."""
        return self._probe({held.runner.process.pid: held.memory for held in runners if held.runner.process})

    def kind(self, devices: tuple[int, ...]) -> str:
        """See `Host`. The name of a device is its kind, and so is the size of its memory."""
        return kind_of(platform.machine(), self._probe.devices(), devices)

    def devices(self) -> tuple[Device, ...]:
        """See `Host`. The figures are those of the budget."""
        return self._probe.devices()

    def numbers(self, backend: str) -> tuple[int, ...] | None:
        """See `Host`."""
        return self._probe.numbers(backend)

    def has(self, model_id: str) -> bool:
        """See `Host`: the daemon runs models of its own store."""
        return True

    def joins(self, model_id: str, devices: Collection[int]) -> bool:
        """See `Host`: nothing of this machine is reserved in Ray."""
        return False

    def lacks(self, backend: str) -> bool:
        """See `Host`: a missing engine is an error before there is a run."""
        return False

    def start(self, runner: RunnerId, spec: RunSpec, others: Sequence[Host] = ()) -> Runner:
        """See `Host`."""
        key = runner.key
        backend = self._registry.get(key.backend)
        id = secrets.token_hex(4)
        if interface_of(backend, RunsElsewhere) is not None:
            return RemoteRunner(backend, spec, key, id=id, clock=self._clock)
        folder = self._runtime_dir() / id
        endpoint = free_port() if backend.uses_tcp else Endpoint(path=folder / "e.sock")
        files = spec.bundle.paths + (spec.draft.paths if spec.draft else ())
        permissions = self._permissions and self._permissions | Permissions(reads=files)
        options = ProcessOptions(self._log_file(runner, spec), stop_grace=self._stop_grace, permissions=permissions)
        return LocalRunner(
            backend,
            spec,
            key,
            Launch(endpoint, options),
            id=id,
            folder=folder,
            stall_limit=self._stall_limit,
            wedge_limit=self._wedge_limit,
            clock=self._clock,
            other_port=free_port if backend.uses_tcp else None,
            on_devices=EngineOnDevices(self._on_devices),
        )

    def log(self, runner: Runner, lines: int | None, ending: asyncio.Event | None) -> AsyncIterator[bytes]:
        """See `Host`."""
        file = runner.log_file if isinstance(runner, LocalRunner) else Path(os.devnull)
        return read_log(file, ending, lines=lines)

    async def close(self) -> None:
        """See `Host`."""

    def _log_file(self, runner: RunnerId, spec: RunSpec) -> Path:
        """Returns a file for this runner and those that later have its key and number."""
        key, number = runner
        model = spec.model_id.rpartition(":")[2][:16]
        another = f"-{number}" if number else ""
        return self._logs / f"engine-{key.backend}-{model}-{key.mode}-{key.revision:x}{another}.log"
