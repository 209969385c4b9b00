"""Opening a store: check its format, load its models, and remove what a killed daemon left half done."""

import contextlib
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from modelrunner import durable
from modelrunner.durable import JsonFile
from modelrunner.errors import InvalidModel, InvalidReference, StorageFailed
from modelrunner.store import manifests
from modelrunner.store.blobs import Blobs
from modelrunner.store.bundles import Bundles
from modelrunner.store.catalog import Catalog, Entry
from modelrunner.store.digests import Digest
from modelrunner.store.draft import published_config
from modelrunner.store.index import IndexEntry
from modelrunner.store.manifests import UnpackedFile
from modelrunner.store.references import Reference

FORMAT = 1
_OLD = 7 * 86_400.0  # seconds
_UNPACKED = ".unpacked"
FOLDERS = ("", "manifests", "manifests/sha256", "blobs", "blobs/sha256", "bundles", "partial")
log = logging.getLogger(__name__)


def check_format(data: Path) -> bool:
    """True if the store exists, False if it has to be made. Raises `StorageFailed`, with nothing touched, for the store
    of a newer release, and `OSError`."""
    try:
        text = durable.read(data / "format").decode("ascii", "replace").strip()
    except FileNotFoundError:
        return False
    if text != str(FORMAT):
        raise StorageFailed(
            f"the store in {data} has the format {text[:20]!r} and this release knows {FORMAT}: it was left untouched; "
            "use the newer release, or set another data directory"
        )
    return True


def make_folders(data: Path) -> bool:
    """Makes the folders that are missing. True if anything else lay in the place of one. Raises `OSError`."""
    displaced = [durable.make_folder(data / name) for name in FOLDERS]
    return any(displaced)


def load(records: list[IndexEntry], manifest_folder: Path, blobs: Blobs) -> tuple[Catalog, bool]:
    """The models of the records. True beside it if all records make sense."""
    entries = []
    taken: set[Reference] = set()
    sound = True
    for record in records:
        id = _id(record)
        if id is None:
            sound = False
            continue
        tags = [tag for tag in _tags(record) if tag not in taken]
        sound = sound and len(tags) == len(record.tags)
        taken.update(tags)
        entries.append(_entry(id, tuple(tags), record.created, manifest_folder, blobs))
    return Catalog(entries), sound


def _id(record: IndexEntry) -> Digest | None:
    try:
        return Digest.parse(record.id)
    except InvalidReference as error:
        log.error("the index names a model %r: %s", record.id[:80], error.message)
        return None


def _tags(record: IndexEntry) -> list[Reference]:
    tags = []
    for text in record.tags:
        try:
            tags.append(Reference.parse(text))
        except InvalidReference as error:
            log.error("a name of the model %s was dropped: %s", record.id, error.message)
    return tags


def _entry(id: Digest, tags: tuple[Reference, ...], created: int, folder: Path, blobs: Blobs) -> Entry:
    try:
        unpacked = unpacked_file(folder, id).load()
        contents = manifests.decode(durable.read(id.within(folder), manifests.LARGEST), id, unpacked)
        data = durable.read(blobs.path(contents.config.digest), manifests.LARGEST)
        if Digest.of(data) != contents.config.digest:
            raise InvalidModel("its configuration is damaged")
        return Entry(id, tags, created, published_config(data, contents), contents)
    except (OSError, msgspec.MsgspecError, InvalidModel, InvalidReference) as error:
        log.error("the model %s (%s) cannot be used: %s", id, ", ".join(map(str, tags)), error)
        return Entry(id, tags, created, {}, None, f"its manifest or configuration cannot be read ({error})")


def unpacked_file(folder: Path, id: Digest) -> JsonFile[list[UnpackedFile]]:
    """Says which files were unpacked from the archives of a model; it lies beside its manifest."""
    return JsonFile(folder / f"{id.hex}{_UNPACKED}", list[UnpackedFile])


def sweep(catalog: Catalog, data: Path, manifest_folder: Path, blobs: Blobs, bundles: Bundles) -> None:
    """Removes what creates and removals that were cut off have left. Only for a store in which nothing damaged was met.
    Failures are logged."""
    models = catalog.entries.keys()
    for folder in (data, manifest_folder, blobs.folder):
        with _tidying(folder):
            durable.sweep_temporaries(folder)
    for id in Digest.among(bundles.folder):
        with _tidying(id.within(bundles.folder)):
            bundles.sweep(id) if id in models else bundles.remove(id)
    for path in unnamed(catalog, manifest_folder, blobs):
        with _tidying(path):
            durable.discard(path)
    with _tidying(data / "partial"):
        _sweep_shared(data / "partial")
        _sweep_old(data / "partial")


def unnamed(catalog: Catalog, manifest_folder: Path, blobs: Blobs) -> list[Path]:
    """The manifests and blobs that no model names. No blobs, while the manifest of a model is damaged: it is unknown
    what that one names."""
    found = [id.within(manifest_folder) for id in Digest.among(manifest_folder) - catalog.entries.keys()]
    known = {id.hex for id in catalog.entries}
    found += [path for path in manifest_folder.glob(f"*{_UNPACKED}") if path.stem not in known]
    if catalog.is_sound:
        used = {digest for entry in catalog.entries.values() for digest in entry.blobs}
        found += [blobs.path(digest) for digest in blobs.all() - used]
    return sorted(found)


@contextlib.contextmanager
def _tidying(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.warning("leftovers in %s could not be removed: %s", path, error)


def _sweep_shared(partial: Path) -> None:
    """Removes finished downloads that a model shares: whoever wrote into one of them would write into the store."""
    for path in partial.rglob("*"):
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
            path.unlink()


def _sweep_old(partial: Path) -> None:
    """Removes the unfinished downloads that nothing was written to for a week."""
    for path in partial.iterdir():
        newest = max(os.lstat(place).st_mtime for place in (path, *path.rglob("*")))
        if time.time() - newest > _OLD:
            log.info("removing an unfinished download of a week ago: %s", path)
            durable.discard(path)
