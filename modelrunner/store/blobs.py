"""Blobs: files named by the sha256 of their content, never changed once they are visible."""

import contextlib
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from modelrunner import durable
from modelrunner.errors import BadRequest, SourceFailed
from modelrunner.store import files
from modelrunner.store.digests import Digest


@dataclass(frozen=True, slots=True)
class Blob:
    """A file that is verified and synced, and waits at `path` for a model that it becomes part of. `size` in bytes."""

    digest: Digest
    size: int
    path: Path


class Blobs:
    """One folder of blobs. Not locked: `Store` sees to it that one call at a time changes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: Digest) -> Path:
        return digest.within(self.folder)

    def size(self, digest: Digest) -> int | None:
        """Bytes on disk; None if there is no such regular file."""
        try:
            found = os.lstat(self.path(digest))
        except FileNotFoundError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def locate(self, blob: Blob) -> Path:
        """Where it is now: waiting, or stored already."""
        return blob.path if blob.path.exists() else self.path(blob.digest)

    def put(self, data: bytes) -> None:
        """Stores a small blob. Raises `OSError`."""
        digest = Digest.of(data)
        if not is_intact(self.path(digest), digest):
            durable.write(self.path(digest), data)

    def adopt(self, blob: Blob) -> None:
        """Stores a file in place of one that has decayed. It stays where it waits as well, so that a pull which is cut
        off now need not fetch it again, until `settle`. Raises `OSError`."""
        path = self.path(blob.digest)
        if not is_intact(path, blob.digest):
            temporary = durable.temporary_name(path)
            os.link(blob.path, temporary)
            os.rename(temporary, path)
            durable.sync_folder(self.folder)

    def settle(self, blob: Blob) -> None:
        """After `adopt`, when a model has it for good."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(blob.path)
        os.chmod(self.path(blob.digest), 0o444)

    def remove(self, digest: Digest) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(digest))

    def total(self) -> int:
        """Bytes of everything stored, whether a model refers to it or not."""
        return sum(os.lstat(self.path(digest)).st_size for digest in self.all())

    def all(self) -> set[Digest]:
        return Digest.among(self.folder)


def verify(file: Path, expected: Digest | None) -> Blob:
    """A blob of a file whose content is then synced to disk. Raises `BadRequest` for what is no regular file,
    `SourceFailed` for another digest than expected, `OSError`."""
    with files.open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest = Digest(hashlib.file_digest(stream, "sha256").hexdigest())
        if expected is not None and digest != expected:
            raise SourceFailed(f"{file.name!r} arrived damaged: its digest is {digest}, not {expected}; pull again")
        durable.sync(stream.fileno())
        return Blob(digest, size, file)


def is_intact(file: Path, digest: Digest) -> bool:
    """Raises `OSError`, but not for a file that is missing."""
    try:
        with files.open_regular(file) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest() == digest.hex
    except (FileNotFoundError, BadRequest):
        return False
