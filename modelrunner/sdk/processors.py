"""The processors that this process may use."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def allowed_processors(root: Path = Path("/")) -> int:
    """Returns the CPUs that affinity and the control groups leave to this process, at least one. A container's quota is
    known to its control group alone: an engine that counts for itself sees every processor of the machine."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([bound, *map(_quota, _cpu_groups(root))])


def _cpu_groups(root: Path) -> Iterator[Path]:
    """Yields the folders of the control groups that may limit this process's processor time, from its own up to the
    mounted one. In a container the path may not exist under the mount, which then is the container's own group (Linux:
    Documentation/admin-guide/cgroup-v2.rst and scheduler/sched-bwc.rst)."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = [root / "sys/fs/cgroup" / name for name in (("cpu", "cpu,cpuacct") if controllers else ("",))]
        for mount in filter(Path.is_dir, mounts):
            group = mount / path.lstrip("/")
            yield from (each for each in (group, *group.parents) if each.is_relative_to(mount))


def _quota(group: Path) -> int:
    """Returns the whole CPUs of a control group's quota, at least one; a large number without a quota."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
            quota, period = map(int, " ".join((group / name).read_text("ascii") for name in names).split())
            if quota > 0:
                return max(quota // period, 1)
    return sys.maxsize
