"""An engine that is a set of Python packages in an environment of its own, for backends.

The packages are those of a lock with hashes, and pip fetches them as it is configured. Fetched wheels are kept beside
the engine's place in the cache until the installation is finished, so an interrupted installation continues where it
was.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

from pydantic import BaseModel, ConfigDict

from modelrunner.backend import (
    Backend,
    BackendContext,
    BackendState,
    BackendStatus,
    InstallProgress,
    ProgressCallback,
)
from modelrunner.errors import BackendUnavailable, BadRequest, ModelRunnerError
from modelrunner.processes.process import run, scrubbed_environment
from modelrunner.sandbox import Permissions
from modelrunner.sdk import enginecache, programs
from modelrunner.sdk.diagnosis import Cause, Diagnosis
from modelrunner.types import Launch, RunSpec

_REQUIREMENT = re.compile(r"^[a-z0-9][a-z0-9._-]*==", re.IGNORECASE | re.MULTILINE)
_PARTS = ".wheels"
_INSIDE = Path(__file__).with_name("inside")


@dataclass(frozen=True, slots=True)
class Torch:
    """The build of torch for processors. It is on an index of its own, whose files a lock cannot name, so its version
    is pinned and the index trusted. `index` is that index, None for pip's own ones; `table` is that of the
    configuration which names the index."""

    requirement: str
    index: str | None
    table: str


@dataclass(frozen=True, slots=True)
class Python:
    """An interpreter that makes environments. `identity` tells its builds apart."""

    program: Path
    version: tuple[int, int]
    identity: tuple[str, ...]


def find_python(configured: Path | None, engine: str) -> Python:
    """Returns the configured interpreter, or the one behind ours. Blocks. Raises `BackendUnavailable`, which names the
    `engine`."""
    program = configured.expanduser() if configured else programs.base_python()
    code = "import json, sys; print(json.dumps([sys.version_info[:2], sys.base_prefix, sys.version]))"
    try:
        done = subprocess.run([program, "-I", "-c", code], capture_output=True, text=True, timeout=30, check=True)
        version, prefix, full = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise BackendUnavailable(f"the Python at {program} cannot be used for {engine}: {error}") from None
    return Python(program, (version[0], version[1]), (prefix, full))


def interpreter(folder: Path) -> Path:
    """Returns the interpreter of the environment in `folder`."""
    return folder / "bin/python"


class Environment:
    """The making of one environment. `engine` is its name in messages, `lock` the file with its packages, `module` what
    must be importable in the end; `torch` is fetched before the lock's packages. The output of all steps goes to
    `log`."""

    def __init__(
        self,
        engine: str,
        python: Python,
        lock: Path,
        module: str,
        entry: Path,
        log: Path,
        progress: ProgressCallback,
        torch: Torch | None = None,
    ) -> None:
        self._engine, self._python, self._lock, self._module = engine, python, lock, module
        self._parts = entry.with_name(entry.name + _PARTS)
        self._log, self._progress, self._torch = log, progress, torch

    async def make(self, folder: Path) -> None:
        """Makes the environment in an empty folder. Raises `BackendUnavailable` with pip's reason."""
        program = interpreter(folder)
        self._progress(InstallProgress(f"making an environment for {self._engine}"))
        await programs.execute([self._python.program, "-m", "venv", "--without-pip", folder], log=self._log)
        self._parts.mkdir(exist_ok=True)
        await self._fetch_torch(program)
        total = len(_REQUIREMENT.findall(self._lock.read_text("utf-8")))
        await self._fetch(program, f"fetching {self._engine}", total, "--require-hashes", "-r", self._lock)
        wheels = sorted(self._parts.glob("*.whl"))
        self._progress(InstallProgress(f"installing {len(wheels)} packages; this takes a minute or two"))
        command = programs.pip("--python", program, "install", "--no-deps", "--no-index", "--progress-bar", "off")
        await programs.execute([*command, *wheels], log=self._log)
        self._progress(InstallProgress("trying the engine"))
        await programs.execute([program, "-I", "-c", f"import {self._module}"], log=self._log)
        await asyncio.to_thread(shutil.rmtree, self._parts)

    async def _fetch_torch(self, program: Path) -> None:
        if (torch := self._torch) is None:
            return
        index = ["--index-url", torch.index] if torch.index else []
        try:
            await self._fetch(program, f"fetching {torch.requirement}", 0, *index, torch.requirement)
        except programs.StepFailed as failed:
            if not any("No matching distribution found" in line for line in failed.lines):
                raise
            raise BackendUnavailable(
                f"{torch.requirement} was not found: it is on PyTorch's index of CPU builds, not on the package index; "
                f"name that index, or a copy of it, as `torch_index` in [{torch.table}] of the configuration"
            ) from None

    async def _fetch(self, program: Path, message: str, total: int, *words: str | Path) -> None:
        """Fetches wheels by `pip download` with these further words. `total` is their number, 0 if it is not shown.
        Raises `StepFailed`."""
        command = programs.pip(
            "--python", program, "download", "--no-deps", "--only-binary", ":all:", "--progress-bar", "off"
        )
        command += ["-d", self._parts, "--find-links", self._parts, *words]
        self._progress(InstallProgress(message))
        await programs.execute(command, log=self._log, on_line=self._teller(message, total))

    def _teller(self, message: str, total: int) -> Callable[[str], None]:
        """Returns an observer of pip's lines. pip prints one line for each requirement."""
        done = 0

        def tell(line: str) -> None:
            nonlocal done
            if line.startswith(("Collecting ", "Ignoring ", "Processing ")):
                done += 1
                if total:
                    self._progress(InstallProgress(message, min(done, total), total))

        return tell


class PackagesSettings(BaseModel):
    """The settings of a backend of packages: `python` makes the engine's environment. By default it is the interpreter
    behind the one that runs modelrunner."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: Path | None = None


class TorchSettings(PackagesSettings):
    """The settings of a backend with `torch`: `torch_index` is the index that has the CPU build of torch, PyTorch's
    index of CPU builds or a copy of it. By default pip's own configuration decides."""

    torch_index: str | None = None


def diagnosis(engine: str, kind: str, *causes: Cause, stages: Sequence[tuple[str, str]]) -> Diagnosis:
    """Returns the explanations of the log of the backend `engine`: an incomplete environment, too little memory for a
    `kind` of model, and these further causes."""
    return Diagnosis(
        [
            Cause(r"No module named '([^']*)'|error while loading shared libraries: (\S+?):",
                  f"its environment is incomplete ({{0}}): install it again with `modelrunner install {engine}`"),
            Cause(r"std::bad_alloc|MemoryError|Cannot allocate memory",
                  f"there is not enough memory for the {kind}: stop other models first", memory=True),
            *causes,
        ],
        stages,
    )  # fmt: skip


class PackagesBackend(Backend):
    """A backend whose engine is the packages of one lock, for every machine."""

    title: ClassVar[str]
    """The engine's name for people."""
    packages_version: ClassVar[str]
    """The version of the packages, of which a new one is installed anew and measured again."""
    lock: ClassVar[Path]
    torch: ClassVar[str] = ""
    """The requirement of torch (`torch==2.13.0`), whose build for processors is installed before the lock's packages;
    "" for none. It needs `TorchSettings`."""
    module: ClassVar[str]
    """What must be importable in the environment."""
    disk_needed: ClassVar[int]
    """Bytes during the installation: the environment, and the wheels that it is made of."""
    diagnosis: ClassVar[Diagnosis]
    """Explains the engine's log."""
    settings_model = PackagesSettings
    settings: PackagesSettings

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self._installing = enginecache.InstallState()

    @property
    def _link(self) -> Path:
        return self.context.engines / self.name

    async def install(self, progress: ProgressCallback, **options: Any) -> None:
        if options:
            raise BadRequest(f"{self.name} has no option {min(options)!r} for its installation")
        with self._installing.reported(self.title, progress) as tell:
            python = await asyncio.to_thread(find_python, self.settings.python, self.title)
            torch = self._wanted_torch()
            identity = (*python.identity, *((torch.requirement, torch.index or "") if torch else ()))
            key = enginecache.key(self.name, self.packages_version, *identity, self.lock.read_text("utf-8"))
            entry, log = self.context.cache / key, self.context.logs / f"install-{self.name}.log"
            work = Environment(self.title, python, self.lock, self.module, entry, log, tell, torch)

            async def make(folder: Path) -> dict[str, Any]:
                await work.make(folder)
                return {"version": self.packages_version}

            await enginecache.provide(self._link, entry, make, _is_usable, tell, needed=self.disk_needed)

    def _wanted_torch(self) -> Torch | None:
        if not self.torch:
            return None
        build = "+cpu" if sys.platform == "linux" else ""  # elsewhere it is the only build
        index = self.settings.torch_index if isinstance(self.settings, TorchSettings) else None
        return Torch(self.torch + build, index, f"backends.{self.name}")

    async def uninstall(self) -> None:
        """Removes the environment, unless another data directory uses it, and the leftovers of interrupted
        installations."""
        await enginecache.withdraw(self._link)
        await enginecache.discard_leftovers(self.context.cache, self.name)

    def status(self) -> BackendStatus:
        if self._installing.step:
            return BackendStatus(BackendState.INSTALLING, self._installing.step)
        if version := self.version():
            return BackendStatus(BackendState.RUNNING, f"{self.title} {version}")
        return BackendStatus(
            BackendState.NOT_INSTALLED, self._installing.failure or f"{self.title} was not installed yet"
        )

    def version(self) -> str:
        folder = self._link.resolve()
        return str((enginecache.read_marker(folder) or {}).get("version", "")) if _is_usable(folder) else ""

    async def disk_usage(self) -> int:
        folder = self._link.resolve()
        return await asyncio.to_thread(enginecache.disk_usage, [folder]) if folder.exists() else 0

    def progress(self, line: str) -> str | None:
        return self.diagnosis.stage(line)

    def explain(self, tail: str, quotes: bool) -> str | None:
        return self.diagnosis.explain(tail, quotes)

    def ran_out_of_memory(self, tail: str) -> bool:
        return self.diagnosis.ran_out_of_memory(tail)

    def request_error(self, status: int, message: str, fields: Mapping[str, Any]) -> ModelRunnerError | None:
        """Returns the error of a 400, with the name of the field or part that is at fault."""
        param = fields.get("param")
        return BadRequest(message, param=param if isinstance(param, str) else None) if status == 400 else None

    async def serve(
        self,
        program: Path,
        spec: RunSpec,
        launch: Launch,
        settings: Mapping[str, Any],
        variables: Mapping[str, str] = MappingProxyType({}),
        scratch: Path | None = None,
    ) -> NoReturn:
        """Runs `program`, a file of Python beside its own modules, in the environment, where it can import the server
        of inside/modelrunner_http.py, whose `settings()` are these, `socket` and `sequences`. The process begins in
        `scratch`, and may write there. Raises as `run` does, and `BackendUnavailable`."""
        environment = self.environment()
        values = {"socket": str(launch.endpoint.path), "sequences": spec.parallel, **settings}
        own = {"PYTHONNOUSERSITE": "1", "PYTHONPATH": str(_INSIDE), "MODELRUNNER_SETTINGS": json.dumps(values)}
        await run(
            [str(interpreter(environment)), str(program)],
            env=scrubbed_environment() | dict(variables) | dict(spec.environment) | own,
            options=launch.process,
            cwd=scratch,
            permissions=Permissions(reads=(environment, program.parent, _INSIDE), writes=(scratch,) if scratch else ()),
        )

    def environment(self) -> Path:
        """Returns the folder of the installed environment, without links: an update may change the link before a
        program starts. Raises `BackendUnavailable` if there is none."""
        folder = self._link.resolve()
        if not _is_usable(folder):
            raise BackendUnavailable(
                f"{self.title} is not installed here: install it with `modelrunner install {self.name}`"
            )
        return folder


def _is_usable(folder: Path) -> bool:
    return enginecache.read_marker(folder) is not None and os.access(interpreter(folder), os.X_OK)
