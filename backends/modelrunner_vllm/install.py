"""Installs vLLM in an environment of its own. Fetched wheels are kept beside the engine's place in the cache until the
installation is finished, so an interrupted installation continues where it was."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelrunner.sdk import BackendContext, BackendUnavailable, InstallProgress, ProgressCallback, enginecache, programs
from modelrunner_vllm.engines import VERSION, Engine, link, usable
from modelrunner_vllm.machine import Build, Machine
from modelrunner_vllm.settings import VllmSettings

_REQUIREMENT = re.compile(r"^[a-z0-9][a-z0-9._-]*==", re.IGNORECASE | re.MULTILINE)
_MODULE = "vllm.entrypoints.launchers.api_server.entry"
_PARTS = ".wheels"


async def install(context: BackendContext, settings: VllmSettings, progress: ProgressCallback) -> None:
    """Installs vLLM. Raises `BackendUnavailable` with the machine's shortcoming or with pip's reason, and
    `InsufficientDisk`."""
    python = await asyncio.to_thread(find_python, settings)
    build = Machine.here(python.version).build(settings.build)
    options = (*python.identity, settings.torch_index or "", build.lock.read_text("utf-8"))
    entry = context.cache / enginecache.key(f"vllm-{build.kind}", VERSION, *options)
    work = _Installation(build, python, settings, entry, context.logs / "install-vllm.log", progress)

    def works(folder: Path) -> bool:
        return usable(folder) is not None

    await enginecache.provide(link(context), entry, work.make, works, progress, needed=build.needed)


class Python:
    """An interpreter that makes environments. `identity` tells its builds apart."""

    def __init__(self, program: Path, version: tuple[int, int], identity: tuple[str, ...]) -> None:
        self.program = program
        self.version = version
        self.identity = identity


def find_python(settings: VllmSettings) -> Python:
    """Returns the configured interpreter, or the one behind ours. Raises `BackendUnavailable`."""
    program = settings.python.expanduser() if settings.python else programs.base_python()
    code = "import json, sys; print(json.dumps([sys.version_info[:2], sys.base_prefix, sys.version]))"
    try:
        done = subprocess.run([program, "-I", "-c", code], capture_output=True, text=True, timeout=30, check=True)
        version, prefix, full = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise BackendUnavailable(f"the Python at {program} cannot be used for vLLM: {error}") from None
    return Python(program, (version[0], version[1]), (prefix, full))


class _Installation:
    def __init__(
        self,
        build: Build,
        python: Python,
        settings: VllmSettings,
        entry: Path,
        log: Path,
        progress: ProgressCallback,
    ) -> None:
        self._build = build
        self._python = python
        self._settings = settings
        self._parts = entry.with_name(entry.name + _PARTS)
        self._log = log
        self._progress = progress

    async def make(self, folder: Path) -> dict[str, Any]:
        self._progress(InstallProgress("making an environment for vLLM"))
        await programs.execute([self._python.program, "-m", "venv", "--without-pip", folder], log=self._log)
        program = folder / "bin/python"
        self._parts.mkdir(exist_ok=True)
        if self._build.torch:
            await self._fetch_torch(program, self._build.torch)
        await self._fetch_rest(program)
        await self._install(program)
        self._progress(InstallProgress("trying the engine"))
        await programs.execute([program, "-I", "-c", f"import {_MODULE}"], log=self._log)
        await asyncio.to_thread(shutil.rmtree, self._parts)
        return Engine(self._build.kind, program, VERSION).marker()

    async def _fetch_torch(self, program: Path, torch: str) -> None:
        index = ["--index-url", self._settings.torch_index] if self._settings.torch_index else []
        try:
            await self._fetch(program, f"fetching {torch}", 0, *index, torch)
        except programs.StepFailed as failed:
            if not any("No matching distribution found" in line for line in failed.lines):
                raise
            raise BackendUnavailable(
                f"{torch} was not found: it is on PyTorch's index of CPU builds, not on the package index; name "
                "that index, or a copy of it, as `torch_index` in [backends.vllm] of the configuration"
            ) from None

    async def _fetch_rest(self, program: Path) -> None:
        lock = self._build.lock
        total = len(_REQUIREMENT.findall(lock.read_text("utf-8")))
        message = f"fetching {self._build.package} {VERSION}"
        await self._fetch(program, message, total, "--require-hashes", "-r", lock)

    async def _fetch(self, program: Path, message: str, total: int, *words: str | Path) -> None:
        command = programs.pip(
            "--python", program, "download", "--no-deps", "--only-binary", ":all:", "--progress-bar", "off"
        )
        command += ["-d", self._parts, "--find-links", self._parts, *words]
        self._progress(InstallProgress(message))
        await programs.execute(command, log=self._log, on_line=self._teller(message, total))

    async def _install(self, program: Path) -> None:
        wheels = sorted(self._parts.glob("*.whl"))
        self._progress(InstallProgress(f"installing {len(wheels)} packages; this takes a minute or two"))
        command = programs.pip("--python", program, "install", "--no-deps", "--no-index", "--progress-bar", "off")
        await programs.execute([*command, *wheels], log=self._log)

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
