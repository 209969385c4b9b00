"""A card of this machine: the engine that is installed for it, and what is said where the engine leaves it idle."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from modelrunner.backend import BackendContext, InstallProgress
from modelrunner.types import EngineDevice
from modelrunner_llamacpp import LlamaCppBackend, cards
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
def test_an_idle_card_is_said_with_the_remedy(tmp_path: Path) -> None:
    backend = LlamaCppBackend(BackendContext(tmp_path / "engines", tmp_path / "cache", tmp_path / "logs", {}))
    installed = link(backend.context, EngineKind.WHEEL)
    (installed / "bin").mkdir(parents=True)
    (installed / "bin/python").touch(mode=0o700)
    marker = {"kind": "wheel", "version": "1.0", "devices": False}
    (installed / "engine.json").write_text(json.dumps(marker))
    text = str(backend.status())
    assert text.startswith("Running: llama.cpp 1.0 (wheel); the NVIDIA card of this machine is idle")
    assert "install NVIDIA's CUDA toolkit (it has nvcc), then `modelrunner install llama.cpp --build`" in text
    (installed / "engine.json").write_text(json.dumps({**marker, "devices": True}))
    assert str(backend.status()) == "Running: llama.cpp 1.0 (wheel)"


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
