"""A backend as a third party would write it: public names only, an engine on TCP, a setting of its own."""

import sys
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from modelrunner.backend import Backend, BackendState, BackendStatus, ProgressCallback
from modelrunner.errors import BackendUnavailable
from modelrunner.processes import process
from modelrunner.sandbox import Permissions
from modelrunner.types import Launch, ModelFormat, RequiredMemory, RunSpec


class FakeSettings(BaseModel):
    """`[backends.fake]`: the script that is the engine."""

    engine: Path


class FakeBackend(Backend):
    name = "fake"
    formats = frozenset({ModelFormat.GGUF})
    uses_tcp = True
    settings_model = FakeSettings
    settings: FakeSettings

    def priority(self, bundle: Any) -> float:
        return -1.0

    async def install(self, progress: ProgressCallback, **options: Any) -> None:
        if not self.settings.engine.exists():
            raise BackendUnavailable(f"{self.settings.engine} is missing: set engine in [backends.fake]")

    async def uninstall(self) -> None:
        raise BackendUnavailable(f"{self.settings.engine} was there before this backend: remove it by hand")

    async def run(self, spec: RunSpec, launch: Launch) -> NoReturn:
        where = launch.endpoint
        argv = [sys.executable, str(self.settings.engine), "--host", str(where.host), "--port", str(where.port)]
        env = process.scrubbed_environment() | dict(spec.environment)
        permissions = Permissions(reads=(self.settings.engine,))
        await process.run(argv, env=env, options=launch.process, permissions=permissions)

    def status(self) -> BackendStatus:
        found = self.settings.engine.exists()
        return BackendStatus(BackendState.RUNNING, "fake 1.0") if found else BackendStatus(BackendState.NOT_INSTALLED)

    async def disk_usage(self) -> int:
        return self.settings.engine.stat().st_size

    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        return RequiredMemory(ram=spec.bundle.size + 1024 * spec.context_size)
