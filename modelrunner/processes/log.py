"""Keeps an engine's output: a file of limited size, the last 16 KiB in memory, and lines for an observer. Reads such
files, which grow and are rotated."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path

from modelrunner.rotatedfile import RotatedFile

TAIL_BYTES = 16 << 10
LINE_BYTES = 4 << 10
_CHUNK = 64 << 10  # bytes of a log that are read at a time
_POLL = 0.2  # seconds between two looks at a log that is followed


class EngineLog:
    """A `RotatedFile`. `on_line` gets at most the first 4 KiB of a line; a carriage return ends a line too, as progress
    bars use it."""

    def __init__(
        self,
        path: Path,
        limit: int,
        on_line: Callable[[str], None] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = RotatedFile(path, limit, "the engine's log", clock)
        self._on_line = on_line
        self._tail = bytearray()
        self._partial = b""

    def feed(self, chunk: bytes) -> None:
        """Takes output of the engine, in pieces of any size."""
        self._file.write(chunk)
        self._tail += chunk[-TAIL_BYTES:]
        del self._tail[:-TAIL_BYTES]
        if self._on_line:
            *lines, rest = (self._partial + chunk.replace(b"\r", b"\n")).split(b"\n")
            self._partial = rest[:LINE_BYTES]
            self._emit(lines)

    def tail(self) -> str:
        """Returns the last 16 KiB."""
        return self._tail.decode(errors="replace")

    def close(self) -> None:
        self._emit([self._partial])
        self._partial = b""
        self._file.close()

    def _emit(self, lines: list[bytes]) -> None:
        for line in lines:
            if line and self._on_line:
                self._on_line(line[:LINE_BYTES].decode(errors="replace"))


async def read_log(
    path: Path, ending: asyncio.Event | None = None, *, lines: int | None = None
) -> AsyncIterator[bytes]:
    """Yields the file's last `lines` lines (all of them for None), read from its end. With `ending`, yields new content
    as well, across rotations, until `ending` is set. A missing file counts as empty."""
    file = _opened(path)
    try:
        if file is not None and lines is not None:
            _seek_last(file, lines)
        while True:
            file = file or _opened(path)
            while file is not None and (chunk := file.read(_CHUNK)):
                yield chunk
            if ending is None or ending.is_set():
                return
            if file is not None and not _is_same_file(file, path):
                file.close()
                file = None
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(ending.wait(), _POLL)
    finally:
        if file is not None:
            file.close()


def _seek_last(file: FileIO, lines: int) -> None:
    """Moves to the start of the last `lines` lines: 0 is the end. Reads no more of the file than those lines."""
    size = file.seek(0, os.SEEK_END)
    if lines == 0:
        return
    end = max(0, size - 1)  # a newline in the last byte ends the last line and begins none
    while end:
        start = max(0, end - _CHUNK)
        chunk = os.pread(file.fileno(), end - start, start)
        at = len(chunk)
        while (at := chunk.rfind(b"\n", 0, at)) >= 0:
            lines -= 1
            if lines == 0:
                file.seek(start + at + 1)
                return
        end = start
    file.seek(0)


def _opened(path: Path) -> FileIO | None:
    try:
        return FileIO(path)
    except FileNotFoundError:
        return None


def _is_same_file(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:  # no such path yet
        return False
