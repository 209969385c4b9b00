"""The memory budget: the memory that all runners together may use."""

import logging
import resource
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil

from modelrunner.processes.processtree import process_tree
from modelrunner.scheduler.devices import Device, devices, in_old_places, joined, lost
from modelrunner.types import EngineDevice, RequiredMemory

BUDGET_LOOK = 2.0
"""Seconds between two looks at the budget for the sake of idle runners. A look starts the measurement that the next one
sees, so memory that other programs take is noticed within twice this time."""
# A measurement stays valid for this many seconds, less than `BUDGET_LOOK`. Our own runners do not change the budget.
_AGE, _DEVICES_AGE = 1.0, 1.5
_FORGOTTEN = 60.0  # seconds
log = logging.getLogger(__name__)


class MemoryProbe:
    """`budget` fixes the figure of main memory; by default it is the free memory and what our own runners hold, less
    `reserve` bytes (by default 10 % of the total). The limits of every control group above the process count, and so
    does the limit of a process's address space (RLIMIT_AS). The figure of each device is made in the same way. A device
    that shares the main memory has no figure.

    A call takes microseconds: it returns the last measurement, and starts another one in a thread if that one is old.
    `list_devices` asks the engines for theirs, by backend: a backend that it leaves out has those of the drivers. The
    constructor makes the first measurement, but waits at most `patience` seconds for the drivers of devices."""

    def __init__(
        self,
        budget: int | None = None,
        reserve: int | None = None,
        *,
        root: Path = Path("/"),
        look: Callable[[], tuple[Device, ...]] = devices,
        list_devices: Callable[[], Mapping[str, Sequence[EngineDevice]]] = dict,
        clock: Callable[[], float] = time.monotonic,
        patience: float = 2.0,
    ) -> None:
        self.set_limits(budget, reserve)
        self._root = root
        self._look = look
        self._list_devices = list_devices
        self._clock = clock
        self._looking = threading.Lock()
        self._devices: tuple[_MemoryTotals, ...] = ()
        self._seen: tuple[Device, ...] = ()
        self._numbers: Mapping[str, tuple[int, ...]] = {}
        self._devices_due = self._devices_seen = clock()
        self._fault = ""
        self._totals: tuple[_MemoryTotals, ...] = (self._main_memory(()),)
        self._due = clock()
        if (first := self._look_in_background({})) is not None:
            first.join(patience)

    def set_limits(self, budget: int | None, reserve: int | None) -> None:
        """Sets the limits from the next call on."""
        self._budget, self._reserve = budget, reserve

    def __call__(self, runners: Mapping[int, RequiredMemory] | None = None) -> RequiredMemory:
        if self._clock() >= self._due:
            self._look_in_background(runners or {})
        ram, *vram = map(self._ours, self._totals)
        return RequiredMemory(ram if self._budget is None else self._budget, tuple(vram))

    def devices(self) -> tuple[Device, ...]:
        """Returns the devices as last measured, in the order of the budget. One that is gone has a `fault`."""
        return self._seen

    def numbers(self, backend: str) -> tuple[int, ...] | None:
        """Returns the number in the budget of each device that the backend's engine lists, in its order; None for an
        engine that lists none, and has the numbers of the budget."""
        return self._numbers.get(backend)

    def refresh(self, runners: Mapping[int, RequiredMemory]) -> None:
        """Measures now: takes milliseconds for main memory, up to seconds for devices."""
        self._looking.acquire()
        self._devices_due = self._clock()
        self._look_again(runners)

    def _look_in_background(self, runners: Mapping[int, RequiredMemory]) -> threading.Thread | None:
        """Returns the thread that measures, None if one does so already, or if none can be had."""
        if not self._looking.acquire(blocking=False):
            return None
        thread = threading.Thread(target=self._look_again, args=(runners,), name="memory probe", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the last figures stay
            self._looking.release()
            log.warning("the memory cannot be looked at: %s", error)
            return None
        return thread

    def _look_again(self, runners: Mapping[int, RequiredMemory]) -> None:
        """Measures; the caller holds the lock."""
        try:
            if self._clock() >= self._devices_due:
                self._devices = self._device_memory(runners)
                self._devices_due = self._clock() + _DEVICES_AGE
            self._totals = (self._main_memory(runners), *self._devices)
        finally:
            self._due = self._clock() + _AGE
            self._looking.release()

    def _main_memory(self, runners: Iterable[int]) -> "_MemoryTotals":
        machine = psutil.virtual_memory()
        total, free = machine.total, machine.available
        for limit, used in control_group_limits(self._root):
            total, free = min(total, limit), min(free, limit - used)
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)  # of each process, and engines inherit it
        most = total if limit == resource.RLIM_INFINITY else min(total, limit)
        return _MemoryTotals(most, min(most, free + sum(map(private_bytes, runners))))

    def _ours(self, pool: "_MemoryTotals") -> int:
        reserve = pool.total // 10 if self._reserve is None else self._reserve
        return max(0, pool.free - reserve)

    def _device_memory(self, runners: Mapping[int, RequiredMemory]) -> "tuple[_MemoryTotals, ...]":
        """Asks the drivers. What a runner held then counts as free until they are asked again, even if it has ended
        since: the figures of free memory are of then, too. A device that is gone keeps its number and has no memory; a
        driver that does not answer for `_FORGOTTEN` seconds counts as gone with all its devices."""
        ours = _process_ids(runners)
        try:
            cards = self._look()
        except (OSError, ValueError) as error:  # a timeout is an OSError
            late = self._clock() >= self._devices_seen + _FORGOTTEN
            self._say(f"{error}: {'no device is used' if late else 'the last figures stay'}")
            if late:
                self._seen = tuple([lost(device, str(error)) for device in self._seen])
            return (_MemoryTotals(0, 0),) * len(self._devices) if late else self._devices
        self._devices_seen = self._clock()
        self._seen, self._numbers = joined(in_old_places(cards, self._seen), self._list_devices())
        gone = [str(number) for number, device in enumerate(self._seen) if device.fault]
        self._say(f"device {', '.join(gone)} does not answer, and is not used" if gone else "")
        ours |= _process_ids(runners)
        figures = [_MemoryTotals(d.total, d.free + _held(i, d, runners, ours)) for i, d in enumerate(self._seen)]
        pairs = zip(self._seen, figures, strict=True)
        self._seen = tuple([replace(device, others=max(0, totals.total - totals.free)) for device, totals in pairs])
        return tuple(figures)

    def _say(self, fault: str) -> None:
        """Logs a fault of the devices once, and its end."""
        if fault != self._fault:
            log.warning("devices: %s", fault or "all answer again")
        self._fault = fault


class _MemoryTotals(NamedTuple):
    """Bytes of one memory: in all, and free if our runners did not run."""

    total: int
    free: int


def _process_ids(runners: Iterable[int]) -> set[int]:
    return {process.pid for pid in runners for process in process_tree(pid)}


def _held(number: int, device: Device, runners: Mapping[int, RequiredMemory], pids: set[int]) -> int:
    """Bytes, among those that are not free, that our runners hold of a device, or that they count for if the driver
    does not say."""
    if device.is_listed:  # before they took anything
        return 0
    if device.held is not None:
        return sum(device.held.get(pid, 0) for pid in pids)
    counted = sum(memory.vram[number] for memory in runners.values() if number < len(memory.vram))
    return min(counted, device.total - device.free)


def private_bytes(pid: int) -> int:
    """Bytes that the end of the engine's processes would free. Mapped files (weights) count as free already, since the
    kernel can drop their pages."""
    return sum(map(_private, process_tree(pid)))


def _private(process: psutil.Process) -> int:
    try:
        memory = process.memory_info()
    except psutil.Error:
        return 0
    return max(0, memory.rss - getattr(memory, "shared", 0))


def control_group_limits(root: Path = Path("/")) -> list[tuple[int, int]]:
    """(limit, used) in bytes of every control group of this process that sets a limit. Page cache that can be dropped
    does not count as used. Version 2's `memory.high` counts as a limit: beyond it processes are throttled until they
    hardly run. Versions 1 and 2 (Linux: Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst)."""
    pairs = []
    for directory, limit_names, used_name in _levels(root):
        limits = [limit for name in limit_names if (limit := _number(directory / name)) is not None]
        used = _number(directory / used_name)
        if limits and used is not None:
            pairs.append((min(limits), max(0, used - _droppable(directory / "memory.stat"))))
    return pairs


def _levels(root: Path) -> list[tuple[Path, list[str], str]]:
    """The control groups of this process, from its own up to the one that is mounted. In a container the path may not
    exist under the mount, which then is the container's own group."""
    levels = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limits, used = root / "sys/fs/cgroup", ["memory.max", "memory.high"], "memory.current"
        elif "memory" in controllers.split(","):
            base, limits, used = root / "sys/fs/cgroup/memory", ["memory.limit_in_bytes"], "memory.usage_in_bytes"
        else:
            continue
        own = base / path.lstrip("/")
        above = [p for p in (own, *own.parents) if p.is_relative_to(base)]
        levels += [(directory, limits, used) for directory in above]
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
