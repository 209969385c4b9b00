"""Which build suits a machine, and why none does."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from modelrunner.backend import BackendContext
from modelrunner.errors import BackendUnavailable
from modelrunner.types import EngineDevice
from modelrunner_vllm import VllmBackend
from modelrunner_vllm.engines import TORCH_CPU, VERSION, EngineKind
from modelrunner_vllm.machine import CPU, CUDA, Build, Machine, has_cuda

LINUX = Machine("Linux", "x86_64", ("glibc", (2, 36)), (3, 12), cuda=False)


def test_the_build_goes_by_the_machine() -> None:
    assert LINUX.build() is CPU
    assert replace(LINUX, architecture="aarch64").build() is CPU
    assert replace(LINUX, cuda=True).build() is CUDA
    assert replace(LINUX, cuda=True).build(EngineKind.CPU) is CPU


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (replace(LINUX, system="Darwin", architecture="arm64", libc=("", ())), "Linux only, not on Darwin"),
        (replace(LINUX, system="Windows", libc=("", ())), "not on Windows"),
        (replace(LINUX, libc=("glibc", (2, 17))), r"glibc 2\.28 or later, and this system has 2\.17"),
        (replace(LINUX, libc=("", ())), "musl"),
        (replace(LINUX, python=(3, 15)), r"Python 3\.11 to 3\.14, not 3\.15"),
        (replace(LINUX, architecture="riscv64"), "riscv64"),
    ],
)
def test_why_there_is_none(machine: Machine, said: str) -> None:
    with pytest.raises(BackendUnavailable, match=said):
        machine.build()


def test_cuda_that_is_asked_for_and_not_there() -> None:
    with pytest.raises(BackendUnavailable, match="no NVIDIA driver"):
        LINUX.build(EngineKind.CUDA)


def test_a_driver_is_more_than_a_device_file(tmp_path: Path) -> None:
    assert not has_cuda(tmp_path)
    for name in ("dev/nvidiactl", "proc/driver/nvidia/version"):
        assert not has_cuda(tmp_path)
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert has_cuda(tmp_path)


@pytest.mark.parametrize("build", [CPU, CUDA], ids=lambda build: build.kind)
def test_the_locks_are_of_these_versions(build: Build) -> None:
    lock = build.lock.read_text()
    assert f"\n{build.package}=={VERSION} \\\n    --hash=sha256:" in lock
    assert "\nray==2." in lock
    assert "://" not in lock  # no index of anybody's


def test_the_cpu_build_leaves_out_what_breaks_it() -> None:
    """They are there as CUDA builds only."""
    found = [line for line in CPU.lock.read_text().splitlines() if line.startswith("torch") and "==" in line]
    assert found
    assert all("sys_platform == 'none'" in line for line in found)
    assert CPU.torch == f"torch=={TORCH_CPU}"


def test_the_devices_are_those_of_the_engines_torch(tmp_path: Path) -> None:
    program = tmp_path / "engines/vllm/bin/python"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho a warning >&2\necho \'[["cuda:0", "NVIDIA A30", 24, 24, "ab-cd"]]\'\n')
    program.chmod(0o755)
    backend = VllmBackend(BackendContext(tmp_path / "engines", tmp_path, tmp_path, {}))
    for build, before in (("cpu", ()), ("cuda", None)):
        settings = {"build": build}
        assert VllmBackend(BackendContext(tmp_path / "engines", tmp_path, tmp_path, settings)).devices() == before
    for kind, expected in (("cpu", ()), ("cuda", (EngineDevice("cuda:0", "NVIDIA A30", 24, 24, "ab-cd"),))):
        (tmp_path / "engines/vllm/engine.json").write_text(json.dumps({"kind": kind, "version": "1"}))
        assert backend.devices() == expected
