"""Which engine there is: an explicit llama-server, a managed native build, one on PATH, the managed wheel, or
llama-cpp-python."""

import functools
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from modelrunner import BackendContext, BackendUnavailable, ProgressCallback, enginecache
from modelrunner_llamacpp.settings import LlamaCppSettings


class Kind(StrEnum):
    NATIVE = "native"
    WHEEL = "wheel"
    PYTHON = "llama-cpp-python"


@dataclass(frozen=True, slots=True)
class Engine:
    """`program` is llama-server, or the interpreter that runs serve.py. `devices` is False where it can use no GPU,
    None where nobody knows. `folder` is a managed engine's entry in the cache."""

    kind: Kind
    program: Path
    version: str
    devices: bool | None = None
    folder: Path | None = None

    def __str__(self) -> str:
        return f"llama.cpp {self.version} ({self.kind})"

    def marker(self) -> dict[str, Any]:
        return {"kind": self.kind, "version": self.version, "devices": self.devices}


def link(context: BackendContext, kind: Kind) -> Path:
    """Where this data directory says that it uses a managed engine of that kind."""
    return context.engines / ("llama.cpp" if kind is Kind.WHEEL else f"llama.cpp-{kind}")


async def provide(
    context: BackendContext, kind: Kind, key: str, make: Callable[[Path], Awaitable[Engine]], progress: ProgressCallback
) -> None:
    """Links this data directory to the managed engine `key` of the cache, made by `make` if it is not there."""

    async def made(folder: Path) -> dict[str, Any]:
        return (await make(folder)).marker()

    def works(entry: Path) -> bool:
        return usable(entry, kind) is not None

    await enginecache.provide(link(context, kind), context.cache / key, made, works, progress)


def find(context: BackendContext, settings: LlamaCppSettings) -> Engine | None:
    """The first that is there, None if none is. Raises `BackendUnavailable` if an engine that the configuration names
    cannot be used: a typing error must not silently choose another."""
    if settings.llama_server is not None:
        return _explicit(settings.llama_server)
    if (managed := _managed(context, Kind.NATIVE)) is not None:
        return managed
    if (on_path := shutil.which("llama-server")) is not None:
        return _native(on_path)
    return _managed(context, Kind.WHEEL) or _python(settings)


def _explicit(path: Path) -> Engine:
    program = shutil.which(path.expanduser())
    if program is None:
        raise BackendUnavailable(f"llama_server is set to {path}, which is not a program: correct it or leave it out")
    return _native(program)


def _managed(context: BackendContext, kind: Kind) -> Engine | None:
    return usable(link(context, kind), kind)


def usable(folder: Path, kind: Kind) -> Engine | None:
    """The finished engine in `folder`, None for anything else: an interpreter that it needs may be gone by now."""
    folder = folder.resolve()  # an update may point the link elsewhere between now and the start of the program
    marker = enginecache.read_marker(folder)
    program = folder / ("bin/python" if kind is Kind.WHEEL else "bin/llama-server")
    if marker is None or marker.get("kind") != kind or not os.access(program, os.X_OK):
        return None
    return Engine(kind, program, str(marker.get("version")), marker.get("devices"), folder)


def _python(settings: LlamaCppSettings) -> Engine | None:
    if settings.python is not None:
        program = shutil.which(settings.python.expanduser())
        if program is None:
            raise BackendUnavailable(f"python is set to {settings.python}, which is not a program: correct it")
        return Engine(Kind.PYTHON, Path(program), _python_version(program, _stamp(program)))
    if all(importlib.util.find_spec(name) for name in ("llama_cpp", "uvicorn", "fastapi")):
        return Engine(Kind.PYTHON, Path(sys.executable), importlib.metadata.version("llama-cpp-python"))
    return None


def _stamp(program: str) -> int:
    return os.stat(program).st_mtime_ns


def _native(program: str) -> Engine:
    version, devices = _about(program, _stamp(program))
    return Engine(Kind.NATIVE, Path(program), version, devices)


@functools.lru_cache(maxsize=8)
def _about(program: str, _stamp: int) -> tuple[str, bool | None]:
    """From `llama-server --version` ("version: b6123 (build ...)") and `--list-devices`, asked once for each file
    (about 10 ms each)."""
    said = (line for line in _ask(program, "--version").splitlines() if line.startswith("version:"))
    version = next(said, "version: of unknown version").removeprefix("version:").split("(")[0].strip()
    return version, False if "(none)" in _ask(program, "--list-devices") else None


@functools.lru_cache(maxsize=8)
def _python_version(program: str, _stamp: int) -> str:
    code = "import importlib.metadata as m; print(m.version('llama-cpp-python'))"
    version = _ask(program, "-I", "-c", code).strip()
    if not version:
        raise BackendUnavailable(f"{program} has no llama-cpp-python: install llama-cpp-python[server] in it")
    return version.splitlines()[-1]


def _ask(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""
