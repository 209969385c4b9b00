"""Signatures of models, as cosign makes them with a key pair: a signed payload names the digest of a manifest, and lies
beside the model under a tag that is made of that digest
(https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md). Keys are of ECDSA P-256.

Signatures without a key of one's own (cosign's keyless signing, with certificates and a transparency log) are not read.
"""

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from modelrunner.concurrency.threads import in_thread
from modelrunner.errors import BadRequest, ModelNotFound, UntrustedModel
from modelrunner.oci.repository import RemoteRepository
from modelrunner.oci.upload import Upload
from modelrunner.store import Digest
from modelrunner.store.manifests import Descriptor, Manifest, StoredFile
from modelrunner.store.mediatypes import MANIFEST_TYPE

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

PAYLOAD_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
_CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
_SIGNATURE = "dev.cosignproject.cosign/signature"
_KIND = "cosign container image signature"
_MOST = 64  # signatures of a model that are looked at
_LARGEST = 1 << 16  # bytes of a payload, or of a file with a key


class _SignedImage(msgspec.Struct, frozen=True):
    """The signed payload. The specification's own example begins the name with a capital; cosign does not."""

    digest: str = msgspec.field(default="", name="docker-manifest-digest")
    other: str = msgspec.field(default="", name="Docker-manifest-digest")


class _Critical(msgspec.Struct, frozen=True):
    image: _SignedImage
    type: str


class _Payload(msgspec.Struct, frozen=True):
    critical: _Critical


def public_key(pem: bytes, name: str) -> "EllipticCurvePublicKey":
    """Reads a public key in PEM; `name` is for the message. Raises `BadRequest` for another kind of key."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise BadRequest(f"{name} is not an ECDSA P-256 public key in PEM, as `cosign generate-key-pair` writes it")


def private_key(path: Path) -> "EllipticCurvePrivateKey":
    """Reads a private key from a PEM file (PKCS #8 or SEC 1) without a password. Blocks. Raises `BadRequest`."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        with open(path, "rb") as file:
            key = load_pem_private_key(file.read(_LARGEST), None)
    except OSError as error:
        raise BadRequest(f"the key {path} cannot be read: {error.strerror}", param="sign") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, ec.SECP256R1):
        return key
    raise BadRequest(
        f"{path} is not an ECDSA P-256 private key in PEM without a password (`openssl genpkey -algorithm EC -pkeyopt"
        " ec_paramgen_curve:P-256` makes one)",
        param="sign",
    )


def read_public_keys(paths: Sequence[Path]) -> "list[EllipticCurvePublicKey]":
    """Reads the public keys in the files `paths`. Blocks. Raises `BadRequest`."""
    keys = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                keys.append(public_key(file.read(_LARGEST), str(path)))
        except OSError as error:
            raise BadRequest(f"the key {path} cannot be read: {error.strerror}") from None
    return keys


async def require_signature(
    repository: RemoteRepository, digests: Sequence[Digest], keys: "Sequence[EllipticCurvePublicKey]"
) -> None:
    """Returns if one of `keys` has signed one of `digests`, each of which stands for the model. Raises `UntrustedModel`
    and `SourceFailed`."""
    place, signed = f"{repository.endpoint.host}/{repository.path}", False
    for digest in digests:
        try:
            layers = await _signatures(repository, digest)
        except ModelNotFound:
            continue
        for layer in layers[:_MOST]:
            signed = True
            payload = await repository.blob(layer.stored(), _LARGEST)
            if _names(payload, digest) and any(_is_by(key, layer, payload) for key in keys):
                return
    how = "is signed, but not by a required key" if signed else "is not signed"
    raise UntrustedModel(f"{place} {how}: it was not taken. Ask its publisher, or check the key")


async def sign(repository: RemoteRepository, digest: Digest, key: "EllipticCurvePrivateKey", reference: str) -> None:
    """Adds a signature of the manifest `digest`, which was pushed as `reference` (without tag), to its present
    signatures. Raises `SourceFailed`."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    critical = {
        "identity": {"docker-reference": reference},
        "image": {"docker-manifest-digest": str(digest)},
        "type": _KIND,
    }
    payload = msgspec.json.encode({"critical": critical, "optional": None})
    signature = base64.b64encode(key.sign(payload, ec.ECDSA(hashes.SHA256()))).decode()
    try:
        before = await _signatures(repository, digest)
    except ModelNotFound:
        before = []
    layers = [*before, Descriptor(PAYLOAD_TYPE, str(Digest.of(payload)), len(payload), {_SIGNATURE: signature})]
    config = msgspec.json.encode(
        {
            "architecture": "",
            "os": "",
            "config": {},
            "history": [{"created": "0001-01-01T00:00:00Z"} for _ in layers],
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        }
    )
    described = Descriptor(_CONFIG_TYPE, str(Digest.of(config)), len(config))
    manifest = Manifest(schema_version=2, media_type=MANIFEST_TYPE, config=described, layers=layers)
    with TemporaryDirectory(prefix="modelrunner-") as folder:
        for data in (payload, config):
            path = Path(folder) / Digest.of(data).hex
            await in_thread(lambda _, path=path, data=data: path.write_bytes(data))  # type: ignore[misc]
            await Upload(repository, StoredFile(Digest.of(data), len(data)), path, (), lambda _: None).run()
    await repository.put_manifest(msgspec.json.encode(manifest), MANIFEST_TYPE, _tag(digest))


async def _signatures(repository: RemoteRepository, digest: Digest) -> list[Descriptor]:
    """Returns the layers that are signatures. Raises `ModelNotFound` if there are none."""
    manifest = await repository.manifest(_tag(digest))
    try:
        layers = msgspec.json.decode(manifest.data, type=Manifest).layers
    except (msgspec.MsgspecError, RecursionError):
        raise UntrustedModel(f"the signatures of {repository.path} cannot be parsed") from None
    return [layer for layer in layers if layer.media_type == PAYLOAD_TYPE and 0 <= layer.size <= _LARGEST]


def _tag(digest: Digest) -> str:
    return f"sha256-{digest.hex}.sig"


def _names(payload: bytes, digest: Digest) -> bool:
    """Returns whether the payload names the digest of this manifest."""
    try:
        critical = msgspec.json.decode(payload, type=_Payload).critical
    except (msgspec.MsgspecError, RecursionError):
        return False
    return critical.type == _KIND and str(digest) == (critical.image.digest or critical.image.other)


def _is_by(key: "EllipticCurvePublicKey", layer: Descriptor, payload: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        signature = base64.b64decode(layer.annotations.get(_SIGNATURE, ""), validate=True)
        key.verify(signature, payload, ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, binascii.Error, ValueError):
        return False
    return True
