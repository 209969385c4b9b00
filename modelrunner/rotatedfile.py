"""A file of limited size for lines that come without end."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from modelrunner import durable

_RETRY = 5.0  # seconds until a file that could not be written is tried again
log = logging.getLogger(__name__)


class RotatedFile:
    """`path` and its predecessor `path.1` together stay within `limit` bytes. With a full disk or a read-only folder,
    what comes is lost until the file can be written again. `name` is what the daemon's log calls it."""

    def __init__(self, path: Path, limit: int, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._half = max(limit // 2, 1)
        self._name = name
        self._clock = clock
        self._size = 0
        self._file: int | None = None
        self._failed: float | None = None  # since when it cannot be written
        try:
            self._open()
        except OSError as error:
            self._fails(error)

    def write(self, data: bytes) -> None:
        """Appends the data, or its end if the files are too small for it."""
        try:
            self._write(data[-self._half :])
        except OSError as error:
            self._fails(error)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = durable.open_ours(str(self._path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._size = os.fstat(self._file).st_size

    def _write(self, data: bytes) -> None:
        if self._file is None:
            if self._failed is not None and self._clock() - self._failed < _RETRY:
                return
            self._open()
        if self._size and self._size + len(data) > self._half:
            self.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._open()
        assert self._file is not None
        self._size += os.write(self._file, data)
        if self._failed is not None:
            log.info("%s %s is written again", self._name, self._path)
            self._failed = None

    def _fails(self, error: OSError) -> None:
        if self._failed is None:
            log.warning("%s %s is not written for now: %s", self._name, self._path, error)
        self._failed = self._clock()
        self.close()
