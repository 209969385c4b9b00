"""Media types of published models: docker/model-runner's (https://github.com/docker/model-spec) and CNCF's ModelPack
(https://github.com/modelpack/model-spec), whose first drafts were named CNAI."""

import re
from enum import Enum, auto
from typing import NamedTuple

from modelrunner import lora
from modelrunner.store.names import PROJECTOR, TEMPLATE, WEIGHTS

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_DOCKER = "application/vnd.docker.ai."
CONFIG_TYPE = f"{_DOCKER}model.config.v0.2+json"
CONFIG_TYPES = frozenset(
    {CONFIG_TYPE, f"{_DOCKER}model.config.v0.1+json"}
    | {f"application/vnd.{group}.model.config.v1+json" for group in ("cncf", "cnai")}
)
FOREIGN_CONFIG_TYPES = frozenset(
    {
        "application/vnd.docker.container.image.v1+json",  # Ollama's
        "application/vnd.oci.empty.v1+json",  # ORAS's, for files without a configuration
        "application/vnd.unknown.config.v1+json",
    }
)
"""Configurations that say nothing to us. A model with one gets a manifest of ours."""
GGUF_TYPE = f"{_DOCKER}gguf.v3"
LORA_TYPE = f"{GGUF_TYPE}.lora"
PROJECTOR_TYPE = f"{_DOCKER}mmproj"
SAFETENSORS_TYPE = f"{_DOCKER}safetensors"
FILE_TYPE = f"{_DOCKER}model.file"
TEMPLATE_TYPE = f"{_DOCKER}chat.template.jinja"
LICENSE_TYPE = f"{_DOCKER}license"
FILE_PATHS = ("org.cncf.model.filepath", "org.cnai.model.filepath")
"""The annotations with the name of a layer's file, the one that we write first."""
TITLE, UNPACK = "org.opencontainers.image.title", "io.deis.oras.content.unpack"
"""ORAS's annotations: the name of a file, and whether the layer is the archive of a folder."""
OLLAMA_TYPE = "application/vnd.ollama.image."
"""The beginning of the types of Ollama's layers: model, projector, adapter, template, system, params, messages, license
(https://github.com/ollama/ollama/blob/main/server/images.go)."""

MODELPACK_DOC = "application/vnd.cncf.model.doc.v1"

_MODELPACK = re.compile(
    r"application/vnd\.(?:cncf|cnai)\.model\.(?P<purpose>weight\.config|weight|doc|code|dataset)\.v1"
    r"(?:\.(?P<form>raw|gguf|safetensors|tar)(?:\+(?P<packed>gzip|zstd))?)?"
)


class LayerKind(Enum):
    """The use of a layer. The file of a `FILE` is laid out if its name is a model's; an `ARCHIVE` holds such files; an
    `OTHER` is only kept."""

    GGUF = auto()
    ADAPTER = auto()
    PROJECTOR = auto()
    SAFETENSORS = auto()
    TEMPLATE = auto()
    FILE = auto()
    ARCHIVE = auto()
    OTHER = auto()


class LayerUse(NamedTuple):
    """`packed` is the compression of an archive, "gzip", "zstd", or "" for none."""

    kind: LayerKind
    packed: str = ""


_TYPES = {
    GGUF_TYPE: LayerUse(LayerKind.GGUF),
    LORA_TYPE: LayerUse(LayerKind.ADAPTER),
    PROJECTOR_TYPE: LayerUse(LayerKind.PROJECTOR),
    f"{GGUF_TYPE}.mmproj": LayerUse(LayerKind.PROJECTOR),  # the name in the documents of the format
    SAFETENSORS_TYPE: LayerUse(LayerKind.SAFETENSORS),
    FILE_TYPE: LayerUse(LayerKind.FILE),
    TEMPLATE_TYPE: LayerUse(LayerKind.TEMPLATE),
    f"{OLLAMA_TYPE}model": LayerUse(LayerKind.GGUF),
    f"{OLLAMA_TYPE}projector": LayerUse(LayerKind.PROJECTOR),
    f"{OLLAMA_TYPE}adapter": LayerUse(LayerKind.ADAPTER),
    f"{_DOCKER}vllm.config.tar": LayerUse(LayerKind.ARCHIVE),
    f"{_DOCKER}dir.tar": LayerUse(LayerKind.ARCHIVE),
    "application/vnd.oci.image.layer.v1.tar": LayerUse(LayerKind.ARCHIVE),
    "application/vnd.oci.image.layer.v1.tar+gzip": LayerUse(LayerKind.ARCHIVE, "gzip"),
    "application/vnd.oci.image.layer.v1.tar+zstd": LayerUse(LayerKind.ARCHIVE, "zstd"),
}


def layer_of(media_type: str, path: str) -> LayerUse:
    """Returns the use of a layer of a media type. `path` is the name of its file, "" without a name."""
    if (known := _TYPES.get(media_type)) is not None:
        return known
    match = _MODELPACK.fullmatch(media_type)
    if match is None or match["purpose"] in ("doc", "dataset"):
        return LayerUse(LayerKind.OTHER)
    if match["form"] == "tar":
        return LayerUse(LayerKind.ARCHIVE, match["packed"] or "")
    ending = f".{match['form']}" if match["form"] in ("gguf", "safetensors") else ""
    return LayerUse(kind_of_file(path or f"model{ending}"))


def kind_of_file(path: str) -> LayerKind:
    """Returns the kind of the file at `path` of a model, by its name alone."""
    name = path.rpartition("/")[2].lower()
    if name.endswith(".gguf"):
        return LayerKind.PROJECTOR if "mmproj" in name else LayerKind.GGUF
    if name.endswith(WEIGHTS):
        return LayerKind.SAFETENSORS
    return LayerKind.TEMPLATE if path == TEMPLATE else LayerKind.FILE


def media_type_of(name: str) -> str:
    """Returns the media type that we write for a file of a bundle."""
    if name.endswith(WEIGHTS):
        return SAFETENSORS_TYPE
    special = {PROJECTOR: PROJECTOR_TYPE, TEMPLATE: TEMPLATE_TYPE}
    if name in special or not name.endswith(".gguf"):
        return special.get(name, FILE_TYPE)
    return LORA_TYPE if lora.name_and_scale(name) else GGUF_TYPE
