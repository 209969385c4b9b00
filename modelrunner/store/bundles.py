"""Bundles: `bundles/HEX/` holds hard links to a model's files, under the names that engines expect, and its parsed
header. All of it can be made again from the blobs. So nothing is synced, everything is checked before it is used, and
damaged files are replaced."""

import hashlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from modelrunner import durable
from modelrunner.defaults import NO_DEFAULTS, ModelDefaults
from modelrunner.errors import InvalidModel
from modelrunner.store import adapters, formats
from modelrunner.store.blobs import Blobs
from modelrunner.store.catalog import Entry
from modelrunner.store.digests import Digest
from modelrunner.store.manifests import Contents, StoredFile
from modelrunner.types import Bundle, ModelHeader

_HEADER = "header"
_MOST_HELD = 64 << 20  # bytes of headers, as they are on disk, whose bundles are held in memory
_LEAST_HELD = 1 << 16  # bytes that count for a bundle beside its header
_DECODER = msgspec.msgpack.Decoder(ModelHeader)


class Bundles:
    def __init__(self, folder: Path, blobs: Blobs) -> None:
        self.folder = folder
        self._blobs = blobs
        self._cached: dict[Digest, tuple[Bundle, int]] = {}  # each with the bytes of its header, the oldest first

    def ready(self, entry: Entry, contents: Contents) -> Bundle | None:
        """Returns the bundle, if this process has made it before and its files are still in place. Takes
        microseconds."""
        bundle, _ = self._cached.get(entry.id, (None, 0))
        if bundle is None or not self._in_place(entry.id, contents):
            return None
        names = tuple(entry.names)
        return bundle if bundle.references == names else replace(bundle, references=names)

    def found(self, entry: Entry, contents: Contents) -> Bundle | None:
        """Returns the bundle, if another process has made it and this one may read it. Changes nothing. Raises
        `OSError`."""
        folder = entry.id.within(self.folder)
        if not self._in_place(entry.id, contents) or not all(os.access(folder / n, os.R_OK) for n in contents.files):
            return None
        header = self._remembered(entry.id)
        return self._describe(entry, contents, header) if header is not None else None

    def make(self, entry: Entry, contents: Contents) -> Bundle:
        """Lays the model out and parses its header, if that was not done before. Raises `InvalidModel` if a blob is
        missing or damaged, and `OSError`."""
        self.lay_out(entry.id, contents)
        header = self._remembered(entry.id) or self._parse(entry.id, contents)
        bundle = self._describe(entry, contents, header)
        self._hold(entry.id, bundle)
        return bundle

    def _hold(self, id: Digest, bundle: Bundle) -> None:
        self.forget(id)
        self._cached[id] = bundle, _LEAST_HELD + os.path.getsize(id.within(self.folder) / _HEADER)
        while len(self._cached) > 1 and sum(size for _, size in self._cached.values()) > _MOST_HELD:
            self.forget(next(iter(self._cached)))

    def forget(self, id: Digest) -> None:
        """Frees the memory of the bundle."""
        self._cached.pop(id, None)

    def lay_out(self, id: Digest, contents: Contents) -> None:
        """Links the model's files. Raises `InvalidModel` for a blob that is missing or of another size than in its
        manifest, `OSError`."""
        folder = id.within(self.folder)
        for name, file in contents.files.items():
            if self._blobs.size(file.digest) != file.size:
                raise InvalidModel(f"its file {name} ({file.digest}) is missing or damaged: pull the model again")
            if not self._is_linked(folder / name, file):
                self._make_folders(folder, (folder / name).parent)
                # Replaces the present link: a healthy blob may have replaced a damaged one.
                _clear(folder / name)
                temporary = durable.temporary_name(folder)  # beside the bundle, where the next start finds it
                os.link(self._blobs.path(file.digest), temporary)
                os.rename(temporary, folder / name)

    def remember(self, id: Digest, header: ModelHeader) -> None:
        """Keeps the parsed header beside the files, so that no later load parses it. Raises `OSError`."""
        data = msgspec.msgpack.encode(header)
        folder = id.within(self.folder)
        self._make_folders(folder)
        _clear(folder / _HEADER)
        durable.write(folder / _HEADER, hashlib.sha256(data).digest() + data, synced=False)

    def _make_folders(self, *folders: Path) -> None:
        """Makes the folders. Any other file in the place of a folder is removed, because a bundle can be made again."""
        for place in (self.folder, *folders):
            if place.is_symlink() or not place.is_dir():
                durable.discard(place)
                place.mkdir(mode=0o700)

    def remove(self, id: Digest) -> None:
        """Raises `OSError`."""
        self.forget(id)
        durable.discard(id.within(self.folder))

    def _in_place(self, id: Digest, contents: Contents) -> bool:
        folder = id.within(self.folder)
        return all(self._is_linked(folder / name, file) for name, file in contents.files.items())

    def _is_linked(self, link: Path, file: StoredFile) -> bool:
        try:
            link_status, blob = os.lstat(link), os.lstat(self._blobs.path(file.digest))
        except (FileNotFoundError, NotADirectoryError):
            return False
        healthy = file.digest not in self._blobs.damaged
        return healthy and os.path.samestat(link_status, blob) and link_status.st_size == file.size

    def _remembered(self, id: Digest) -> ModelHeader | None:
        try:
            content = durable.read(id.within(self.folder) / _HEADER)
        except (FileNotFoundError, durable.UnusableFile):
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
        files = {name: folder / name for name in contents.files}
        trained = reader.context_length(header)
        return Bundle(
            model_id=str(entry.id),
            references=tuple(entry.names),
            format=formats.format_of(contents.files),
            directory=folder,
            files=files,
            header=header,
            size=sum(file.size for file in contents.files.values()),
            context_length=trained,
            capabilities=reader.capabilities(header, contents.files),
            brings_code=reader.brings_code(files),
            adapters=adapters.among(files),
            defaults=_defaults(entry.config_data, trained),
            digest=contents.digest,
        )


class _Carrier(msgspec.Struct):
    defaults: ModelDefaults = NO_DEFAULTS
    context_size: Any = None


def _defaults(config: bytes, trained: int | None) -> ModelDefaults | None:
    """Returns the model's defaults. docker/model-runner publishes the context size that a model asks for as
    `context_size`; we publish the `trained` length there, so a value that is not below it asks for nothing."""
    carrier = msgspec.json.decode(config, type=_Carrier)
    defaults, context_size = carrier.defaults, carrier.context_size
    if defaults.context_size is None and type(context_size) is int and 0 < context_size < (trained or sys.maxsize):
        defaults = msgspec.structs.replace(defaults, context_size=context_size)
    return defaults if defaults != NO_DEFAULTS else None


def _clear(path: Path) -> None:
    """Removes a folder that lies in the place of a file, which a rename would not replace."""
    if path.is_dir() and not path.is_symlink():
        durable.discard(path)
