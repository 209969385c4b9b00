"""Bodies that the gateway does not read: forms with files, and whatever an engine takes. Up to 8 MiB of one stay in
memory, more goes through a file without a name."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from modelrunner.concurrency.threads import BODIES
from modelrunner.errors import ModelRunnerError, Unavailable

IN_MEMORY = 8 << 20
"""The most bytes of one body in memory, but for those that come while these are written."""
_WRITTEN_AT_ONCE = 1 << 20
PIECE = 256 << 10
"""The most bytes of a piece that is read back."""


class RequestUpload:
    """The body of one request. It is filled with `add` in the event loop, then read, from any thread. `hold(True)` is
    called to pause a client that sends faster than a thread writes to the disk, `hold(False)` after that. `folder` is
    for the file, None for the system's own."""

    def __init__(self, folder: Path | None, hold: Callable[[bool], None]) -> None:
        self.size = 0
        self._folder, self._hold = folder, hold
        self._pieces: list[bytes] = []
        self._waiting = 0  # bytes in `_pieces`
        self._file: IO[bytes] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._whole: Callable[[ModelRunnerError | None], None] | None = None
        self._error: ModelRunnerError | None = None
        self._closed = False

    def __len__(self) -> int:
        return self.size

    @staticmethod
    def held(size: int) -> int:
        """Returns the bytes that a body of this size holds in memory: those of a larger one are in its file."""
        return min(size, IN_MEMORY)

    def add(self, piece: bytes) -> None:
        """Adds the next bytes."""
        self.size += len(piece)
        self._pieces.append(piece)
        self._waiting += len(piece)
        if self._waiting > (IN_MEMORY if self._file is None else _WRITTEN_AT_ONCE):
            if self._writing is not None:
                self._hold(True)
            self._write()

    def end(self, whole: Callable[[ModelRunnerError | None], None]) -> None:
        """Calls `whole` once every byte can be read: at once for a body in memory. Its argument is the error of a disk
        that took not all."""
        self._whole = whole
        if self._file is not None:
            self._write()
        if self._writing is None:
            whole(self._error)

    def pieces(self, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Yields the bytes from `start` up to `end`, in pieces of at most `PIECE` bytes. Raises `OSError`."""
        end = self.size if end is None else end
        if self._file is None:
            whole = b"".join(self._pieces)
            self._pieces = [whole]
            yield from (whole[at : min(at + PIECE, end)] for at in range(start, end, PIECE))
            return
        while start < end:
            self._file.seek(start)  # two readers may take turns
            piece = self._file.read(min(PIECE, end - start))
            if not piece:
                raise OSError("the file of the request's body is too short")
            start += len(piece)
            yield piece

    def close(self) -> None:
        """Frees memory and disk. Safe to call again."""
        self._closed, self._whole = True, None
        self._pieces = []
        if self._file is not None and self._writing is None:
            self._file.close()

    def _write(self) -> None:
        """Moves what waits to the file, in a thread, unless one does so already."""
        if self._error is not None:  # the body is refused when it is whole: no more of it stays in memory
            self._pieces, self._waiting = [], 0
        if self._writing is not None or not self._pieces:
            return
        pieces, self._pieces, self._waiting = self._pieces, [], 0
        try:
            self._file = self._file or tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            self._fail(error)
            return
        self._writing = asyncio.get_running_loop().run_in_executor(BODIES, _write_all, self._file, pieces)
        self._writing.add_done_callback(self._written)

    def _written(self, writing: "asyncio.Future[None]") -> None:
        self._writing = None
        if isinstance(error := writing.exception(), OSError):
            self._fail(error)
        if self._closed:
            self.close()
            return
        self._hold(False)
        if self._whole is not None:
            self.end(self._whole)
        elif self._waiting > _WRITTEN_AT_ONCE:
            self._write()

    def _fail(self, error: OSError) -> None:
        self._error = Unavailable(f"the request's body could not be kept: {error.strerror or error}")


def _write_all(file: IO[bytes], pieces: list[bytes]) -> None:
    pieces.reverse()
    while pieces:  # each is freed as soon as it is written: this thread may be slow to end, and to drop what it has
        left = memoryview(pieces.pop())
        while left:
            left = left[file.write(left) :]
