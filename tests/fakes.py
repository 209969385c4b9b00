"""Doubles that tests share: a backend that runs tests/fake_engine.py as a real process, models for it, and a clock that
moves only by `advance`."""

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from pydantic import BaseModel, ConfigDict, Field

from modelrunner.backend import (
    Backend,
    BackendContext,
    BackendState,
    BackendStatus,
    InstallProgress,
    ProgressCallback,
    check_context,
)
from modelrunner.config.enginetables import EngineTable
from modelrunner.daemon.engines import configured
from modelrunner.engineapi import MESSAGES_ENDPOINTS, OPENAI_ENDPOINTS, EndpointApi, EngineApi
from modelrunner.errors import BackendExited, BadRequest
from modelrunner.processes import process
from modelrunner.sandbox import Permissions, Sandbox
from modelrunner.types import (
    Bundle,
    Endpoint,
    Launch,
    Mode,
    ModelFormat,
    ModelHeader,
    ProcessOptions,
    QuantizeSpec,
    RequiredMemory,
    RunnerKey,
    RunSpec,
)
from tests.waiting import HUNG

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
FAKE_QUANTIZE = Path(__file__).with_name("fake_quantize.py")
KNOBS = frozenset(re.findall(r'"(--[a-z-]+)"', FAKE_ENGINE.read_text()))


class FakeSettings(BaseModel):
    """The backend's table in the configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threads: int = Field(default=1, ge=1)


class FakeOptions(BaseModel):
    """The backend's table in a model's configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    budget: int = Field(default=0, ge=0)


class FakeBackend(Backend):
    """`knobs` are arguments of tests/fake_engine.py for every later run; a spec's `flags` are added to them. `memory`
    is the figure that it reports for a model. `runs` counts its processes; `loaded_for` and `used_by` are the owners
    that it was told when one was ready and when one was to end."""

    name = "fake"
    formats = frozenset({ModelFormat.GGUF})
    modes = frozenset(Mode)
    endpoints: Mapping[str, EndpointApi] = {**OPENAI_ENDPOINTS, **MESSAGES_ENDPOINTS}
    settings_model = FakeSettings
    options_model = FakeOptions
    permissions = Permissions(
        reads=(FAKE_ENGINE,), writes=(Path(tempfile.gettempdir()),), processes="its knobs start processes"
    )
    executable: Sequence[str] = (sys.executable, "-I", "-S", str(FAKE_ENGINE))

    def __init__(self, folder: Path, knobs: Sequence[str] = (), *, memory: RequiredMemory | None = None) -> None:
        super().__init__(BackendContext(engines=folder, cache=folder, logs=folder, settings={}))
        self.knobs = tuple(knobs)
        self.memory = memory or RequiredMemory(64 << 20)
        self.state = BackendStatus(BackendState.RUNNING, "fake 1.0")
        self.runs = 0
        self.loaded_for: list[str | None] = []
        self.used_by: list[str | None] = []

    async def install(self, progress: ProgressCallback, **options: Any) -> None:
        self.state = BackendStatus(BackendState.RUNNING, "fake 1.0")

    async def uninstall(self) -> None:
        self.state = BackendStatus(BackendState.NOT_INSTALLED, "binary not found")

    async def run(self, spec: RunSpec, launch: Launch) -> NoReturn:
        self.runs += 1
        endpoint = launch.endpoint
        where = ["--socket", str(endpoint.path)] if endpoint.path else []
        where += ["--host", str(endpoint.host), "--port", str(endpoint.port)] if endpoint.port else []
        argv = [*self.executable, *where, "--model", spec.model_id, *self.knobs, *spec.flags]
        env = process.scrubbed_environment() | dict(spec.environment)
        await process.run(argv, env=env, options=launch.process, permissions=self.permissions)

    def api(self, spec: RunSpec) -> EngineApi:
        return replace(super().api(spec), endpoints=self.endpoints)

    async def after_ready(self, spec: RunSpec, endpoint: Endpoint, owner: str | None) -> None:
        self.loaded_for.append(owner)

    async def before_stop(self, spec: RunSpec, endpoint: Endpoint, owner: str | None) -> None:
        self.used_by.append(owner)

    async def forget(self, model_id: str) -> None:
        return

    async def quantize(self, spec: QuantizeSpec, progress: ProgressCallback) -> None:
        """A child copies the model and changes its last byte. With the type Q2_K it hangs in the middle, with Q3_K_S it
        fails."""
        if spec.type not in ("Q2_K", "Q3_K_S", "Q4_0"):
            raise BadRequest(f"{spec.type} is no type here", param="type")

        class Observer:
            def started(self, pid: int, sandbox: Sandbox) -> None: ...

            def output(self, line: str) -> None:
                progress(InstallProgress(line, 1, 2))

        argv = [
            sys.executable,
            "-I",
            "-S",
            str(FAKE_QUANTIZE),
            str(spec.bundle.model_file),
            str(spec.target),
            spec.type,
        ]
        options = replace(spec.process, observer=Observer())
        own = Permissions(reads=(FAKE_QUANTIZE,))
        try:
            await process.run(argv, env=process.scrubbed_environment(), options=options, permissions=own)
        except BackendExited as ended:
            if ended.returncode != 0:
                raise

    def status(self) -> BackendStatus:
        return self.state

    async def disk_usage(self) -> int:
        return FAKE_ENGINE.stat().st_size

    async def required_memory(self, spec: RunSpec) -> RequiredMemory:
        return self.memory

    def version(self) -> str:
        return "1.0"

    def check_flags(self, flags: tuple[str, ...], mode: Mode) -> None:
        """Every knob of the engine is allowed."""
        for flag in flags[:1] + tuple(flag for flag in flags if flag.startswith("--")):
            if flag.partition("=")[0] not in KNOBS:
                raise BadRequest(f"{flag} is no knob of the fake engine", param="runtime-flags")

    def fold_flags(self, flags: tuple[str, ...]) -> tuple[dict[str, int | None], tuple[str, ...]]:
        """`--ctx-size N` sets the field, as llama.cpp's flag does."""
        if "--ctx-size" not in flags:
            return {}, flags
        at = flags.index("--ctx-size")
        return {"context_size": int(flags[at + 1])}, flags[:at] + flags[at + 2 :]

    def check(self, spec: RunSpec) -> None:
        """It takes any draft model."""
        check_context(spec)

    def explain(self, tail: str, quotes: bool) -> str | None:
        return "the fake engine threw up" if "fake::error" in tail else None

    def ran_out_of_memory(self, tail: str) -> bool:
        return False

    def progress(self, line: str) -> str | None:
        return line if line.startswith("loading") else None


class FakeTcpBackend(FakeBackend):
    name = "fake-tcp"
    uses_tcp = True


BY_TABLE = os.environ.get("FAKE_ENGINE_BY") == "table"
"""True if the fake engine has no code of its own here: it is described by a table, as in the configuration file."""
if BY_TABLE and not TYPE_CHECKING:

    def _table(name: str, *where: str) -> type[Backend]:
        """Returns what the daemon makes of the table `[engines.NAME]` of the fake engine, which listens `where`."""
        table = {
            "command": [*_CodeBackend.executable, *where, "--model", "{name}"],
            "endpoints": {path: api.shape for path, api in _CodeBackend.endpoints.items()},
            "modes": list(Mode),
            "memory": "64MiB",
            "metrics": "/metrics",
            "permissions": {"processes": "its knobs start processes", "writes": [tempfile.gettempdir()]},
        }
        return configured(name, EngineTable.model_validate(table))

    _CodeBackend = FakeBackend

    class _Turned:
        """Has the part of `FakeBackend` that turns the engine's knobs, which are the last words of the command, and
        the stages of a start, for which tests wait."""

        executable = _CodeBackend.executable
        progress = _CodeBackend.progress

        def __init__(self, folder: Path, knobs: Sequence[str] = (), *, memory: RequiredMemory | None = None) -> None:
            places = {"engines": folder, "cache": folder, "logs": folder, "state": folder / "state"}
            super().__init__(BackendContext(**places, settings={}))
            self.knobs, self.runs = tuple(knobs), 0
            if memory is not None:
                self.memory = memory

        async def run(self, spec: RunSpec, launch: Launch) -> NoReturn:
            self.runs += 1
            written = type(self).command[len(_Turned.executable) :]
            self.command = (*self.executable, *written, *self.knobs, *spec.flags)
            await super().run(spec, launch)

        @property
        def memory(self) -> RequiredMemory:
            return RequiredMemory(self.memory_base)

        @memory.setter
        def memory(self, figure: RequiredMemory) -> None:
            self.memory_base = figure.ram

    class FakeBackend(_Turned, _table("fake", "--socket", "{socket}")):
        pass

    class FakeTcpBackend(_Turned, _table("fake-tcp", "--host", "{host}", "--port", "{port}")):
        pass


def of_code(reason: str) -> pytest.MarkDecorator:
    """Marks a test of what an engine has by the code of its backend alone."""
    return pytest.mark.skipif(BY_TABLE, reason=f"of backends with code: {reason}")


class FakeClock:
    """A clock that moves only by `advance`, in seconds."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def fake_bundle(folder: Path, name: str = "fake") -> Bundle:
    """A model of one small file. The ID follows from the name."""
    file = folder / f"{name}.gguf"
    file.write_bytes(b"GGUF")
    header = ModelHeader({"general.architecture": "fake"}, ())
    return Bundle(
        model_id="sha256:" + name.encode().hex().ljust(64, "0")[:64],
        references=(f"docker.io/ai/{name}:latest",),
        format=ModelFormat.GGUF,
        directory=folder,
        files={"model.gguf": file},
        header=header,
        size=4,
        context_length=4096,
        capabilities=frozenset({"completion"}),
    )


def fake_spec(folder: Path, *flags: str, name: str = "fake") -> RunSpec:
    bundle = fake_bundle(folder, name)
    return RunSpec(bundle.model_id, bundle, Mode.COMPLETION, 512, 1, flags)


def fake_launch(folder: Path, endpoint: Endpoint | None = None, stop_grace: float = 2.0) -> Launch:
    """On a socket in `folder`, with the log in a folder beside it."""
    options = ProcessOptions(folder.parent / "logs" / "fake.log", stop_grace=stop_grace)
    return Launch(endpoint or Endpoint(path=folder / "r.sock"), options)


def fake_key(spec: RunSpec, backend: Backend) -> RunnerKey:
    return RunnerKey(backend.name, spec.model_id, spec.mode)


class Observer:
    """Keeps the output of a process, and lets a test wait for a line."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.sandbox: Sandbox | None = None
        self.lines: list[str] = []
        self._waiting: list[tuple[re.Pattern[str], asyncio.Future[re.Match[str]]]] = []

    def started(self, pid: int, sandbox: Sandbox) -> None:
        self.pid, self.sandbox = pid, sandbox

    def output(self, line: str) -> None:
        self.lines.append(line)
        for pattern, found in self._waiting:
            if (match := pattern.search(line)) and not found.done():
                found.set_result(match)

    async def line(self, pattern: str) -> re.Match[str]:
        """Returns the first line, past or future, that matches `pattern`."""
        for line in self.lines:
            if match := re.search(pattern, line):
                return match
        found: asyncio.Future[re.Match[str]] = asyncio.get_running_loop().create_future()
        self._waiting.append((re.compile(pattern), found))
        async with asyncio.timeout(HUNG):
            return await found
