"""Blobs: files named by the sha256 of their content, which never change once they are visible."""

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from modelrunner import durable
from modelrunner.errors import BadRequest, SourceFailed
from modelrunner.store import files
from modelrunner.store.digests import Digest
from modelrunner.store.records import Stamp, stamp

_PIECE = 1 << 20  # bytes that are read and hashed at once

ReadProgress = Callable[[int], None]
"""Receives the size of each piece of a file that was read, in bytes, and stops the reading by raising."""


def ignore(count: int) -> None:
    """Ignores the progress."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A verified and synced file at `path`, of `size` bytes, from which a model may be made. If it is `shared`, it has
    another hard link, and its owner and mode must not be changed."""

    digest: Digest
    size: int
    path: Path
    shared: bool = False


class Blobs:
    """One folder of blobs. Not locked: `Store` lets one call at a time change it.

    `damaged` are the blobs whose content was found to be wrong since the store was opened. They count as missing until
    a healthy file replaces them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: set[Digest] = set()

    def path(self, digest: Digest) -> Path:
        return digest.within(self.folder)

    def size(self, digest: Digest) -> int | None:
        """Returns the bytes on disk; None if there is no such regular file, or it is known to be damaged."""
        try:
            status = os.lstat(self.path(digest))
        except FileNotFoundError:
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) and digest not in self.damaged else None

    def locate(self, blob: Blob) -> Path:
        """Returns the file's present path: waiting, or stored already."""
        return blob.path if blob.path.exists() else self.path(blob.digest)

    def intact(self, blobs: Iterable[Blob], progress: ReadProgress = ignore) -> set[Digest]:
        """Returns the blobs that are stored already, by a check of their content, which takes a second per gigabyte."""
        return {b.digest for b in blobs if self._is_stored(b) or is_intact(self.path(b.digest), b.digest, progress)}

    def _is_stored(self, blob: Blob) -> bool:
        return blob.path == self.path(blob.digest)

    def check(self, digest: Digest, progress: ReadProgress = ignore) -> bool:
        """Returns whether the content has the digest; remembers a damaged blob. Raises `OSError`."""
        before = self.stamp(digest)
        intact = is_intact(self.path(digest), digest, progress)
        if intact:
            self.damaged.discard(digest)
        elif self.stamp(digest) == before:  # no healthy file has replaced it meanwhile
            self.damaged.add(digest)
        return intact

    def stamp(self, digest: Digest) -> Stamp | None:
        """Returns the file's stamp; None without a file."""
        try:
            return stamp(os.lstat(self.path(digest)))
        except FileNotFoundError:
            return None

    def put(self, data: bytes) -> None:
        """Stores a small blob. Raises `OSError`."""
        digest = Digest.of(data)
        if not is_intact(self.path(digest), digest):
            durable.write(self.path(digest), data)
        self.damaged.discard(digest)

    def adopt(self, blob: Blob) -> None:
        """Links a verified file into the store, and replaces any present file. The file also stays where it waits until
        `settle`, so that a pull which is cut off now need not fetch it again. Raises `OSError`."""
        if not self._is_stored(blob):
            path = self.path(blob.digest)
            temporary = durable.temporary_name(path)
            os.link(blob.path, temporary)
            durable.replace(temporary, path)
            self.damaged.discard(blob.digest)

    def settle(self, blob: Blob) -> None:
        """Removes the waiting file of an adopted blob, when the blob belongs to a model for good."""
        if not self._is_stored(blob):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(blob.path)
            if not blob.shared:
                os.chmod(self.path(blob.digest), 0o444)

    def remove(self, digest: Digest) -> None:
        durable.discard(self.path(digest))
        self.damaged.discard(digest)

    def total(self) -> int:
        """Returns the bytes of all stored files, with or without a model."""
        return sum(files.size_of(self.path(digest)) for digest in self.all())

    def all(self) -> set[Digest]:
        return Digest.among(self.folder)


def verify(file: Path, expected: Digest | None, progress: ReadProgress = ignore, *, hashed: bool = False) -> Blob:
    """Hashes and syncs a file; only syncs one that its writer has `hashed`. Raises `BadRequest` for anything but a
    regular file, `SourceFailed` for another digest than expected, `OSError`."""
    with files.open_regular(file) as stream:
        status = os.fstat(stream.fileno())
        known = expected if hashed else None
        digest = known or _digest(stream, progress)
        if expected is not None and digest != expected:
            raise SourceFailed(f"{file.name!r} arrived damaged: its digest is {digest}, not {expected}; pull again")
        durable.sync(stream.fileno())
        return Blob(digest, status.st_size, file, shared=status.st_nlink > 1)


def copied(blob: Blob, target: Path, progress: ReadProgress = ignore) -> Blob:
    """Copies the blob to `target`, which is synced, and whose content has the digest. Raises `SourceFailed` for a
    damaged one, `OSError`."""
    durable.discard(target)
    with files.open_regular(blob.path) as source, open(target, "xb") as file:
        while piece := source.read(_PIECE):
            file.write(piece)
            progress(len(piece))
    return verify(target, blob.digest, progress)


def is_intact(file: Path, digest: Digest, progress: ReadProgress = ignore) -> bool:
    """Returns whether the content of a regular file has the digest. Raises `OSError`, but not for a file that is
    missing."""
    try:
        with files.open_regular(file) as stream:
            return _digest(stream, progress) == digest
    except (FileNotFoundError, BadRequest):
        return False


def _digest(stream: BinaryIO, progress: ReadProgress) -> Digest:
    sha256 = hashlib.sha256()
    while piece := stream.read(_PIECE):
        sha256.update(piece)
        progress(len(piece))
    return Digest(sha256.hexdigest())
