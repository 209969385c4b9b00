"""Bundles: `bundles/HEX/` holds a model's files as hard links under the names that engines expect, and its parsed
header. All of it can be made again from the blobs, so nothing is synced, and all is checked before it is used."""

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec

from modelrunner import durable
from modelrunner.errors import InvalidModel
from modelrunner.store import formats
from modelrunner.store.blobs import Blobs
from modelrunner.store.catalog import Entry
from modelrunner.store.digests import Digest
from modelrunner.store.manifests import Contents, StoredFile
from modelrunner.types import Bundle, ModelHeader

_HEADER = "header"
_DECODER = msgspec.msgpack.Decoder(ModelHeader)


class Bundles:
    def __init__(self, folder: Path, blobs: Blobs) -> None:
        self.folder = folder
        self._blobs = blobs
        self._made: dict[Digest, Bundle] = {}

    def ready(self, entry: Entry, contents: Contents) -> Bundle | None:
        """The bundle if it was made before in this process and its files are still in place; a few microseconds."""
        bundle = self._made.get(entry.id)
        if bundle is None or not self._in_place(entry.id, contents):
            return None
        names = tuple(entry.names)
        return bundle if bundle.references == names else replace(bundle, references=names)

    def make(self, entry: Entry, contents: Contents) -> Bundle:
        """Puts in place what is missing or damaged. Raises `InvalidModel` if a blob is, and `OSError`."""
        self.lay_out(entry.id, contents)
        header = self._remembered(entry.id) or self._parse(entry.id, contents)
        bundle = self._describe(entry, contents, header)
        self._made[entry.id] = bundle
        return bundle

    def lay_out(self, id: Digest, contents: Contents) -> None:
        """Raises `InvalidModel` for a blob that is missing or of another size than its manifest says."""
        folder = id.within(self.folder)
        folder.mkdir(mode=0o700, exist_ok=True)
        for name, file in contents.files.items():
            if self._blobs.size(file.digest) != file.size:
                raise InvalidModel(f"its file {name} ({file.digest}) is missing or damaged: pull the model again")
            if not self._is_linked(folder / name, file):
                (folder / name).parent.mkdir(mode=0o700, exist_ok=True)
                # Over whatever is there: the blob may have been replaced by a healthy one.
                temporary = durable.temporary_name(folder / name)
                os.link(self._blobs.path(file.digest), temporary)
                os.rename(temporary, folder / name)

    def remember(self, id: Digest, header: ModelHeader) -> None:
        """Keeps the parsed header beside the files, so that no later load parses it."""
        data = msgspec.msgpack.encode(header)
        (id.within(self.folder) / _HEADER).write_bytes(hashlib.sha256(data).digest() + data)

    def remove(self, id: Digest) -> None:
        self._made.pop(id, None)
        shutil.rmtree(id.within(self.folder), ignore_errors=True)

    def sweep(self, id: Digest) -> None:
        """Removes what a writer that was killed left in the bundle."""
        folder = id.within(self.folder)
        for place in (folder, *filter(Path.is_dir, folder.iterdir())):
            durable.sweep_temporaries(place)

    def _in_place(self, id: Digest, contents: Contents) -> bool:
        folder = id.within(self.folder)
        return all(self._is_linked(folder / name, file) for name, file in contents.files.items())

    def _is_linked(self, link: Path, file: StoredFile) -> bool:
        try:
            found, blob = os.lstat(link), os.lstat(self._blobs.path(file.digest))
        except FileNotFoundError:
            return False
        return os.path.samestat(found, blob) and found.st_size == file.size

    def _remembered(self, id: Digest) -> ModelHeader | None:
        try:
            content = (id.within(self.folder) / _HEADER).read_bytes()
        except FileNotFoundError:
            return None
        digest, data = content[:32], content[32:]
        if hashlib.sha256(data).digest() != digest:
            return None
        try:
            return _DECODER.decode(data)
        except msgspec.MsgspecError:  # of another release
            return None

    def _parse(self, id: Digest, contents: Contents) -> ModelHeader:
        folder = id.within(self.folder)
        header = formats.reader_of(contents.files).read({name: folder / name for name in contents.files}).header
        self.remember(id, header)
        return header

    def _describe(self, entry: Entry, contents: Contents, header: ModelHeader) -> Bundle:
        folder, reader = entry.id.within(self.folder), formats.reader_of(contents.files)
        return Bundle(
            model_id=str(entry.id),
            references=tuple(entry.names),
            format=formats.format_of(contents.files),
            directory=folder,
            files={name: folder / name for name in contents.files},
            header=header,
            size=sum(file.size for file in contents.files.values()),
            context_length=reader.context_length(header),
            capabilities=reader.capabilities(header, contents.files),
        )
