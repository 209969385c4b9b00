"""Manifests and configurations: OCI image manifests with docker/model-runner's media types.

We write version 0.2: a layer for each file, whose name in the bundle is in an annotation. We also read what docker
publishes: version 0.1, whose layers have no names, and names of version 0.2 that are not ours. There a layer's media
type says what it is.
"""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from modelrunner.errors import InvalidModel, InvalidReference
from modelrunner.store.digests import Digest
from modelrunner.store.names import CONFIG, PROJECTOR, TEMPLATE, WEIGHTS, in_folder, is_gguf

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
LARGEST = 1 << 20  # bytes of a manifest or a configuration
CONFIG_TYPE = "application/vnd.docker.ai.model.config.v0.2+json"
_CONFIG_TYPES = (CONFIG_TYPE, "application/vnd.docker.ai.model.config.v0.1+json")
GGUF_TYPE = "application/vnd.docker.ai.gguf.v3"
PROJECTOR_TYPE = "application/vnd.docker.ai.mmproj"
SAFETENSORS_TYPE = "application/vnd.docker.ai.safetensors"
FILE_TYPE = "application/vnd.docker.ai.model.file"
TEMPLATE_TYPE = "application/vnd.docker.ai.chat.template.jinja"
FILE_PATH = "org.cncf.model.filepath"


@dataclass(frozen=True, slots=True)
class StoredFile:
    digest: Digest
    size: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What a model consists of. `files` are by their names in the bundle, the one that engines open comes first;
    `others` belong to the model as it was published and are not in the bundle (licences, README)."""

    config: StoredFile
    files: dict[str, StoredFile]
    others: tuple[StoredFile, ...] = ()

    @property
    def blobs(self) -> dict[Digest, int]:
        """Every blob with its size in bytes."""
        return {file.digest: file.size for file in (self.config, *self.files.values(), *self.others)}


class _Descriptor(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] = {}

    def stored(self) -> StoredFile:
        return StoredFile(Digest.parse(self.digest), self.size)


class _Manifest(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    schema_version: Literal[2]
    media_type: str = ""
    config: _Descriptor
    layers: list[_Descriptor]


class _ConfigBlob(msgspec.Struct, frozen=True):
    """`descriptor` is empty in ours: a time of creation in it would give one model a new ID at every pull."""

    config: dict[str, Any]
    descriptor: dict[str, Any] = {}
    rootfs: dict[str, Any] = {}


def encode_config(config: dict[str, Any], files: dict[str, StoredFile]) -> bytes:
    diffs = [str(file.digest) for file in files.values()]
    return msgspec.json.encode(_ConfigBlob(config, {}, {"type": "rootfs", "diff_ids": diffs}))


def decode_config(data: bytes) -> dict[str, Any]:
    """Raises `msgspec.ValidationError` or `msgspec.DecodeError`."""
    return msgspec.json.decode(data, type=_ConfigBlob).config


def encode(contents: Contents) -> bytes:
    """Equal contents give equal bytes, hence one model ID."""
    config = _Descriptor(CONFIG_TYPE, str(contents.config.digest), contents.config.size)
    layers = [
        _Descriptor(_media_type(name), str(file.digest), file.size, {FILE_PATH: name})
        for name, file in contents.files.items()
    ]
    return msgspec.json.encode(_Manifest(schema_version=2, media_type=MANIFEST_TYPE, config=config, layers=layers))


def _media_type(name: str) -> str:
    if name.endswith(WEIGHTS):
        return SAFETENSORS_TYPE
    special = {PROJECTOR: PROJECTOR_TYPE, TEMPLATE: TEMPLATE_TYPE}
    return special.get(name) or (GGUF_TYPE if is_gguf(name) else FILE_TYPE)


def decode(data: bytes, digest: Digest) -> Contents:
    """Raises `InvalidModel` unless `data` has that digest and is the manifest of a model that can be used here."""
    if Digest.of(data) != digest:
        raise InvalidModel("its manifest is damaged")
    try:
        manifest = msgspec.json.decode(data, type=_Manifest)
        if manifest.config.media_type not in _CONFIG_TYPES:
            raise InvalidModel(f"its configuration has the unknown media type {manifest.config.media_type[:80]!r}")
        gguf = any(layer.media_type == GGUF_TYPE for layer in manifest.layers)
        layers = _gguf_layers(manifest.layers) if gguf else _folder_layers(manifest.layers)
        files = {name: layer.stored() for name, layer in layers}
        used = {layer.digest for _, layer in layers}
        others = tuple(layer.stored() for layer in manifest.layers if layer.digest not in used)
        config = manifest.config.stored()
    except (msgspec.MsgspecError, InvalidReference) as error:
        raise InvalidModel(f"its manifest is not one that is understood here ({error})") from None
    if not files or len(files) != len(layers):
        raise InvalidModel("its manifest names no files that are used here, or two alike")
    return Contents(config, files, others)


def _gguf_layers(layers: list[_Descriptor]) -> list[tuple[str, _Descriptor]]:
    """Named by their kind; shards are in the order of their names, or of the manifest where they have none."""
    weights = sorted(_of_type(layers, GGUF_TYPE), key=lambda layer: layer.annotations.get(FILE_PATH, ""))
    count = len(weights)
    names = ["model.gguf"] if count == 1 else [f"model-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]
    named = list(zip(names, weights, strict=True))
    named += [(PROJECTOR, layer) for layer in _of_type(layers, PROJECTOR_TYPE)]
    named += [(TEMPLATE, layer) for layer in _of_type(layers, TEMPLATE_TYPE)]
    return named


def _folder_layers(layers: list[_Descriptor]) -> list[tuple[str, _Descriptor]]:
    """Named by their annotations. What has no name of a model's file stays out: only such a name becomes a path."""
    if any(layer.media_type == SAFETENSORS_TYPE and FILE_PATH not in layer.annotations for layer in layers):
        raise InvalidModel("it was packaged in docker's older format, with its configuration in a tar archive")
    named = [(layer.annotations.get(FILE_PATH, ""), layer) for layer in layers]
    return sorted(
        ((name, layer) for name, layer in named if in_folder(name)), key=lambda item: (item[0] != CONFIG, item[0])
    )


def _of_type(layers: list[_Descriptor], media_type: str) -> list[_Descriptor]:
    return [layer for layer in layers if layer.media_type == media_type]
