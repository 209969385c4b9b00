"""Manifests and configurations: OCI image manifests with the media types of docker/model-runner's version 0.2 (one
layer per file, its name in an annotation), so that a registry can take and give them as they are."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from modelrunner.errors import InvalidModel
from modelrunner.store.digests import Digest
from modelrunner.store.names import PROJECTOR, WEIGHTS, in_folder, is_gguf

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
LARGEST = 1 << 20  # bytes of a manifest or a configuration
CONFIG_TYPE = "application/vnd.docker.ai.model.config.v0.2+json"
GGUF_TYPE = "application/vnd.docker.ai.gguf.v3"
PROJECTOR_TYPE = "application/vnd.docker.ai.mmproj"
SAFETENSORS_TYPE = "application/vnd.docker.ai.safetensors"
FILE_TYPE = "application/vnd.docker.ai.model.file"
FILE_PATH = "org.cncf.model.filepath"


@dataclass(frozen=True, slots=True)
class StoredFile:
    digest: Digest
    size: int


@dataclass(frozen=True, slots=True)
class Contents:
    """What a model consists of. `files` by their names in the bundle, the one that engines open first."""

    config: StoredFile
    files: dict[str, StoredFile]

    @property
    def blobs(self) -> dict[Digest, int]:
        """Every blob with its size in bytes."""
        return {file.digest: file.size for file in (self.config, *self.files.values())}


class _Descriptor(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    media_type: str
    digest: str
    size: int
    annotations: dict[str, str] = {}

    def stored(self) -> StoredFile:
        return StoredFile(Digest.parse(self.digest), self.size)


class _Manifest(msgspec.Struct, frozen=True, rename="camel"):
    schema_version: Literal[2]
    media_type: str
    config: _Descriptor
    layers: list[_Descriptor]


class _Config(msgspec.Struct, frozen=True):
    """`descriptor` is empty: a time of creation in it would give one model a new ID at every pull."""

    config: dict[str, Any]
    descriptor: dict[str, Any]
    rootfs: dict[str, Any]


def encode_config(config: dict[str, Any], files: dict[str, StoredFile]) -> bytes:
    diffs = [str(file.digest) for file in files.values()]
    return msgspec.json.encode(_Config(config, {}, {"type": "rootfs", "diff_ids": diffs}))


def decode_config(data: bytes) -> dict[str, Any]:
    """Raises `msgspec.ValidationError` or `msgspec.DecodeError`."""
    return msgspec.json.decode(data, type=_Config).config


def encode(contents: Contents) -> bytes:
    """Equal contents give equal bytes, hence one model ID."""
    config = _Descriptor(CONFIG_TYPE, str(contents.config.digest), contents.config.size)
    layers = [
        _Descriptor(_media_type(name), str(file.digest), file.size, {FILE_PATH: name})
        for name, file in contents.files.items()
    ]
    return msgspec.json.encode(_Manifest(2, MANIFEST_TYPE, config, layers))


def _media_type(name: str) -> str:
    if name.endswith(WEIGHTS):
        return SAFETENSORS_TYPE
    return PROJECTOR_TYPE if name == PROJECTOR else GGUF_TYPE if is_gguf(name) else FILE_TYPE


def decode(data: bytes, digest: Digest) -> Contents:
    """Raises `InvalidModel` unless `data` has that digest and is a manifest of ours."""
    if Digest.of(data) != digest:
        raise InvalidModel("its manifest is damaged")
    try:
        manifest = msgspec.json.decode(data, type=_Manifest)
    except msgspec.MsgspecError as error:
        raise InvalidModel(f"its manifest is not one that is understood here ({error})") from None
    files = {layer.annotations.get(FILE_PATH, ""): layer.stored() for layer in manifest.layers}
    if not files or len(files) != len(manifest.layers) or not _are_names(files):
        raise InvalidModel("its manifest gives its files names that are not used here")
    return Contents(manifest.config.stored(), files)


def _are_names(files: Iterable[str]) -> bool:
    names = list(files)
    return all(map(is_gguf, names)) or all(map(in_folder, names))
