"""Threads follow what the container allows, and are llama.cpp's choice where nothing limits."""

import os
from pathlib import Path

import psutil
import pytest

from modelrunner_llamacpp.engines import limited_threads


@pytest.mark.parametrize(("quota", "threads"), [("max 100000", None), ("300000 100000", 3), ("50000 100000", 1)])
def test_quota(quota: str, threads: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    file = tmp_path / "cpu.max"
    file.write_text(quota + "\n")
    assert limited_threads(file) == threads


def test_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert limited_threads(tmp_path / "no such file") == 2
