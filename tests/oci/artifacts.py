"""Models as others publish them, laid out byte for byte like the examples in the formats' documents:
docker/model-spec (spec.md, config.md) and modelpack/model-spec (docs/spec.md, docs/config.md, docs/annotations.md)."""

import gzip
import io
import json
import tarfile
from collections.abc import Mapping
from typing import Any

from tests.oci.registry import Artifact, Layers, artifact, digest
from tests.pull.models import adapter, gguf, shards
from tests.store.folders import model_files

DOCKER = "application/vnd.docker.ai."
V1, V2 = (f"{DOCKER}model.config.v0.{n}+json" for n in (1, 2))
CNCF = "application/vnd.cncf.model."
PATH = "org.cncf.model.filepath"
NOTHING: Mapping[str, str] = {}


def docker_config(format: str, layers: Layers) -> dict[str, Any]:
    return {
        "config": {
            "format": format,
            "quantization": "Q4_0",
            "parameters": "1.10 B",
            "architecture": "llama",
            "size": "635992801",
        },
        "descriptor": {"created": "2025-01-01T00:00:00Z"},
        "rootfs": {"type": "rootfs", "diff_ids": [digest(data) for _, data, _ in layers]},
    }


def modelpack_config(format: str, layers: Layers) -> dict[str, Any]:
    return {
        "descriptor": {"createdAt": "2025-01-01T00:00:00Z", "vendor": "XYZ Corp.", "name": "xyz-3-8B-Instruct"},
        "config": {"architecture": "transformer", "format": format, "paramSize": "8b", "precision": "fp16"},
        "modelfs": {"type": "layers", "diffIds": [digest(data) for _, data, _ in layers]},
    }


def tar(files: Mapping[str, bytes]) -> bytes:
    """As Go's archive/tar and GNU tar write them."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), 1735689600.5  # a fraction makes a pax header
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _docker(version: str, format: str, layers: Layers) -> Artifact:
    return artifact(docker_config(format, layers), version, layers)


def _members_of(data: bytes) -> bytes:
    """The data as eStargz has it: a gzip member for each part, the last one with padding."""
    return b"".join(gzip.compress(data[start : start + 512]) for start in range(0, len(data), 512)) + bytes(100)


def _modelpack(format: str, layers: Layers) -> Artifact:
    kind = f"{CNCF}manifest.v1+json"
    return artifact(modelpack_config(format, layers), f"{CNCF}config.v1+json", layers, artifact_type=kind)


def published() -> dict[str, tuple[Artifact, dict[str, bytes]]]:
    """By what they show: the artifact, and the files that an engine is to find."""
    model, projector, template = gguf(9000), gguf(3000, seed=2, architecture="clip", kind="mmproj"), b"{{ messages }}"
    parts, folder = shards(2), model_files()
    weights = folder["model.safetensors"]
    configs = {name: data for name, data in folder.items() if name != "model.safetensors"}
    licence = (f"{DOCKER}license", b"Apache License\n", NOTHING)
    split = {f"model-{n:05}-of-00002.gguf": data for n, data in enumerate(parts, 1)}
    return {
        "docker v0.1, GGUF": (
            _docker(V1, "gguf", [(f"{DOCKER}gguf.v3", model, NOTHING), licence]),
            {"model.gguf": model},
        ),
        "docker v0.1, shards, projector, template and adapter": (
            _docker(
                V1,
                "gguf",
                [
                    *((f"{DOCKER}gguf.v3", data, NOTHING) for data in parts),
                    (f"{DOCKER}mmproj", projector, NOTHING),
                    (f"{DOCKER}chat.template.jinja", template, NOTHING),
                    (f"{DOCKER}gguf.v3.lora", adapter(), NOTHING),
                ],
            ),
            {**split, "mmproj.gguf": projector, "chat_template.jinja": template, "lora-1.gguf": adapter()},
        ),
        "docker v0.1, the projector's other name": (
            _docker(
                V1, "gguf", [(f"{DOCKER}gguf.v3", model, NOTHING), (f"{DOCKER}gguf.v3.mmproj", projector, NOTHING)]
            ),
            {"model.gguf": model, "mmproj.gguf": projector},
        ),
        "docker v0.1, safetensors with an archive": (
            _docker(
                V1,
                "safetensors",
                [
                    (f"{DOCKER}safetensors", weights, NOTHING),
                    (f"{DOCKER}vllm.config.tar", tar(configs), NOTHING),
                    licence,
                ],
            ),
            folder,
        ),
        "docker v0.1, safetensors with a directory": (
            _docker(
                V1,
                "safetensors",
                [
                    (f"{DOCKER}safetensors", weights, NOTHING),
                    (f"{DOCKER}vllm.config.tar", tar(configs), NOTHING),
                    (f"{DOCKER}dir.tar", tar({"1_Pooling/config.json": b"{}", "1_Pooling/README.md": b"#"}), NOTHING),
                ],
            ),
            {**folder, "1_Pooling/config.json": b"{}"},
        ),
        "docker v0.2": (
            _docker(
                V2,
                "safetensors",
                [
                    (
                        f"{DOCKER}safetensors" if name.endswith("tensors") else f"{DOCKER}model.file",
                        data,
                        {PATH: name, "org.cncf.model.file.mediatype.untested": "true"},
                    )
                    for name, data in {**folder, "README.md": b"# Read me"}.items()
                ],
            ),
            folder,
        ),
        "ModelPack, raw": (
            _modelpack(
                "safetensors",
                [
                    (f"{CNCF}weight.v1.raw", weights, {PATH: "model.safetensors"}),
                    *((f"{CNCF}weight.config.v1.raw", data, {PATH: name}) for name, data in configs.items()),
                    (f"{CNCF}doc.v1.raw", b"# Read me", {PATH: "README.md"}),
                ],
            ),
            folder,
        ),
        "ModelPack, archives": (
            _modelpack(
                "safetensors",
                [
                    (f"{CNCF}weight.v1.tar", tar({"model.safetensors": weights}), NOTHING),
                    (f"{CNCF}weight.config.v1.tar+gzip", gzip.compress(tar(configs)), NOTHING),
                    (f"{CNCF}doc.v1.tar", tar({"README.md": b"#"}), NOTHING),
                ],
            ),
            folder,
        ),
        "ModelPack, an archive of several gzip members": (
            _modelpack(
                "safetensors",
                [
                    (f"{CNCF}weight.v1.raw", weights, {PATH: "model.safetensors"}),
                    (f"{CNCF}weight.config.v1.tar+gzip", _members_of(tar(configs)), NOTHING),
                ],
            ),
            folder,
        ),
        "ModelPack, GGUF": (
            _modelpack("gguf", [(f"{CNCF}weight.v1.gguf", model, NOTHING)]),
            {"model.gguf": model},
        ),
        "ModelPack, GGUF with projector in an archive": (
            _modelpack(
                "gguf", [(f"{CNCF}weight.v1.tar", tar({"./x-Q4_0.gguf": model, "mmproj-x.gguf": projector}), NOTHING)]
            ),
            {"model.gguf": model, "mmproj.gguf": projector},
        ),
        "CNAI, the first drafts": (
            artifact(
                modelpack_config("gguf", []),
                "application/vnd.cnai.model.config.v1+json",
                [("application/vnd.cnai.model.weight.v1", model, {"org.cnai.model.filepath": "x.gguf"})],
            ),
            {"model.gguf": model},
        ),
    }


def index(*models: tuple[Artifact, Mapping[str, Any]]) -> Artifact:
    """An index; each model with the further fields of its entry."""
    entries = [
        {"mediaType": model.media_type, "digest": model.id, "size": len(model.manifest), **more}
        for model, more in models
    ]
    kind = "application/vnd.oci.image.index.v1+json"
    return Artifact(json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": entries}).encode(), {}, kind)
