"""A backend without code, for an engine that is a program: a subclass sets values."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from modelrunner.backend import Backend, BackendState, BackendStatus, ProgressCallback
from modelrunner.engineapi import EngineApi
from modelrunner.errors import BackendUnavailable
from modelrunner.processes.process import run, scrubbed_environment
from modelrunner.sandbox import Permissions
from modelrunner.types import Endpoint, RequiredMemory, RunSpec


class CommandBackend(Backend):
    """Runs `command` for each model."""

    command: ClassVar[tuple[str, ...]]
    """The program and its arguments. These are replaced in each: `{host}` and `{port}` with `uses_tcp`, else
    `{socket}`; `{model}`, the file that engines open; `{folder}`, which holds all files of the model; `{context}` and
    `{parallel}`, the tokens of one sequence and the number of sequences."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Variables that are added to a scrubbed environment."""
    engine_api: ClassVar[EngineApi | None] = None
    """The engine's HTTP interface; None for OpenAI's."""
    memory_factor: ClassVar[float] = 1.2
    """The main memory of a run as a multiple of its model's size. The first load measures it."""
    memory_base: ClassVar[int] = 64 << 20
    """Bytes of a run beside that."""
    permissions: ClassVar[Permissions] = Permissions()
    """What the engine may do beyond reading its model (docs/sandbox.md)."""

    async def install(self, progress: ProgressCallback, **options: Any) -> None:
        self._program()

    async def uninstall(self) -> None:
        raise BackendUnavailable(f"{self._program()} was not installed by modelrunner: remove it where it came from")

    async def run(self, spec: RunSpec, endpoint: Endpoint) -> NoReturn:
        places = {
            "{host}": str(endpoint.host),
            "{port}": str(endpoint.port),
            "{socket}": str(endpoint.path),
            "{model}": str(spec.bundle.model_file),
            "{folder}": str(spec.bundle.directory),
            "{context}": str(spec.context_size),
            "{parallel}": str(spec.parallel),
        }
        argv = [str(self._program()), *(_filled(argument, places) for argument in self.command[1:])]
        env = scrubbed_environment() | dict(self.environment) | dict(spec.environment)
        await run(argv, env=env, options=spec.process, permissions=self.permissions)

    def status(self) -> BackendStatus:
        try:
            return BackendStatus(BackendState.RUNNING, f"{self.name} at {self._program()}")
        except BackendUnavailable as error:
            return BackendStatus(BackendState.NOT_INSTALLED, error.message)

    async def disk_usage(self) -> int:
        return os.stat(self._program()).st_size

    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        return RequiredMemory(int(spec.bundle.size * self.memory_factor) + self.memory_base)

    def api(self, spec: RunSpec) -> EngineApi:
        return super().api(spec) if self.engine_api is None else self.engine_api

    def _program(self) -> Path:
        if (found := shutil.which(self.command[0])) is None:
            raise BackendUnavailable(f"{self.command[0]} is not a program here: install it, or correct its path")
        return Path(found)


def _filled(argument: str, places: Mapping[str, str]) -> str:
    for place, value in places.items():
        argument = argument.replace(place, value)
    return argument
