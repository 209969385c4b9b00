"""Threads follow what the container allows, and are llama.cpp's choice where nothing limits."""

import os
from pathlib import Path

import psutil
import pytest

from modelrunner.sdk.processors import allowed_processors
from modelrunner_llamacpp.engines import limited_threads, thread_counts


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two threads each."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def lay(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, content in {"proc/self/cgroup": groups, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n")
    return root


@pytest.mark.parametrize(("quota", "threads"), [("max 100000", None), ("300000 100000", 3), ("50000 100000", 1)])
def test_quota(quota: str, threads: int | None, tmp_path: Path) -> None:
    root = lay(tmp_path, "0::/", {"sys/fs/cgroup/cpu.max": quota})
    assert (limited_threads(root), allowed_processors(root)) == (threads, threads or 16)


def test_the_tightest_of_nested_groups_counts(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "200000 100000"}
    assert limited_threads(lay(tmp_path, "0::/a/b", files)) == 2
    lay(tmp_path, "0::/a/b", {"sys/fs/cgroup/a/b/cpu.max": "100000 100000"})
    assert limited_threads(tmp_path) == 1


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "threads"), [("-1", None), ("250000", 2)])
def test_version_1(mount: str, quota: str, threads: int | None, tmp_path: Path) -> None:
    folder = f"sys/fs/cgroup/{mount}/docker/0123"
    files = {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"}
    groups = "5:memory:/elsewhere\n4:cpu,cpuacct:/docker/0123\n0::/"
    assert limited_threads(lay(tmp_path, groups, files)) == threads


def test_a_containers_path_that_is_not_mounted_is_its_own_group(tmp_path: Path) -> None:
    assert limited_threads(lay(tmp_path, "0::/docker/0123", {"sys/fs/cgroup/cpu.max": "400000 100000"})) == 4


def test_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert limited_threads(tmp_path / "no such folder") == 2


def test_other_numbers_of_threads_are_tried() -> None:
    """All processors that this process may use, and half of them, without the number that it has."""
    allowed = allowed_processors()
    assert set(thread_counts(allowed)) <= {allowed // 2}
    assert thread_counts(1000) == [count for count in (allowed, allowed // 2) if count]
