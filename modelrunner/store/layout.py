"""A model as one archive: a tar with an OCI image layout (image-layout.md of opencontainers/image-spec), which skopeo
calls `oci-archive`. The same model under the same name always gives the same bytes."""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import msgspec

from modelrunner.errors import InvalidModel, StorageFailed
from modelrunner.store.digests import Digest
from modelrunner.store.files import open_regular
from modelrunner.store.manifests import parse
from modelrunner.store.mediatypes import MANIFEST_TYPE
from modelrunner.store.store import Store

INDEX, LAYOUT, BLOBS = "index.json", "oci-layout", "blobs/sha256"
NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
"""The annotations of a descriptor that hold a model's name, the better one first."""
_PIECE = 1 << 20
_END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True, slots=True)
class ModelArchive:
    """The archive of one model. `members` are its files in their order: the name, and the content or its path; `sizes`
    are their lengths in bytes."""

    model_id: str
    members: tuple[tuple[str, bytes | Path], ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Returns the bytes of the whole archive."""
        return sum(tarfile.BLOCKSIZE + size + -size % tarfile.BLOCKSIZE for size in self.sizes) + len(_END)

    def pieces(self) -> Iterator[bytes]:
        """Yields the archive in blocks. Raises `StorageFailed` for a file that was removed or cut meanwhile,
        `OSError`."""
        for (name, content), size in zip(self.members, self.sizes, strict=True):
            yield _header(name, size)
            with BytesIO(content) if isinstance(content, bytes) else open_regular(content) as file:
                yield from _exactly(file, name, size)
            if padding := -size % tarfile.BLOCKSIZE:
                yield bytes(padding)
        yield _END


def archive_of(store: Store, text: str) -> ModelArchive:
    """Returns the archive of the model `text`, under that name, or under its first name if `text` is an ID. Raises the
    errors of `Store.manifest`, and `InvalidModel` if a file is missing or damaged."""
    manifest, model = store.manifest(text), store.get(text)
    parsed = parse(manifest)
    blobs: dict[Digest, Path] = {}
    sizes: dict[Digest, int] = {}
    for descriptor in (parsed.config, *parsed.layers):
        blob = store.have(descriptor.digest)
        if blob is None or blob.size != descriptor.size:
            raise InvalidModel(f"its file {descriptor.digest} is missing or damaged: pull the model again")
        blobs[blob.digest], sizes[blob.digest] = blob.path, blob.size
    name = store.whole(text)[1] if text in model.tags else next(iter(model.tags), None)
    described = {"mediaType": MANIFEST_TYPE, "digest": model.id, "size": len(manifest)}
    annotations = {"annotations": {NAMES[1]: name}} if name else {}
    index = {"schemaVersion": 2, "manifests": [described | annotations]}
    ordered = sorted(blobs, key=lambda digest: (sizes[digest], digest))
    members: list[tuple[str, bytes | Path]] = [
        (LAYOUT, b'{"imageLayoutVersion":"1.0.0"}'),
        (INDEX, msgspec.json.encode(index)),
        (f"{BLOBS}/{model.id.partition(':')[2]}", manifest),
        *((f"{BLOBS}/{digest.hex}", blobs[digest]) for digest in ordered),
    ]
    small = tuple(len(content) for _, content in members[:3] if isinstance(content, bytes))
    return ModelArchive(model.id, tuple(members), (*small, *(sizes[digest] for digest in ordered)))


def _header(name: str, size: int) -> bytes:
    """Returns one block, whatever the size: GNU's form has large sizes in binary."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.GNU_FORMAT)


def _exactly(file: BinaryIO, name: str, size: int) -> Iterator[bytes]:
    left = size
    while left and (piece := file.read(min(_PIECE, left))):
        left -= len(piece)
        yield piece
    if left:
        raise StorageFailed(f"{name} became shorter while it was read: `modelrunner verify` shows its model")
