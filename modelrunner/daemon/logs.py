"""The daemon's own log, and readers of growing and rotating logs."""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

LOG_BYTES = 8 << 20  # per file; one older file is kept
ENGINE_LOGS_KEPT = 64
_CHUNK = 64 << 10
_POLL = 0.2  # seconds
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def daemon_log(logs: Path) -> Path:
    return logs / "daemon.log"


@contextmanager
def logging_to(logs: Path, level: str) -> Iterator[None]:
    """Logs everything to `logs`/daemon.log, and to stderr unless that is the same file, as it is when a command started
    the daemon."""
    logs.mkdir(parents=True, exist_ok=True)
    path = daemon_log(logs)
    handlers: list[logging.Handler] = [RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8")]
    if sys.stderr is not None and not _is_same_file(sys.stderr, path):
        handlers.append(logging.StreamHandler())
    root, before, raises = logging.getLogger(), logging.getLogger().level, logging.raiseExceptions
    set_level(level)
    for client in ("httpx", "httpx2"):  # they log each request's URL, which may hold a key
        logging.getLogger(client).setLevel(logging.WARNING)
    logging.raiseExceptions = False  # a full disk or a closed terminal costs log lines, not the daemon
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT))
        root.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(before)
        logging.raiseExceptions = raises


def set_level(level: str) -> None:
    """Sets the level of all loggers without a level of their own."""
    logging.getLogger().setLevel(level.upper())


def prune_engine_logs(logs: Path) -> None:
    """Keeps the newest `ENGINE_LOGS_KEPT` logs: every revision of a model's configuration has one of its own."""
    found = sorted(logs.glob("engine-*.log*"), key=lambda path: path.lstat().st_mtime, reverse=True)
    for old in found[2 * ENGINE_LOGS_KEPT :]:  # each log may have a predecessor
        with suppress(OSError):
            old.unlink()


async def read_log(
    path: Path, ending: asyncio.Event | None = None, *, lines: int | None = None
) -> AsyncIterator[bytes]:
    """Yields the file's last `lines` lines (all of them for None), read from its end. With `ending`, yields new content
    as well, across rotations, until `ending` is set. A missing file counts as empty."""
    file = _open(path)
    try:
        if file is not None and lines is not None:
            _seek_last(file, lines)
        while True:
            file = file or _open(path)
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
        found = len(chunk)
        while (found := chunk.rfind(b"\n", 0, found)) >= 0:
            lines -= 1
            if lines == 0:
                file.seek(start + found + 1)
                return
        end = start
    file.seek(0)


def _open(path: Path) -> FileIO | None:
    try:
        return FileIO(path)
    except FileNotFoundError:
        return None


def _is_same_file(file: FileIO | TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (OSError, ValueError):  # no such path (yet); a stream without a descriptor
        return False
