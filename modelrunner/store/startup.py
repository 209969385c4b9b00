"""What happens when a store is opened: its format is checked, what a killed daemon left half done is cleared away, and
the models are looked up."""

import logging
import stat
from pathlib import Path

import msgspec

from modelrunner import durable
from modelrunner.errors import InvalidModel, InvalidReference, StorageFailed
from modelrunner.store import manifests
from modelrunner.store.blobs import Blobs
from modelrunner.store.bundles import Bundles
from modelrunner.store.catalog import Catalog, Entry
from modelrunner.store.digests import Digest
from modelrunner.store.index import Record
from modelrunner.store.references import Reference

FORMAT = 1
log = logging.getLogger(__name__)


def check_format(data: Path) -> bool:
    """True if the store exists, False if it has to be made. Raises `StorageFailed`, with nothing touched, for the store
    of a newer release."""
    try:
        text = (data / "format").read_text("ascii", "replace").strip()
    except FileNotFoundError:
        return False
    if text != str(FORMAT):
        raise StorageFailed(
            f"the store in {data} has the format {text[:20]!r} and this release knows {FORMAT}: it was left untouched; "
            "use the newer release, or set another data directory"
        )
    return True


def load(records: list[Record], manifest_folder: Path, blobs: Blobs) -> Catalog:
    entries = []
    taken: set[Reference] = set()
    for record in records:
        id = _id(record)
        if id is None:
            continue
        tags = [tag for tag in _tags(record) if tag not in taken]
        taken.update(tags)
        entries.append(_entry(id, tuple(tags), record.created, manifest_folder, blobs))
    return Catalog(entries)


def _id(record: Record) -> Digest | None:
    try:
        return Digest.parse(record.id)
    except InvalidReference as error:
        log.error("the index names a model %r: %s", record.id[:80], error.message)
        return None


def _tags(record: Record) -> list[Reference]:
    tags = []
    for text in record.tags:
        try:
            tags.append(Reference.parse(text))
        except InvalidReference as error:
            log.error("a name of the model %s was dropped: %s", record.id, error.message)
    return tags


def _entry(id: Digest, tags: tuple[Reference, ...], created: int, folder: Path, blobs: Blobs) -> Entry:
    try:
        contents = manifests.decode(id.within(folder).read_bytes(), id)
        config = manifests.decode_config(_read_whole(contents.config.digest, blobs))
    except (OSError, msgspec.MsgspecError, InvalidModel, InvalidReference) as error:
        log.error("the model %s (%s) cannot be used: %s", id, ", ".join(map(str, tags)), error)
        return Entry(id, tags, created, {}, None, f"its manifest or configuration cannot be read ({error})")
    return Entry(id, tags, created, config, contents)


def _read_whole(digest: Digest, blobs: Blobs) -> bytes:
    data = blobs.path(digest).read_bytes()
    if Digest.of(data) != digest:
        raise InvalidModel("its configuration is damaged")
    return data


def sweep(catalog: Catalog, data: Path, manifest_folder: Path, blobs: Blobs, bundles: Bundles) -> None:
    """Clears away what creates and removals left that were cut off. Only tidying: failures are logged."""
    try:
        for folder in (data, manifest_folder, blobs.folder):
            durable.sweep_temporaries(folder)
        for id in Digest.among(manifest_folder) - catalog.entries.keys():
            id.within(manifest_folder).unlink()
        for id in Digest.among(bundles.folder) - catalog.entries.keys():
            bundles.remove(id)
        for id in catalog.entries.keys() & Digest.among(bundles.folder):
            bundles.sweep(id)
        _sweep_blobs(catalog, blobs)
        _sweep_shared(data / "partial")
    except OSError as error:
        log.warning("leftovers in %s could not be removed: %s", data, error)


def _sweep_blobs(catalog: Catalog, blobs: Blobs) -> None:
    if any(entry.contents is None for entry in catalog.entries.values()):
        return  # nobody knows what a damaged manifest refers to
    for digest in blobs.all() - {digest for entry in catalog.entries.values() for digest in entry.blobs}:
        blobs.remove(digest)


def _sweep_shared(partial: Path) -> None:
    """Finished downloads that a model has for good: whoever wrote into one of them would write into the store."""
    for path in partial.rglob("*"):
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
            path.unlink()
