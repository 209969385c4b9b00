"""Reads a file forward through a small window, and checks every length against the rest of the file before reading or
allocating."""

import os
import struct
from io import FileIO
from typing import Any, NoReturn

from modelrunner.errors import InvalidModel

U64 = struct.Struct("<Q")
_CHUNK = 1 << 18


class Window:
    """A window into the file: `data[at:]` begins at position `start + at` of the file; `size` is in bytes."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size
        self.data = b""
        self.start = 0
        self.at = 0

    @property
    def left(self) -> int:
        """Returns the number of bytes to the end of the file."""
        return self.size - self.start - self.at

    def need(self, count: int) -> None:
        """Makes sure that `count` bytes are in the window. Raises `InvalidModel` if the file ends before."""
        if len(self.data) - self.at >= count:
            return
        if self.left < count:
            self.cut()
        self.start += self.at
        self.at = 0
        self._file.seek(self.start)
        self.data = self._file.read(max(count, _CHUNK))
        if len(self.data) < count:  # the file has become shorter
            self.cut()

    def cut(self) -> NoReturn:
        raise InvalidModel("the file ends within its header: it is truncated or damaged")

    def take(self, count: int) -> bytes:
        self.need(count)
        piece = self.data[self.at : self.at + count]
        self.at += count
        return piece

    def skip(self, count: int) -> None:
        if count > self.left:
            self.cut()
        self.at += count
        if self.at > len(self.data):
            self.start, self.at, self.data = self.start + self.at, 0, b""

    def number(self, form: struct.Struct) -> Any:
        self.need(form.size)
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def skip_strings(self, count: int) -> None:
        """Skips `count` strings; reads only their lengths."""
        unpack, prefix = U64.unpack_from, U64.size
        while count:
            self.need(prefix)
            data, at, last = self.data, self.at, len(self.data) - prefix
            while count and at <= last:
                at += prefix + unpack(data, at)[0]
                count -= 1
            self.skip(at - self.at)
