"""How many CPUs this process may use."""

import os
from pathlib import Path

import psutil


def limited_threads(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """CPUs that affinity and the container leave to us, where they are fewer than the machine's physical cores; None
    where they are not: llama.cpp's own choice then is best (physical cores, only the fast ones of a hybrid CPU), but it
    does not see a container's quota."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    allowed = min(allowed, _quota(cpu_max) or allowed)
    return allowed if allowed < physical else None


def _quota(file: Path) -> int | None:
    """Whole CPUs of cgroup v2's quota, at least one; None without a quota."""
    try:
        quota, period = file.read_text("ascii").split()
        return max(int(quota) // int(period), 1)
    except (OSError, ValueError):  # no such file, or "max": no limit
        return None
