"""Ends an engine that oversteps: that takes far more than was planned for it, in memory or in files of its folder, or
puts another program in its place. No kernel limits that for a program without privileges and without breaking engines,
which reserve addresses as they like. So this module looks once a second at the memory, and every five seconds at the
processes and files, which takes a thread. Pages that an engine's processes share, as forks do, count once."""

import asyncio
import os
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from modelrunner.concurrency.beat import beat
from modelrunner.errors import EngineFailed, Unavailable
from modelrunner.processes.processtree import memory_of, private_memory, process_tree
from modelrunner.types import RequiredMemory
from modelrunner.units import format_bytes

_LOOK = 1.0  # seconds
_THOROUGH = 5  # looks, of which the first is a thorough one
_FACTOR, _ALLOWANCE = 2, 2 << 30
_MOST_FILES, _MOST_BYTES = 20_000, 4 << 30  # in the folder of a runner, which may lie in memory


def memory_limit(planned: RequiredMemory) -> int:
    """Returns the bytes of main memory of its own at which an engine ends: an estimate may be wrong by a factor of two,
    and a start may need some memory for a moment."""
    return _FACTOR * planned.ram + _ALLOWANCE


class Excess:
    """Watches one engine. `limit` is in bytes, and None for no limit; `folder` is its own."""

    def __init__(self, folder: Path) -> None:
        self.limit: int | None = None
        self._folder = folder
        self._pids: list[int] = []  # of the last thorough look
        self._deceives = False

    def is_another(self) -> None:
        """Records that another program listens on the engine's socket. Any thread may call it."""
        self._deceives = True

    async def watch(self, pid: int) -> NoReturn:
        """Raises `EngineFailed` once the engine `pid` holds too much."""
        look = 0
        while True:
            await beat(_LOOK)
            look += 1
            if look % _THOROUGH == 1 or self._deceives or self._is_above_limit():
                with suppress(Unavailable):  # no thread can be started at the moment
                    if fault := await asyncio.to_thread(self.fault, pid):
                        raise EngineFailed(fault)

    def fault(self, pid: int) -> str:
        """Looks thoroughly, and returns a sentence about what is too much, "" for nothing. Blocks."""
        if self._deceives:
            return "the engine was ended because it put another program's socket in the place of its own"
        self._pids = [process.pid for process in process_tree(pid)]
        if self.limit is not None and self._is_above_limit():
            exact = memory_of(pid)
            if (memory := exact.ram - exact.shared) > self.limit:
                return (
                    f"the engine was ended because it held {format_bytes(memory)} of memory, far more than was planned "
                    f"for it (the limit is {format_bytes(self.limit)}): its model or chat template may be made to "
                    "exhaust the machine, or the estimate is wrong"
                )
        if _holds_too_much(self._folder):
            return (
                f"the engine was ended because it wrote more than {_MOST_FILES} files or {format_bytes(_MOST_BYTES)} "
                "to its folder"
            )
        return ""

    def _is_above_limit(self) -> bool:
        """Returns True for more main memory without mapped files than the limit. Pages that processes share count for
        each of them: to share them out, the kernel walks all pages, for which only a thorough look has the time."""
        return self.limit is not None and sum(map(private_memory, self._pids)) > self.limit


def _holds_too_much(folder: Path) -> bool:
    files, size, folders = 0, 0, deque([os.fspath(folder)])
    while folders:
        with suppress(OSError), os.scandir(folders.popleft()) as entries:  # removed meanwhile
            for entry in entries:
                files += 1
                size += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                if files > _MOST_FILES or size > _MOST_BYTES:
                    return True
    return False
