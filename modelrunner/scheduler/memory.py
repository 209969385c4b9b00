"""How much memory the runners may use together."""

from collections.abc import Callable, Iterable
from pathlib import Path

import psutil

from modelrunner.types import RequiredMemory

# The budget in bytes for all runners together, whose engines have these process ids.
Probe = Callable[[Iterable[int]], RequiredMemory]


class MemoryProbe:
    """`budget` fixes the figure; else it is what is free now, plus what our own runners hold, less `reserve` bytes (by
    default 10 % of the total). Limits of the container or control group count, whichever level sets them."""

    def __init__(self, budget: int | None = None, reserve: int | None = None, *, root: Path = Path("/")) -> None:
        self.set_limits(budget, reserve)
        self._root = root

    def set_limits(self, budget: int | None, reserve: int | None) -> None:
        """From the next look on."""
        self._budget, self._reserve = budget, reserve

    def __call__(self, pids: Iterable[int] = ()) -> RequiredMemory:
        if self._budget is not None:
            return RequiredMemory(self._budget)
        machine = psutil.virtual_memory()
        total, free = machine.total, machine.available
        for limit, used in control_group_limits(self._root):
            total, free = min(total, limit), min(free, limit - used)
        reserve = total // 10 if self._reserve is None else self._reserve
        return RequiredMemory(max(0, free + sum(map(private_bytes, pids)) - reserve))


def private_bytes(pid: int) -> int:
    """What the process and its descendants hold that would be free without them. Mapped files (weights) count as free
    already, since the kernel can drop their pages."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    return sum(map(_private, family))


def _private(process: psutil.Process) -> int:
    try:
        memory = process.memory_info()
    except psutil.Error:
        return 0
    return max(0, memory.rss - getattr(memory, "shared", 0))


def control_group_limits(root: Path = Path("/")) -> list[tuple[int, int]]:
    """(limit, used) in bytes of every level above this process that sets a limit; page cache that can be dropped does
    not count as used. Versions 1 and 2 (Linux: Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst)."""
    found = []
    for directory, limit_name, used_name in _levels(root):
        limit, used = _number(directory / limit_name), _number(directory / used_name)
        if limit is not None and used is not None:
            found.append((limit, max(0, used - _droppable(directory / "memory.stat"))))
    return found


def _levels(root: Path) -> list[tuple[Path, str, str]]:
    """The control groups of this process, from its own up to the one that is mounted. In a container the path may not
    exist under the mount, which then is the container's own group."""
    levels = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = base / path.lstrip("/")
        above = [p for p in (own, *own.parents) if p.is_relative_to(base)]
        levels += [(directory, *names) for directory in above]
    return levels


def _droppable(stat: Path) -> int:
    """In version 1 the figures of the children are in the `total_` rows."""
    rows = dict(line.split(maxsplit=1) for line in _text(stat).splitlines() if " " in line)
    return sum(int(rows.get(f"total_{name}", rows.get(name, "0"))) for name in ("inactive_file", "active_file"))


def _number(file: Path) -> int | None:
    """None where there is no such file or no limit; version 1 writes none as a number near 2^63."""
    text = _text(file).strip()
    return int(text) if text.isdecimal() and int(text) < 1 << 60 else None


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except OSError:
        return ""
