"""Models that must be signed, by whom, and what becomes of those that are not."""

import asyncio
import base64
import json
import subprocess
import urllib.request
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from modelrunner.errors import BadRequest, ModelRunnerError, UntrustedModel
from modelrunner.oci.registries import RegistryRules
from modelrunner.oci.signatures import PAYLOAD_TYPE
from tests.oci.artifacts import index
from tests.oci.conftest import Machine
from tests.oci.registry import OCI, Registry, artifact, publish
from tests.oci.test_pull import tiny
from tests.oci.test_push import package, pusher
from tests.pull.models import gguf
from tests.pull.test_puller import ignore

PEM = serialization.Encoding.PEM
KIND = "cosign container image signature"
SIGNATURE = "dev.cosignproject.cosign/signature"


class Pair:
    """A pair of keys, and its files as `openssl` writes them."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(exist_ok=True)
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.private, self.public = folder / f"{name}.pem", folder / f"{name}.pub"
        unencrypted = serialization.NoEncryption()
        self.private.write_bytes(self.key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, unencrypted))
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        self.public.write_bytes(self.key.public_key().public_bytes(PEM, form))
        self.text = self.public.read_text()

    def signs(self, registry: Registry, path: str, digest: str, *, about: str | None = None, kind: str = KIND) -> None:
        """Signs as cosign does."""
        payload = json.dumps(
            {
                "critical": {
                    "identity": {"docker-reference": f"{registry.host}/{path}"},
                    "image": {"docker-manifest-digest": about or digest},
                    "type": kind,
                },
                "optional": {"creator": "tests", "timestamp": 1},
            }
        ).encode()
        signature = base64.b64encode(self.key.sign(payload, ec.ECDSA(hashes.SHA256()))).decode()
        layers = [(PAYLOAD_TYPE, payload, {SIGNATURE: signature})]
        signed = artifact({}, "application/vnd.oci.image.config.v1+json", layers)
        publish(registry, path, digest.replace(":", "-") + ".sig", signed)


@pytest.fixture
def ours(tmp_path: Path) -> Pair:
    return Pair(tmp_path / "keys", "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Pair:
    return Pair(tmp_path / "keys", "theirs")


async def test_what_we_sign_is_taken_and_nothing_else(
    registry: Registry, tmp_path: Path, ours: Pair, theirs: Pair
) -> None:
    here, there = Machine(tmp_path / "here"), Machine(tmp_path / "there")
    id = await package(here, "mine", {"x.gguf": gguf(seed=21)})
    name = f"{registry.host}/signed/mine:v1"
    await pusher(here).push("mine", name, ignore)
    with pytest.raises(UntrustedModel, match="is not signed"):
        await there.puller.pull(name, ignore, verify_key=ours.text)
    await pusher(here).push("mine", name, ignore, key=theirs.private)
    with pytest.raises(UntrustedModel, match="not by a required key"):
        await there.puller.pull(name, ignore, verify_key=ours.text)
    assert (there.store.list(), list(there.store.partial.iterdir())) == ([], [])
    await pusher(here).push("mine", name, ignore, key=ours.private)  # beside the other signature
    for key in (ours, theirs):
        assert (await there.puller.pull(name, ignore, verify_key=key.text)).id == id
    assert (await there.puller.pull(f"{registry.host}/signed/mine@{id}", ignore, verify_key=ours.text)).id == id


async def test_a_model_that_is_here_is_looked_at_as_well(registry: Registry, machine: Machine, ours: Pair) -> None:
    name = publish(registry, "signed/here", "latest", tiny(seed=22))
    id = (await machine.puller.pull(name, ignore)).id
    for text in (name, f"{registry.host}/signed/here@{id}"):
        with pytest.raises(UntrustedModel):
            await machine.puller.pull(text, ignore, verify_key=ours.text)
    assert machine.store.get(name).id == id


async def test_a_registry_whose_models_must_be_signed(
    registry: Registry, tmp_path: Path, ours: Pair, theirs: Pair
) -> None:
    rules = {registry.host: RegistryRules(keys=(theirs.public, ours.public))}
    machine = Machine(tmp_path / "strict", rules)
    model = tiny(seed=23)
    name = publish(registry, "signed/policy", "latest", model)
    with pytest.raises(UntrustedModel):
        await machine.puller.pull(name, ignore)
    ours.signs(registry, "signed/policy", model.id)
    assert (await machine.puller.pull(name, ignore)).id == model.id
    elsewhere = publish(registry, "signed/other", "latest", model)  # the same model, which nobody has signed there
    for text in (elsewhere, f"{registry.host}/signed/other@{model.id}"):
        with pytest.raises(UntrustedModel):
            await machine.puller.pull(text, ignore)
    missing = Machine(tmp_path / "missing", {registry.host: RegistryRules(keys=(tmp_path / "none.pub",))})
    with pytest.raises(BadRequest, match="cannot be read"):
        await missing.puller.pull(name, ignore)


async def test_a_signature_of_an_index_holds_for_its_model(registry: Registry, machine: Machine, ours: Pair) -> None:
    model = tiny(seed=24)
    publish(registry, "signed/index", "inner", model)
    whole = index((model, {}))
    name = publish(registry, "signed/index", "latest", whole)
    ours.signs(registry, "signed/index", whole.id)
    assert (await machine.puller.pull(name, ignore, verify_key=ours.text)).id == model.id


@pytest.mark.parametrize("fault", ["about another", "of another kind", "without its digest"])
async def test_a_signature_that_means_something_else(
    registry: Registry, machine: Machine, ours: Pair, fault: str
) -> None:
    model = tiny(seed=25, licence=fault.encode())
    name = publish(registry, "signed/fault", "latest", model)
    match fault:
        case "about another":
            ours.signs(registry, "signed/fault", model.id, about=f"sha256:{'0' * 64}")
        case "of another kind":
            ours.signs(registry, "signed/fault", model.id, kind="something else")
        case _:
            ours.signs(registry, "signed/fault", model.id, about="x")
    with pytest.raises(UntrustedModel):
        await machine.puller.pull(name, ignore, verify_key=ours.text)


async def test_keys_of_another_kind(registry: Registry, machine: Machine, tmp_path: Path, ours: Pair) -> None:
    name = publish(registry, "signed/keys", "latest", tiny(seed=26))
    other = rsa.generate_private_key(65537, 2048)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    for text in ("", "no key", ours.private.read_text(), other.public_key().public_bytes(PEM, form).decode()):
        with pytest.raises(BadRequest, match="not an ECDSA P-256 public key"):
            await machine.puller.pull(name, ignore, verify_key=text)
    await package(machine, "keys", {"x.gguf": gguf()})
    mark = "ENCRYPTED SIGSTORE PRIVATE KEY-----"
    (tmp_path / "encrypted").write_text(f"-----BEGIN {mark}\nx\n-----END {mark}\n")
    for path in (ours.public, tmp_path / "encrypted", tmp_path / "none"):
        with pytest.raises(BadRequest):
            await pusher(machine).push("keys", f"{registry.host}/signed/unsigned", ignore, key=path)
    with pytest.raises(ModelRunnerError):
        await machine.puller.pull(f"{registry.host}/signed/unsigned", ignore)  # nothing was pushed


async def test_openssl_verifies_what_we_sign(registry: Registry, machine: Machine, tmp_path: Path, ours: Pair) -> None:
    """The layout is the specification's, and the signature one that others understand."""
    id = await package(machine, "openssl", {"x.gguf": gguf(seed=27)})
    await pusher(machine).push("openssl", f"{registry.host}/signed/openssl:v1", ignore, key=ours.private)

    def get(path: str) -> bytes:
        request = urllib.request.Request(f"{registry.url}/v2/signed/openssl/{path}", headers={"Accept": OCI})
        with urllib.request.urlopen(request) as answer:
            return bytes(answer.read())

    manifest = json.loads(await asyncio.to_thread(get, f"manifests/{id.replace(':', '-')}.sig"))
    (layer,) = manifest["layers"]
    payload = await asyncio.to_thread(get, f"blobs/{layer['digest']}")
    assert layer["mediaType"] == "application/vnd.dev.cosign.simplesigning.v1+json"
    assert json.loads(payload)["critical"] == {
        "identity": {"docker-reference": f"{registry.host}/signed/openssl"},
        "image": {"docker-manifest-digest": id},
        "type": KIND,
    }
    (tmp_path / "payload").write_bytes(payload)
    (tmp_path / "signature").write_bytes(base64.b64decode(layer["annotations"][SIGNATURE]))
    command = ["openssl", "dgst", "-sha256", "-verify", str(ours.public), "-signature", str(tmp_path / "signature")]
    command.append(str(tmp_path / "payload"))
    assert await asyncio.to_thread(subprocess.check_output, command) == b"Verified OK\n"
