"""Opens a store: its format, its folders, and its models."""

import gc
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from modelrunner import durable
from modelrunner.errors import InvalidModel, InvalidReference, StorageFailed
from modelrunner.store import manifests
from modelrunner.store.blobs import Blobs
from modelrunner.store.catalog import Catalog, Entry
from modelrunner.store.digests import Digest
from modelrunner.store.draft import published_config
from modelrunner.store.index import Index
from modelrunner.store.records import Records, Stamp, migrate_first, stamp, without_stolen

FORMAT, FORMAT_FILE = 2, "format"
FOLDERS = ("", "manifests", "manifests/sha256", "blobs", "blobs/sha256", "bundles", "partial")
_NOTHING: Stamp = (-1, 0, 0)
log = logging.getLogger(__name__)


def check_format(data: Path) -> int:
    """Returns the format of the store, 0 for a new one. Raises `StorageFailed`, with nothing touched, for the store of
    a newer release, and `OSError`."""
    try:
        text = durable.read(data / FORMAT_FILE).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return 0
    if not (text.isdecimal() and 1 <= int(text[:9]) <= FORMAT):
        raise StorageFailed(
            f"the store in {data} has the format {text[:20]!r} and this release knows {FORMAT}: it was left untouched; "
            "use the newer release, or set another data directory"
        )
    return int(text)


def make_folders(data: Path) -> None:
    """Makes the folders that are missing. Raises `OSError`."""
    for name in FOLDERS:
        durable.make_folder(data / name)


def upgrade(data: Path, format: int, records: Records) -> None:
    """Brings a store of an older `format`, or a new one, to `FORMAT`. If it is killed, it is done again. Raises
    `OSError`."""

    def blobs(id: Digest) -> Iterable[Digest]:
        try:
            return _contents(records, id).blobs
        except (OSError, InvalidModel):
            return ()

    if format == 1:
        migrate_first(data, records, blobs)
    if format < FORMAT:
        durable.write(data / FORMAT_FILE, f"{FORMAT}\n".encode())


def load(records: Records, index: Index, blobs: Blobs) -> tuple[Catalog, set[Digest], set[Digest]]:
    """Returns the models; those whose records still hold a tag that belongs to another model; and those with a pending
    record. Reads only files that the index does not know. Raises `OSError`."""
    collects = gc.isenabled()
    gc.disable()  # none of this is garbage, and a search through so many new objects would double the time
    try:
        return _load(records, index, blobs)
    finally:
        if collects:
            gc.enable()


def _load(records: Records, index: Index, blobs: Blobs) -> tuple[Catalog, set[Digest], set[Digest]]:
    index.load()
    entries: dict[Digest, Entry] = {}
    stamps: dict[Digest, list[Stamp]] = {}
    fresh = 0
    recorded = records.find()
    with durable.opened_folder(blobs.folder) as folder:
        for id, files in recorded.items():
            if files.pending and files.record is None:
                continue
            entry = index.entry(id)
            config = entry.contents.config.digest.hex if entry and entry.contents else None
            seen = [files.record or _NOTHING, files.manifest or _NOTHING, _stamp(folder, config)]
            if entry is None or index.stamps(id) != seen:
                entry = _read(records, blobs, id)
                fresh += entry.contents is not None
                config = entry.contents.config.digest.hex if entry.contents else None
                seen = [_stamped(records.path(id)), _stamped(id.within(records.folder)), _stamp(folder, config)]
            entries[id], stamps[id] = entry, seen
    owned = without_stolen({id: (entry.version, entry.tags) for id, entry in entries.items()})
    robbed = {id for id, entry in entries.items() if len(entry.tags) != len(owned[id])}
    for id in robbed:
        entries[id] = replace(entries[id], tags=owned[id])
    listed = sorted(entries.values(), key=lambda entry: (entry.number, entry.created, entry.id))
    if fresh or index.count > len(entries):
        index.save((entry, stamps[entry.id]) for entry in listed)
    index.clear()
    return Catalog(listed), robbed, {id for id, files in recorded.items() if files.pending}


def _stamp(folder: int, blob: str | None) -> Stamp:
    return _stamped(blob, folder) if blob else _NOTHING


def _stamped(path: Path | str, folder: int | None = None) -> Stamp:
    try:
        return stamp(os.stat(path, dir_fd=folder, follow_symlinks=False))
    except FileNotFoundError:
        return _NOTHING


def _read(records: Records, blobs: Blobs, id: Digest) -> Entry:
    record = records.read(id) or records.recover(id)
    tags = record.references()
    entry = Entry(id, tags, record.created, b"{}", None, number=record.number, version=record.version)
    try:
        contents = _contents(records, id)
        data = durable.read(blobs.path(contents.config.digest), manifests.LARGEST)
        if Digest.of(data) != contents.config.digest:
            raise InvalidModel("its configuration is damaged")
        return replace(entry, config_data=published_config(data, contents), contents=contents)
    except (OSError, msgspec.MsgspecError, InvalidModel, InvalidReference) as error:
        log.error("the model %s (%s) cannot be used: %s", id, ", ".join(map(str, tags)), error)
        damage = f"its manifest or configuration cannot be read ({error})"
        return replace(entry, damage=damage, remembered=record.digests())


def _contents(records: Records, id: Digest) -> manifests.Contents:
    data = durable.read(id.within(records.folder), manifests.LARGEST)
    return manifests.decode(data, id, records.unpacked(id).load())
