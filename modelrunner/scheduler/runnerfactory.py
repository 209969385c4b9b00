"""Makes runners and measures their memory."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from modelrunner.engine.readiness import free_port
from modelrunner.engine.runner import Runner
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.processes.processtree import process_tree
from modelrunner.scheduler.devices import devices, held_by
from modelrunner.types import Endpoint, RequiredMemory, RunnerKey, RunSpec

MakeRunner = Callable[[RunnerKey, RunSpec], Runner]
Measure = Callable[[Runner], Awaitable[RequiredMemory | None]]


class RunnerFactory:
    """Makes runners, each with a folder of its own in the one that `runtime_dir` makes and returns: on a Unix socket
    there, or on a free port of 127.0.0.1 for a backend that needs TCP (the runner checks that the listener is its
    own)."""

    def __init__(
        self,
        registry: BackendRegistry,
        runtime_dir: Callable[[], Path],
        *,
        stall_limit: float = 300.0,
        wedge_limit: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._runtime_dir = runtime_dir
        self._stall_limit = stall_limit
        self._wedge_limit = wedge_limit
        self._clock = clock

    def __call__(self, key: RunnerKey, spec: RunSpec) -> Runner:
        """Raises `BackendNotFound`, `BackendUnavailable`, `ConfigurationError` where the folder of sockets cannot be
        made, or `OSError` where no port can be had."""
        backend = self._registry.get(key.backend)
        id = secrets.token_hex(4)
        folder = self._runtime_dir() / id
        endpoint = free_port() if backend.uses_tcp else Endpoint(path=folder / "e.sock")
        return Runner(
            backend,
            spec,
            key,
            id=id,
            endpoint=endpoint,
            folder=folder,
            stall_limit=self._stall_limit,
            wedge_limit=self._wedge_limit,
            clock=self._clock,
            other_port=free_port if backend.uses_tcp else None,
        )


async def measure(runner: Runner) -> RequiredMemory | None:
    """The memory that the runner holds, None if it cannot be measured. Runs in a thread: the kernel walks all pages of
    the processes, and drivers are slow."""
    return await asyncio.to_thread(_measured, runner)


def _measured(runner: Runner) -> RequiredMemory | None:
    """Adds the figures of devices if their drivers tell them."""
    pid, memory = runner.pid, runner.measured_memory()
    if pid is None or memory is None:
        return None
    try:
        return replace(memory, vram=held_by(devices(), (process.pid for process in process_tree(pid))))
    except (OSError, ValueError):  # the probe logs it
        return memory
