"""`index.json`: a copy of all records, manifests and configurations, so that a start reads one file and not three for
each model. Each entry holds the stamps of its files and is valid only while they do not change. A store without the
index, or with a damaged one, reads the files themselves."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from modelrunner.errors import InvalidReference
from modelrunner.jsonfile import JsonFile
from modelrunner.store.catalog import Entry
from modelrunner.store.digests import Digest
from modelrunner.store.manifests import Contents, StoredFile
from modelrunner.store.records import Stamp
from modelrunner.store.references import Reference

_LARGEST = 48 << 20  # bytes, about
_OTHERWISE = 1000  # bytes of an entry beside its configuration, about
_File = tuple[str, int]  # digest as hexadecimal digits, bytes


class _Cached(msgspec.Struct, frozen=True, array_like=True):
    """An entry. `stamps` are those of record, manifest and configuration; `tags` are host, path, tag and revision of
    each."""

    id: str
    stamps: list[Stamp]
    tags: list[tuple[str, str, str, str]]
    created: int
    number: int
    version: int
    config: msgspec.Raw
    config_file: _File
    files: dict[str, _File]
    others: list[_File]


class Index:
    def __init__(self, data: Path) -> None:
        self._file = JsonFile(data / "index.json", list[_Cached], cache=True)
        self._cached: dict[str, _Cached] = {}

    def load(self) -> None:
        """Reads the index. Raises `OSError` only if a damaged index cannot be set aside."""
        self._cached = {each.id: each for each in self._file.load() or ()}

    @property
    def count(self) -> int:
        """Returns the number of models in the loaded index."""
        return len(self._cached)

    def entry(self, id: Digest) -> Entry | None:
        """Returns the model's entry, which is valid while its files have the `stamps`; None for an unknown model."""
        cached = self._cached.get(id.hex)
        try:
            return _entry(id, cached) if cached else None
        except InvalidReference:
            return None

    def stamps(self, id: Digest) -> list[Stamp]:
        """Returns the stamps of a known model."""
        return self._cached[id.hex].stamps

    def save(self, entries: Iterable[tuple[Entry, list[Stamp]]]) -> None:
        """Replaces the index. Leaves out damaged models, and those for which it would grow too large. A failure is
        logged."""
        kept = []
        room = _LARGEST
        for entry, stamps in entries:
            room -= len(entry.config_data) + _OTHERWISE
            if entry.contents and room >= 0:
                kept.append(_cached(entry, entry.contents, stamps))
        self._file.save(kept)

    def clear(self) -> None:
        """Frees the memory of the loaded entries."""
        self._cached = {}


def _entry(id: Digest, cached: _Cached) -> Entry:
    contents = Contents(
        _stored(cached.config_file),
        {name: _stored(file) for name, file in cached.files.items()},
        tuple(map(_stored, cached.others)),
    )
    tags = tuple(Reference(host, path, tag, None, revision) for host, path, tag, revision in cached.tags)
    return Entry(id, tags, cached.created, bytes(cached.config), contents, number=cached.number, version=cached.version)


def _cached(entry: Entry, contents: Contents, stamps: list[Stamp]) -> _Cached:
    return _Cached(
        entry.id.hex,
        stamps,
        [(tag.host, tag.path, tag.tag, tag.revision) for tag in entry.tags],
        entry.created,
        entry.number,
        entry.version,
        msgspec.Raw(entry.config_data),
        _file(contents.config),
        {name: _file(file) for name, file in contents.files.items()},
        [_file(file) for file in contents.others],
    )


def _stored(file: _File) -> StoredFile:
    return StoredFile(Digest(file[0]), file[1])


def _file(stored: StoredFile) -> _File:
    return stored.digest.hex, stored.size
