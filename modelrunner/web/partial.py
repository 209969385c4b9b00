"""The received part of a file: ranges of it, in any order, in one file on disk.

While it has more than the file's beginning, a block after the file's last byte lists the ranges. Nothing of it is
trusted: the digest decides in the end.
"""

import contextlib
import hashlib
import os
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from modelrunner.durable import discard

_PIECE = 1 << 20
_FLUSHED = 8 << 20  # bytes after which the disk begins to write
_BLOCK = 4096
_MAGIC = b"modelrunner ranges 1\n"
_MOST_RANGES = 80
_LEAST_SAVED = 1 << 20  # bytes that come between two writes of the block, at least


class ByteRange(NamedTuple):
    """`end` is the byte after the last one."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at a source. `size` is in bytes. `digest` is in hex: a sha256 (64 digits); or git's name of the content
    (40 digits; gitformat-loose: SHA-1 of a header and the content), which is all that a hub has for small files; or ""
    if the source gives none, and the caller checks the content. `name` is for messages."""

    name: str
    url: str
    size: int
    digest: str

    @property
    def sha256(self) -> str | None:
        return self.digest if len(self.digest) == 64 else None

    @property
    def partial_name(self) -> str:
        """Returns the name of its partial file."""
        return self.digest or hashlib.sha256(f"{self.url} {self.size}".encode()).hexdigest()

    def new_hash(self) -> "hashlib._Hash":
        if len(self.digest) != 40:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


def received(path: Path, size: int) -> int:
    """Returns the number of bytes at `path` that were received of a file of `size` bytes."""
    return sum(end - start for start, end in _ranges_in(path, size))


class PartialFile:
    """Ranges of `file` on disk, and the hash of its beginning. Its methods block; several threads may `write`."""

    def __init__(self, path: Path, file: RemoteFile) -> None:
        """Opens the file at `path`. A file that cannot be a part of `file` (longer, a link, not regular) is deleted
        first."""
        self._ranges = _ranges_in(path, file.size)
        if not self._ranges:
            discard(path)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._file = file
        self._hash = file.new_hash()
        self._hashed = self._unsaved = 0
        self._hashing = False
        self._has_block = len(self._ranges) > 1 or bool(self._ranges and self._ranges[0].start)
        self._lock = threading.Lock()

    @property
    def length(self) -> int:
        """Returns the number of received bytes."""
        with self._lock:
            return sum(end - start for start, end in self._ranges)

    @property
    def digest(self) -> str:
        """Returns the digest of a complete file that was read through."""
        return self._hash.hexdigest()

    def gaps(self) -> list[ByteRange]:
        """Returns the missing ranges, in order."""
        with self._lock:
            edges = [0, *(edge for known in self._ranges for edge in known), self._file.size]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [ByteRange(start, end) for start, end in pairs if start < end]

    def read_through(self, stop: threading.Event) -> None:
        """Hashes the received bytes that follow the hashed beginning."""
        with self._lock:
            if self._hashing:
                return
            self._hashing = True
        while True:
            with self._lock:
                left = self._beginning - self._hashed
                if not left or stop.is_set():
                    self._hashing = False
                    return
            piece = os.pread(self._descriptor, min(_PIECE, left), self._hashed)
            self._hash.update(piece)
            self._hashed += len(piece)

    def write(self, offset: int, pieces: Sequence[bytes], stop: threading.Event | None = None) -> None:
        """Writes `pieces`, one after the other, which lie within the file. Bytes that follow the hashed beginning are
        hashed at once."""
        count = sum(map(len, pieces))
        if not self._has_block and offset > self._beginning:
            self._save()  # a file without a block counts as a beginning of its whole length
        self._put(offset, pieces)
        with self._lock:
            self._ranges = _with(self._ranges, ByteRange(offset, offset + count))
            self._unsaved += count
            due = self._has_block and self._unsaved >= max(_LEAST_SAVED, self._file.size // 64)
            follows = offset == self._hashed and not self._hashing
            self._hashing |= follows
        if due:
            self._save()
        if follows:
            for piece in pieces:
                self._hash.update(piece)
            self._hashed += count
            self._hashing = False
        if self._beginning > self._hashed:
            self.read_through(stop or threading.Event())
        if hasattr(os, "posix_fadvise") and offset // _FLUSHED != (offset + count) // _FLUSHED:
            # Linux begins to write these pages without a wait, so the sync at the end has less to do.
            begun = max(0, offset - _FLUSHED)
            os.posix_fadvise(self._descriptor, begun, offset + count - begun, os.POSIX_FADV_DONTNEED)

    def restart(self) -> None:
        with self._lock:
            os.ftruncate(self._descriptor, 0)
            self._hash, self._ranges, self._has_block = self._file.new_hash(), [], False
            self._hashed = self._unsaved = 0

    def finish(self, stop: threading.Event) -> None:
        """Hashes the rest of a complete file, and cuts the block after its end."""
        self.read_through(stop)
        if not stop.is_set():
            os.ftruncate(self._descriptor, self._file.size)
            self._has_block = False

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: bytes since the last save are downloaded again
            if self._has_block:
                self._save()
        os.close(self._descriptor)

    @property
    def _beginning(self) -> int:
        return self._ranges[0].end if self._ranges and not self._ranges[0].start else 0

    def _put(self, offset: int, pieces: Sequence[bytes]) -> None:
        for first in range(0, len(pieces), 64):  # the system accepts at most 1024 at once
            group = pieces[first : first + 64]
            total = sum(map(len, group))
            written = os.pwritev(self._descriptor, group, offset) if hasattr(os, "pwritev") else 0
            if written < total:
                rest = memoryview(b"".join(group))[written:]
                while rest:
                    count = os.pwrite(self._descriptor, rest, offset + total - len(rest))
                    rest = rest[count:]
            offset += total

    def _save(self) -> None:
        """Saves the ranges after the bytes, so that neither a killed daemon nor a power cut leaves a range without its
        bytes. When two threads save, the older ranges may be written last: these bytes are then downloaded again."""
        with self._lock:
            content = msgspec.json.encode([edge for known in self._ranges[:_MOST_RANGES] for edge in known])
            self._unsaved = 0
        getattr(os, "fdatasync", os.fsync)(self._descriptor)  # macOS has only fsync
        block = _MAGIC + hashlib.sha256(content).hexdigest().encode() + content
        os.pwrite(self._descriptor, block.ljust(_BLOCK), self._file.size)
        self._has_block = True


def _ranges_in(path: Path, size: int) -> list[ByteRange]:
    """Returns the ranges of the file at `path`; [] if it is not a partial file."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or (status.st_size > size and status.st_size != size + _BLOCK):
            return []
        if status.st_size <= size:
            return [ByteRange(0, status.st_size)] if status.st_size else []
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        block = os.pread(descriptor, _BLOCK, size)
    finally:
        os.close(descriptor)
    return _decoded(block, size)


def _decoded(block: bytes, size: int) -> list[ByteRange]:
    if not block.startswith(_MAGIC):
        return []
    sealed, content = block[len(_MAGIC) : len(_MAGIC) + 64], block[len(_MAGIC) + 64 :].rstrip()
    if hashlib.sha256(content).hexdigest().encode() != sealed:
        return []
    try:
        edges = msgspec.json.decode(content, type=list[int])
    except msgspec.MsgspecError:
        return []
    if len(edges) % 2 or edges != sorted(set(edges)) or (edges and not 0 <= edges[0] < edges[-1] <= size):
        return []
    return [ByteRange(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _with(ranges: Sequence[ByteRange], added: ByteRange) -> list[ByteRange]:
    """Returns the ranges, sorted and without touching neighbours."""
    merged: list[ByteRange] = []
    for start, end in sorted((*ranges, added)):
        if merged and start <= merged[-1].end:
            merged[-1] = ByteRange(merged[-1].start, max(end, merged[-1].end))
        elif start < end:
            merged.append(ByteRange(start, end))
    return merged
