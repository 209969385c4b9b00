"""Chooses a model from an index of several (OCI's image index)."""

import platform
from typing import Literal

import msgspec

from modelrunner.errors import InvalidModel, InvalidReference
from modelrunner.store import Digest
from modelrunner.store.mediatypes import MANIFEST_TYPE

_MOST = 1000
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_ATTESTATION = "vnd.docker.reference.type"
_MANIFEST_TYPES = (MANIFEST_TYPE, "application/vnd.docker.distribution.manifest.v2+json")


class _Platform(msgspec.Struct, frozen=True):
    os: str = ""
    architecture: str = ""


class _IndexedManifest(msgspec.Struct, frozen=True, rename="camel"):
    media_type: str
    digest: str
    size: int
    platform: _Platform = _Platform()
    annotations: dict[str, str] = {}


class _ImageIndex(msgspec.Struct, frozen=True, rename="camel"):
    schema_version: Literal[2]
    manifests: list[_IndexedManifest]


def choose(data: bytes) -> Digest:
    """Returns the digest of the manifest to take: the first for this machine, else the first that names no machine (as
    a model's usually does), else the first of all. Attestations are skipped. Raises `InvalidModel`."""
    try:
        entries = msgspec.json.decode(data, type=_ImageIndex).manifests
        models = [
            (entry, Digest.parse(entry.digest))
            for entry in entries[:_MOST]
            if entry.media_type in _MANIFEST_TYPES and _ATTESTATION not in entry.annotations
        ]
    except (msgspec.MsgspecError, InvalidReference, RecursionError) as error:
        raise InvalidModel(f"its index cannot be parsed ({error})") from None
    if not models:
        raise InvalidModel("its index names no manifest")
    return min(models, key=lambda model: _rank(model[0].platform))[1]


def _rank(wanted: _Platform) -> int:
    machine = platform.machine().lower()
    if (wanted.os, wanted.architecture) == (platform.system().lower(), _MACHINES.get(machine, machine)):
        return 0
    return 1 if wanted.architecture in ("", "unknown") else 2
