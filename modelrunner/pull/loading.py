"""Loads models from a tar with an OCI image layout (`store/layout.py`), as modelrunner and skopeo write it, or as
docker/model-runner does, with a manifest.json in place of the index."""

import asyncio
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from modelrunner import durable
from modelrunner.errors import BadRequest, InvalidModel, InvalidReference, SourceFailed
from modelrunner.oci import imageindex
from modelrunner.oci.repository import INDEX_TYPES
from modelrunner.pull.archives import unpack_layers, unpacked_files
from modelrunner.pull.claims import Claim
from modelrunner.pull.source import PullResult
from modelrunner.store import Blob, Digest, Reference, Store, tar
from modelrunner.store.blobs import ReadProgress
from modelrunner.store.files import require_space
from modelrunner.store.layout import BLOBS, INDEX, NAMES
from modelrunner.store.manifests import LARGEST, parse

_BARE_MANIFEST = "manifest.json"  # docker/model-runner's
_MOST_BYTES = 1 << 50
_MOST_MODELS = 100


class _Described(msgspec.Struct, frozen=True, rename="camel"):
    media_type: str
    digest: str
    annotations: dict[str, str] = {}


class _LayoutIndex(msgspec.Struct, frozen=True):
    manifests: list[_Described]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """`name` replaces the archive's name for its one model; `trust` accepts a model that carries code."""

    name: str | None = None
    trust: bool = False


def load(
    store: Store,
    stream: tar.Stream,
    folder: Path,
    options: LoadOptions,
    progress: ReadProgress,
    stop: threading.Event,
    claim: Claim,
) -> list[PullResult]:
    """Stores every model of the archive, once all of its files are here and have their digests. `folder` is an empty
    folder in `Store.partial`; `progress` gets the size of each piece; `claim` takes room in the quota. Blocks. Raises
    `InvalidModel`, `UnsupportedModel`, `InvalidReference`, `InsufficientDisk`, `StorageFailed`."""
    if options.name is not None:
        Reference.parse_name(options.name)  # fails before anything is read
    blobs, documents = _received(store, stream, folder, progress, stop, claim)
    models = dict(_models(blobs, documents))
    if options.name is not None and len(models) > 1:
        raise BadRequest(
            f"the archive holds {len(models)} models: leave `name` out, which applies to one", param="name"
        )
    return [_stored(store, blobs, data, options.name or name, folder, options, stop) for data, name in models.items()]


def _received(
    store: Store, stream: tar.Stream, folder: Path, progress: ReadProgress, stop: threading.Event, claim: Claim
) -> tuple[dict[Digest, Blob], dict[str, bytes]]:
    """Returns the blobs of the archive, and its documents by their names. A blob that the store has is not written
    again."""
    blobs: dict[Digest, Blob] = {}
    documents: dict[str, bytes] = {}
    for member in tar.members(stream, limit=_MOST_BYTES):
        place, _, name = member.name.rpartition("/")
        digest = Digest.named(name) if place == BLOBS else None
        if member.name in (INDEX, _BARE_MANIFEST):
            documents[member.name] = member.content(LARGEST)
        elif digest is not None:
            stored = _intact(store, digest, stop)
            if stored is None:
                claim.require({digest: member.size})
                stored = _written(store, member, digest, folder, progress, stop)
            else:
                progress(member.size)
            blobs[digest] = stored
    return blobs, documents


def _intact(store: Store, digest: Digest, stop: threading.Event) -> Blob | None:
    """Returns the store's blob if its content has the digest."""
    if (blob := store.have(str(digest))) is None:
        return None

    def go_on(count: int) -> None:
        if stop.is_set():
            raise asyncio.CancelledError

    try:
        return store.ingest(blob.path, digest=str(digest), progress=go_on)
    except SourceFailed:
        return None


def _written(
    store: Store, member: tar.Member, digest: Digest, folder: Path, progress: ReadProgress, stop: threading.Event
) -> Blob:
    with durable.translated("loading the archive", folder.parent):
        require_space(folder, member.size)
        path, sha256 = folder / digest.hex, hashlib.sha256()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            for piece in member.pieces():
                if stop.is_set():
                    raise asyncio.CancelledError
                sha256.update(piece)
                file.write(piece)
                progress(len(piece))
        if sha256.hexdigest() != digest.hex:
            raise InvalidModel(f"the archive is damaged: its file {digest} has another content")
        return store.ingest(path, digest=str(digest), hashed=True)


def _models(blobs: Mapping[Digest, Blob], documents: Mapping[str, bytes]) -> Iterator[tuple[bytes, str | None]]:
    """Yields the manifest and the name of each model."""
    if INDEX not in documents:
        if _BARE_MANIFEST not in documents:
            raise InvalidModel(f"the archive holds no models: it has no {INDEX}")
        yield documents[_BARE_MANIFEST], None
        return
    try:
        described = msgspec.json.decode(documents[INDEX], type=_LayoutIndex).manifests
        if not 0 < len(described) <= _MOST_MODELS:
            raise InvalidModel(f"the archive names {len(described)} models; the limit is 1 to {_MOST_MODELS}")
        for each in described:
            data = _document(blobs, Digest.parse(each.digest))
            if each.media_type in INDEX_TYPES:
                data = _document(blobs, imageindex.choose(data))
            yield data, _name(each.annotations)
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidReference, RecursionError) as error:
        raise InvalidModel(f"the archive's index cannot be parsed ({error})") from None


def _document(blobs: Mapping[Digest, Blob], digest: Digest) -> bytes:
    if digest not in blobs:
        raise InvalidModel(f"the archive lacks its file {digest}")
    try:
        return durable.read(blobs[digest].path, LARGEST)
    except durable.UnusableFile:
        raise InvalidModel(f"the archive's manifest {digest} has more than {LARGEST} bytes") from None


def _name(annotations: Mapping[str, str]) -> str | None:
    """Returns the model's name, None without a valid one: skopeo may have written any text there."""
    for key in NAMES:
        try:
            return str(Reference.parse_name(annotations[key]))
        except (KeyError, InvalidReference):
            continue
    return None


def _stored(
    store: Store,
    blobs: Mapping[Digest, Blob],
    manifest: bytes,
    name: str | None,
    folder: Path,
    options: LoadOptions,
    stop: threading.Event,
) -> PullResult:
    parsed = parse(manifest)
    wanted = {layer.stored().digest for layer in (parsed.config, *parsed.layers)}
    if missing := wanted - blobs.keys():
        raise InvalidModel(f"the archive lacks its file {min(missing)}")
    files = {digest.hex: blobs[digest] for digest in wanted}
    unpacked = unpack_layers(parsed, lambda digest: blobs[digest].path, folder, stop)
    files |= {file: store.ingest(path) for file, (path, _) in unpacked.items()}
    origins = {file: origin for file, (_, origin) in unpacked.items()}
    records = unpacked_files(origins, files)
    model = store.create(files, name, trust=options.trust, manifest=manifest, unpacked=records)
    return PullResult(model.id, Reference.parse(name).short if name else model.id)
