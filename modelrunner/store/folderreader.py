"""The reading side of one folder of models: its models, their files, the damaged ones, and the disk space."""

import os
import shutil
import threading
from pathlib import Path

from modelrunner.durable import make_folder, read, translated
from modelrunner.errors import FolderMissing, InvalidModel
from modelrunner.store.blobs import Blob, Blobs, ReadProgress, is_intact
from modelrunner.store.bundles import Bundles
from modelrunner.store.catalog import Catalog, Entry
from modelrunner.store.digests import Digest
from modelrunner.store.diskusage import FolderSize
from modelrunner.store.files import size_of
from modelrunner.store.manifests import LARGEST, UnpackedFile
from modelrunner.store.records import Records, Stamp
from modelrunner.store.startup import FORMAT_FILE
from modelrunner.types import Bundle


class FolderReader:
    """The part of a `ModelFolder` that changes no model. Its methods take entries of models in the folder, and raise
    the errors of the methods of `Store`."""

    def __init__(self, data: Path, lock: threading.RLock, *, is_home: bool) -> None:
        self.data, self.is_home = data, is_home
        self._records = Records(data / "manifests" / "sha256")
        self._lock = lock
        self._blobs = Blobs(data / "blobs" / "sha256")
        self.damaged = self._blobs.damaged
        """The digests of the damaged files."""
        self._bundles = Bundles(data / "bundles", self._blobs)
        self.catalog = Catalog()
        self._opened: os.stat_result | None = None  # the folder as it was when it was opened

    @property
    def partial(self) -> Path:
        """Returns the folder for incomplete files. It is made again if it was removed."""
        self.require()
        folder = self.data / "partial"
        make_folder(folder, synced=False)
        return folder

    def require(self) -> None:
        """Raises `FolderMissing` if the folder is gone, or another one is in its place: files there would be hidden
        under the disk that comes back, or lost. Raises `OSError`."""
        if not self._is_there():
            raise FolderMissing(f"the folder {self.data} is not there any more: mount its disk, or put it back")

    def _is_there(self) -> bool:
        try:
            found = os.stat(self.data)
        except (FileNotFoundError, NotADirectoryError):
            return False
        same = self._opened is None or os.path.samestat(found, self._opened)
        return same and (self.is_home or (self.data / FORMAT_FILE).exists())

    def contains(self, path: Path) -> bool:
        """Returns whether `path` is that of a stored file, or of an incomplete one."""
        return path.is_relative_to(self._blobs.folder) or self.waits(path)

    def waits(self, path: Path) -> bool:
        """Returns whether `path` is that of an incomplete file."""
        return path.is_relative_to(self.data / "partial")

    def have(self, digest: Digest) -> Blob | None:
        """Returns the blob; None if it is not here, or the disk fails: another folder may have it."""
        try:
            size = self._blobs.size(digest)
        except OSError:
            return None
        return Blob(digest, size, self._blobs.path(digest)) if size is not None else None

    def has_whole(self, id: Digest) -> bool:
        """Returns whether the model `id` lies here, with a manifest that can be read."""
        entry = self.catalog.entries.get(id)
        return entry is not None and entry.contents is not None

    def manifest(self, entry: Entry) -> bytes:
        with translated("reading the manifest", self.data):
            data = read(entry.id.within(self._records.folder), LARGEST)
        if Digest.of(data) != entry.id:
            raise InvalidModel("its manifest is damaged: pull the model again")
        return data

    def unpacked(self, entry: Entry) -> list[UnpackedFile] | None:
        """Returns the files that were unpacked from the archives of its manifest, None without archives."""
        return self._records.unpacked(entry.id).load()

    def bundle(self, entry: Entry) -> Bundle:
        contents = entry.usable()
        if ready := self._bundles.ready(entry, contents):
            return ready
        with self._lock, translated("laying out the model", self.data):
            self.require()
            return self._bundles.make(entry, contents)

    def missing(self, entry: Entry) -> tuple[Digest, ...]:
        if not entry.id.within(self._records.folder).is_file():
            return (entry.id,)
        return tuple(digest for digest, size in entry.blobs.items() if self._blobs.size(digest) != size)

    def verify(self, entry: Entry, progress: ReadProgress) -> tuple[Digest, ...]:
        found = [digest for digest in entry.blobs if not self.check(digest, progress)]
        with translated("reading the model", self.data):
            if not is_intact(entry.id.within(self._records.folder), entry.id):
                found.append(entry.id)
        return tuple(found)

    def check(self, digest: Digest, progress: ReadProgress) -> bool:
        with translated("reading the model", self.data):
            return self._blobs.check(digest, progress)

    def mark_damaged(self, digest: Digest, stamp: Stamp) -> None:
        with translated("looking at a file of models", self.data):
            if self._blobs.stamp(digest) == stamp:
                self._blobs.damaged.add(digest)

    def stamps(self) -> dict[Digest, Stamp]:
        with translated("looking at the files of models", self.data):
            digests = {digest for entry in self.catalog.entries.values() for digest in entry.blobs}
            return {digest: found for digest in digests if (found := self._blobs.stamp(digest)) is not None}

    def disk_usage(self) -> FolderSize:
        """Returns the disk usage. Reads the folder, which is slow."""
        self.require()
        with translated("measuring the store", self.data):
            free = shutil.disk_usage(self.data).free
            return FolderSize(self.data, self._blobs.total(), size_of(self.partial), free)
