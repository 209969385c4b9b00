"""Manifests and configurations: OCI image manifests with the media types of models.

We write docker/model-runner's version 0.2: a layer for each file, whose name in the bundle is in an annotation. We also
read the manifests of other publishers: version 0.1, whose layers have no names; names of version 0.2 that are not ours;
ModelPack. There a layer's media type gives its kind.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

import msgspec

from modelrunner import lora
from modelrunner.defaults import ModelDefaults
from modelrunner.errors import InvalidModel, InvalidReference
from modelrunner.store import foreignformats
from modelrunner.store.digests import Digest
from modelrunner.store.mediatypes import (
    CONFIG_TYPE,
    CONFIG_TYPES,
    FILE_PATHS,
    FOREIGN_CONFIG_TYPES,
    LICENSE_TYPE,
    MANIFEST_TYPE,
    TITLE,
    UNPACK,
    LayerKind,
    LayerUse,
    kind_of_file,
    layer_of,
    media_type_of,
)
from modelrunner.store.names import CONFIG, PROJECTOR, TEMPLATE, in_folder

DEFAULTS = "defaults"
"""The key of a configuration under which a model carries its `ModelDefaults`."""
LARGEST = 4 << 20  # bytes of a manifest or a configuration
MOST_LAYERS = 4096


class StoredFile(msgspec.Struct, frozen=True, gc=False):
    digest: Digest
    size: int


class Contents(msgspec.Struct, frozen=True):
    """The contents of a model. `files` are by their names in the bundle, with the file that engines open first;
    `others` belong to the published model and are not in the bundle (licences, README, archives)."""

    config: StoredFile
    files: dict[str, StoredFile]
    others: tuple[StoredFile, ...] = ()

    @property
    def blobs(self) -> dict[Digest, int]:
        """Returns every blob with its size in bytes."""
        return {file.digest: file.size for file in (self.config, *self.files.values(), *self.others)}

    @property
    def digest(self) -> str:
        """Returns `Bundle.digest`."""
        named = [(name, str(file.digest)) for name, file in self.files.items()]
        return "sha256:" + sha256(msgspec.json.encode(named)).hexdigest()


class Descriptor(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """OCI's content descriptor."""

    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] = {}

    def stored(self) -> StoredFile:
        if not 0 <= self.size < 1 << 62:
            raise InvalidReference("a size is from 0 to 2^62")
        return StoredFile(Digest.parse(self.digest), self.size)

    @property
    def path(self) -> str:
        """Returns the name that its file was published with, "" for none."""
        return next((self.annotations[key] for key in FILE_PATHS if key in self.annotations), self._title)

    @property
    def _title(self) -> str:
        """Returns the name of a model's file that ORAS has published, "" for any other layer."""
        title = self.annotations.get(TITLE, "")
        return title if is_wanted(title) and self.annotations.get(UNPACK) != "true" else ""

    @property
    def use(self) -> LayerUse:
        use = layer_of(self.media_type, self.path)
        is_file = self._title and use.kind in (LayerKind.ARCHIVE, LayerKind.OTHER)  # ORAS calls every file a tar
        return LayerUse(kind_of_file(self._title)) if is_file else use


class Manifest(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """OCI's image manifest."""

    schema_version: Literal[2]
    media_type: str = ""
    config: Descriptor
    layers: list[Descriptor]


class UnpackedFile(msgspec.Struct, frozen=True):
    """A file from a model's archive: the `layer` is the archive's digest, `path` the file's name in it, `digest` and
    `size` (bytes) the file's own."""

    layer: str
    path: str
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """A file of a model: a layer, or a file from one."""

    kind: LayerKind
    path: str
    file: StoredFile


class _ConfigBlob(msgspec.Struct, frozen=True):
    """Our configuration blob. `descriptor` is empty: a time of creation in it would give one model a new ID at every
    pull."""

    config: dict[str, Any]
    descriptor: dict[str, Any] = {}
    rootfs: dict[str, Any] = {}


def encode_config(config: dict[str, Any], files: dict[str, StoredFile]) -> bytes:
    diffs = [str(file.digest) for file in files.values()]
    return msgspec.json.encode(_ConfigBlob(config, {}, {"type": "rootfs", "diff_ids": diffs}))


def decode_config(data: bytes) -> dict[str, Any]:
    """Returns a published configuration under docker's names, with the model's `defaults` in our form. Raises
    `msgspec.ValidationError` or `msgspec.DecodeError`."""
    config = msgspec.json.decode(data, type=_ConfigBlob).config
    if DEFAULTS in config:
        ModelDefaults.parse(config[DEFAULTS])
    if "paramSize" in config:  # ModelPack's word
        config.setdefault("parameters", config["paramSize"])
    return config


def encode(contents: Contents) -> bytes:
    """Returns the manifest. Equal contents give equal bytes, hence one model ID. The `others` are licences."""
    config = Descriptor(CONFIG_TYPE, str(contents.config.digest), contents.config.size)
    layers = [
        Descriptor(media_type_of(name), str(file.digest), file.size, {FILE_PATHS[0]: name})
        for name, file in contents.files.items()
    ]
    layers += [Descriptor(LICENSE_TYPE, str(file.digest), file.size) for file in contents.others]
    return msgspec.json.encode(Manifest(schema_version=2, media_type=MANIFEST_TYPE, config=config, layers=layers))


def parse(data: bytes) -> Manifest:
    """Parses a manifest. Raises `InvalidModel` for invalid data, or the manifest of something other than a model."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        for descriptor in (manifest.config, *manifest.layers):
            descriptor.stored()
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidReference, RecursionError) as error:
        raise InvalidModel(f"its manifest cannot be parsed ({error})") from None
    if manifest.config.media_type not in CONFIG_TYPES | FOREIGN_CONFIG_TYPES:
        raise InvalidModel(f"its configuration has the unknown media type {manifest.config.media_type[:80]!r}")
    if len(manifest.layers) > MOST_LAYERS:
        raise InvalidModel(f"its manifest names {len(manifest.layers)} layers; the most allowed are {MOST_LAYERS}")
    return manifest


def archives(manifest: Manifest) -> dict[Digest, str]:
    """Returns the layers whose files must be unpacked, and their compression ("gzip" or "" for none). Raises
    `InvalidModel` for one that cannot be unpacked."""
    names = {}
    for layer in manifest.layers:
        kind, packed = layer.use
        if packed == "zstd":
            raise InvalidModel(
                f"its layer {layer.media_type} is compressed with zstd, which is not supported: publish it as tar or"
                " tar+gzip"
            )
        if kind is LayerKind.ARCHIVE:
            names[layer.stored().digest] = packed
    return names


def is_wanted(path: str) -> bool:
    """Returns whether a file of this name in an archive can be a part of a model."""
    return in_folder(path) or kind_of_file(path) in (LayerKind.GGUF, LayerKind.PROJECTOR)


def decode(data: bytes, digest: Digest, unpacked: Sequence[UnpackedFile] | None = None) -> Contents:
    """Returns the contents. `unpacked` are the files from its archives, None if these were not unpacked. Raises
    `InvalidModel` unless `data` has that digest and is the manifest of a model that can be used."""
    if Digest.of(data) != digest:
        raise InvalidModel("its manifest is damaged")
    manifest = parse(data)
    if unpacked is None and archives(manifest):
        raise InvalidModel("it holds archives whose files are missing")
    pieces = list(_pieces(manifest.layers, unpacked or ()))
    gguf = any(piece.kind is LayerKind.GGUF for piece in pieces)
    named = _gguf_files(pieces) if gguf else _folder_files(pieces)
    files = dict(named)
    if not files or len(files) != len(named):
        raise InvalidModel("its manifest names no usable file, or one name twice")
    used = {file.digest for file in files.values()}
    layers = [layer.stored() for layer in manifest.layers]
    return Contents(manifest.config.stored(), files, tuple(layer for layer in layers if layer.digest not in used))


def _pieces(layers: Iterable[Descriptor], unpacked: Sequence[UnpackedFile]) -> Iterable[_Piece]:
    for layer in layers:
        kind = layer.use.kind
        if kind is not LayerKind.ARCHIVE:
            yield _Piece(kind, layer.path, layer.stored())
        for file in unpacked:
            if kind is LayerKind.ARCHIVE and file.layer == layer.digest:
                yield _Piece(kind_of_file(file.path), file.path, StoredFile(Digest.parse(file.digest), file.size))


def _gguf_files(pieces: Sequence[_Piece]) -> list[tuple[str, StoredFile]]:
    """Returns the files, named by their kind; shards are in the order of their names, or of the manifest if they have
    none."""
    weights = sorted(_of(pieces, LayerKind.GGUF), key=lambda piece: piece.path)
    count = len(weights)
    names = ["model.gguf"] if count == 1 else [f"model-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]
    named = [(name, piece.file) for name, piece in zip(names, weights, strict=True)]
    named += [(PROJECTOR, piece.file) for piece in _of(pieces, LayerKind.PROJECTOR)]
    named += [(TEMPLATE, piece.file) for piece in _of(pieces, LayerKind.TEMPLATE)]
    for number, piece in enumerate(_of(pieces, LayerKind.ADAPTER), 1):
        is_named = lora.name_and_scale(piece.path) and "/" not in piece.path
        named.append((piece.path if is_named else f"lora-{number}.gguf", piece.file))
    return named


def _folder_files(pieces: Sequence[_Piece]) -> list[tuple[str, StoredFile]]:
    """Returns the files, named as they were published, or by their kind if they have no names. A layer whose name is
    not that of a model's file is left out: only such a name becomes a path."""
    named = [(piece.path, piece.file) for piece in _of(pieces, LayerKind.FILE)]
    named += [(piece.path or TEMPLATE, piece.file) for piece in _of(pieces, LayerKind.TEMPLATE)]
    weights = _of(pieces, LayerKind.SAFETENSORS)
    nameless = [piece for piece in weights if not piece.path]
    named += [(piece.path, piece.file) for piece in weights if piece.path]
    for number, piece in enumerate(nameless, 1):
        shard = f"model-{number:05}-of-{len(nameless):05}.safetensors"
        named.append(("model.safetensors" if len(nameless) == 1 else shard, piece.file))
    return sorted(
        (
            (name, file)
            for name, file in named
            if in_folder(name) or lora.name_and_scale(name) or foreignformats.is_file(name)
        ),
        key=lambda item: (item[0] != CONFIG, item[0]),
    )


def _of(pieces: Iterable[_Piece], kind: LayerKind) -> list[_Piece]:
    return [piece for piece in pieces if piece.kind is kind]
