"""Blobs: files named by the sha256 of their content, never changed once they are visible."""

import contextlib
import hashlib
import os
import stat
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelrunner.errors import BadRequest, SourceFailed
from modelrunner.store import files
from modelrunner.store.digests import Digest


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Blob:
    """A claim on a stored file: as long as this object lives, the file is not removed, whoever removes models.
    `size` in bytes."""

    digest: Digest
    size: int


class Blobs:
    """Writers to one folder of blobs. Not locked: `Store` serialises `publish` and `remove`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._claims: weakref.WeakValueDictionary[Digest, Blob] = weakref.WeakValueDictionary()

    def path(self, digest: Digest) -> Path:
        return digest.within(self.folder)

    def size(self, digest: Digest) -> int | None:
        """Bytes on disk; None if there is no such regular file."""
        try:
            found = os.lstat(self.path(digest))
        except FileNotFoundError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def claim(self, digest: Digest, size: int) -> Blob:
        return self._claims.setdefault(digest, Blob(digest, size))

    def is_claimed(self, digest: Digest) -> bool:
        return digest in self._claims

    def put(self, data: bytes) -> Blob:
        """Stores a small blob. Raises `OSError`."""
        digest = Digest.of(data)
        path = self.path(digest)
        if self.size(digest) != len(data) or path.read_bytes() != data:
            files.write(path, data)
        return self.claim(digest, len(data))

    def publish(self, file: Path, digest: Digest, size: int) -> Blob:
        """Moves a file whose content is verified and synced to its place, over one that may have decayed there.
        Raises `OSError`."""
        os.rename(file, self.path(digest))
        files.sync_folder(self.folder)
        return self.claim(digest, size)

    def remove(self, digest: Digest) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(digest))

    def total(self) -> int:
        """Bytes of everything stored, whether a model refers to it or not."""
        return sum(found.st_size for _, found in self._scan())

    def arrived_before(self, limit: float) -> list[Digest]:
        """`limit` in Unix seconds."""
        return [digest for digest, found in self._scan() if found.st_mtime < limit]

    def _scan(self) -> Iterator[tuple[Digest, os.stat_result]]:
        for digest in Digest.among(self.folder):
            yield digest, os.lstat(self.path(digest))


def verify(file: Path, expected: Digest | None) -> tuple[Digest, int]:
    """Digest and size in bytes of a file that is then synced to disk and read-only. Raises `BadRequest` for what is no
    regular file, `SourceFailed` for another digest than expected, `OSError`."""
    with files.open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = Digest(hashlib.file_digest(stream, "sha256").hexdigest())
        if expected is not None and digest != expected:
            raise SourceFailed(f"{file.name!r} arrived damaged: its digest is {digest}, not {expected}; pull again")
        os.fchmod(stream.fileno(), 0o444)
        os.utime(stream.fileno())  # the time of arrival, by which startup tells old leftovers
        files.sync(stream.fileno())
        return digest, size


def is_intact(file: Path, digest: Digest) -> bool:
    """Raises `OSError`, but not for a file that is missing."""
    try:
        with files.open_regular(file) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == digest.hex
    except (FileNotFoundError, BadRequest):
        return False
