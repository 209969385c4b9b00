"""Models from a real registry, as others publish them."""

import asyncio
import hashlib
import json
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelrunner.cli.login_commands import check
from modelrunner.errors import InvalidModel, ModelNotFound, SourceFailed
from modelrunner.oci.credentials import Credential
from modelrunner.oci.registries import RegistryRules
from modelrunner.store import Store
from modelrunner.web.download import Downloader
from modelrunner.web.partial import RemoteFile
from tests.oci.artifacts import CNCF, DOCKER, NOTHING, PATH, V1, V2, docker_config, index, published
from tests.oci.conftest import Machine
from tests.oci.fake import FakeRegistry, body, status
from tests.oci.registry import HTPASSWD, Artifact, Registry, artifact, publish, serving
from tests.pull.models import gguf
from tests.pull.test_puller import ignore
from tests.store.folders import model_files

ADA = Credential("ada", "secret")


def tiny(size: int = 9000, *, seed: int = 0, licence: bytes = b"free") -> Artifact:
    layers = [(f"{DOCKER}gguf.v3", gguf(size, seed=seed), NOTHING), (f"{DOCKER}license", licence, NOTHING)]
    return artifact(docker_config("gguf", layers), V1, layers)


@pytest.mark.parametrize("kind", published())
async def test_each_layout_that_others_publish(registry: Registry, machine: Machine, kind: str) -> None:
    model, files = published()[kind]
    name = publish(registry, f"ai/model-{abs(hash(kind))}", "v1", model)
    pulled = await machine.puller.pull(name, ignore)
    assert (pulled.id, pulled.name, list(machine.store.partial.iterdir())) == (model.id, name, [])
    for store in (machine.store, Store(machine.store.data)):
        found = store.bundle(name)
        assert {file: path.read_bytes() for file, path in found.files.items()} == files
        assert (store.verify(name), store.leftovers()) == ((), ())
    machine.store.remove(name)
    assert [path for path in machine.store.data.glob("*/sha256/*") if path.is_file()] == []


async def test_a_digest_is_the_models_id(registry: Registry, machine: Machine) -> None:
    model = tiny(seed=1)
    publish(registry, "ai/digest", "latest", model)
    name = f"{registry.host}/ai/digest@{model.id}"
    assert (await machine.puller.pull(name, ignore)).name == name
    assert (machine.store.get(name).id, machine.store.get(name).tags) == (model.id, [])
    assert (await machine.puller.pull(name, ignore)).cached
    with pytest.raises(ModelNotFound):
        await machine.puller.pull(f"{registry.host}/ai/digest@sha256:{'0' * 64}", ignore)


async def test_an_index_gives_the_model_for_this_machine(registry: Registry, machine: Machine) -> None:
    here = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    models = [tiny(seed=n) for n in range(3)]
    for model in models:
        publish(registry, "ai/several", model.id[7:19], model)
    other, mine, attested = models
    platforms = [{"os": "linux", "architecture": a} for a in ("s390x", here)]
    chosen = index(
        (attested, {"annotations": {"vnd.docker.reference.type": "attestation-manifest"}}),
        (other, {"platform": platforms[0]}),
        (mine, {"platform": platforms[1]}),
    )
    name = publish(registry, "ai/several", "latest", chosen)
    assert (await machine.puller.pull(name, ignore)).id == mine.id
    pulled = await machine.puller.pull(f"{registry.host}/ai/several@{chosen.id}", ignore)
    assert pulled.id == pulled.name == mine.id
    assert (await machine.puller.pull(name, ignore)).cached


OLLAMA = "application/vnd.ollama.image."


async def test_a_model_of_ollamas_registry(registry: Registry, machine: Machine) -> None:
    """As `ollama push` publishes it; its system prompt and parameters come along."""
    config = {"model_format": "gguf", "model_family": "llama", "file_type": "Q4_0", "rootfs": {"type": "layers"}}
    texts = {
        "template": b"{{ .Prompt }}",
        "system": b"Be short.",
        "params": b'{"stop": ["<|end|>"], "temperature": 0.5, "num_ctx": 512, "num_gpu": 3}',
        "messages": b'[{"role": "user", "content": "hi"}]',
        "license": b"MIT",
    }
    weights = gguf(3000)
    layers = [(f"{OLLAMA}model", weights, NOTHING)]
    layers += [(f"{OLLAMA}{kind}", text, NOTHING) for kind, text in texts.items()]
    model = artifact(config, "application/vnd.docker.container.image.v1+json", layers)
    name = publish(registry, "library/tiny", "latest", model)
    await machine.puller.pull(name, ignore)
    bundle = machine.store.bundle(name)
    assert bundle.model_file.read_bytes() == weights
    assert bundle.defaults is not None
    assert (bundle.defaults.system, bundle.defaults.context_size) == ("Be short.", 512)
    assert bundle.defaults.parameters == {"stop": ["<|end|>"], "temperature": 0.5}
    assert [message.content for message in bundle.defaults.messages] == ["hi"]
    assert machine.store.get(name).config["architecture"] == "llama"
    assert (await machine.puller.pull(name, ignore)).cached
    preview = await machine.puller.preview(name)
    assert preview.licences == ("MIT",)


@pytest.mark.parametrize("type", ["application/vnd.oci.empty.v1+json", "application/vnd.unknown.config.v1+json"])
async def test_files_that_oras_has_pushed(registry: Registry, machine: Machine, type: str) -> None:
    """`oras push HOST/NAME some-model.gguf README.md`: every file is called a tar."""
    tar = "application/vnd.oci.image.layer.v1.tar"
    title = "org.opencontainers.image.title"
    weights = gguf(3000)
    layers = [(tar, weights, {title: "some-model.gguf"}), ("text/plain", b"hello", {title: "README.md"})]
    name = publish(registry, "ai/oras", "latest", artifact({}, type, layers))
    await machine.puller.pull(name, ignore)
    assert machine.store.bundle(name).model_file.read_bytes() == weights
    folder = [("text/x", data, {title: name}) for name, data in model_files().items()]
    name = publish(registry, "ai/folder", "latest", artifact({}, type, folder))
    await machine.puller.pull(name, ignore)
    assert machine.store.bundle(name).format == "safetensors"


async def test_an_image_of_a_container_is_no_model(registry: Registry, machine: Machine) -> None:
    layers = [("application/vnd.docker.image.rootfs.diff.tar.gzip", b"x", NOTHING)]
    image = artifact({}, "application/vnd.docker.container.image.v1+json", layers)
    with pytest.raises(InvalidModel, match="no usable file"):
        await machine.puller.pull(publish(registry, "library/container", "latest", image), ignore)


async def test_what_is_no_model(registry: Registry, machine: Machine) -> None:
    image = artifact({}, "application/vnd.oci.image.config.v1+json", [])
    with pytest.raises(InvalidModel, match="unknown media type"):
        await machine.puller.pull(publish(registry, "library/image", "latest", image), ignore)
    packed = artifact({}, f"{CNCF}config.v1+json", [(f"{CNCF}weight.v1.tar+zstd", b"x", NOTHING)])
    with pytest.raises(InvalidModel, match=r"weight\.v1\.tar\+zstd is compressed with zstd"):
        await machine.puller.pull(publish(registry, "library/packed", "latest", packed), ignore)
    assert list(machine.store.partial.iterdir()) == []


async def test_a_moved_tag_is_followed_and_an_unmoved_one_is_not_fetched(registry: Registry, machine: Machine) -> None:
    name = publish(registry, "ai/moving", "latest", tiny(seed=1))
    first = await machine.puller.pull(name, ignore)
    assert (await machine.puller.pull(name, ignore)).cached
    publish(registry, "ai/moving", "latest", tiny(seed=2))
    second = await machine.puller.pull(name, ignore)
    assert machine.store.get(name).id == second.id != first.id
    assert machine.store.whole(first.id)[0].tags == []


async def test_what_two_models_share_is_fetched_once(registry: Registry, machine: Machine) -> None:
    names = [publish(registry, f"ai/shared-{n}", "latest", tiny(1 << 20, licence=b"%d" % n)) for n in range(4)]
    content = hashlib.sha256(gguf(1 << 20)).hexdigest()
    await asyncio.gather(*(machine.puller.pull(name, ignore) for name in names[:3]))
    await machine.puller.pull(names[3], ignore)
    assert len(re.findall(rf'"GET /v2/ai/shared-./blobs/sha256:{content}', registry.log.read_text())) == 1
    assert len({machine.store.get(name).id for name in names}) == 4
    assert list(machine.store.partial.iterdir()) == []


async def test_a_file_that_one_pull_has_whole_is_not_stored_while_another_looks_at_it(
    registry: Registry, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pull but the first gives the others time to take the file away, just before it opens it."""
    names = [publish(registry, f"ai/looked-{n}", "latest", tiny(1 << 20, licence=b"%d" % n)) for n in range(3)]
    content, pulls, fetch = hashlib.sha256(gguf(1 << 20)).hexdigest(), list[asyncio.Task[object]](), Downloader.fetch

    async def late(self: Downloader, file: RemoteFile, path: Path, *more: Any) -> None:
        if file.sha256 == content and path.exists():
            await asyncio.wait(pulls, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
        await fetch(self, file, path, *more)

    monkeypatch.setattr(Downloader, "fetch", late)
    pulls += [asyncio.create_task(machine.puller.pull(name, ignore)) for name in names]
    await asyncio.gather(*pulls)
    assert len(re.findall(rf'"GET /v2/ai/looked-./blobs/sha256:{content}', registry.log.read_text())) == 1
    assert len({machine.store.get(name).id for name in names}) == 3


async def test_a_password_is_sent_where_it_belongs(locked: Registry, machine: Machine) -> None:
    name = f"{locked.host}/ai/secret:latest"
    with pytest.raises(ModelNotFound, match="modelrunner login"):
        await machine.puller.pull(name, ignore)
    machine.credentials.store(locked.host, Credential("ada", "wrong"))
    with pytest.raises(SourceFailed, match="refuses this user access"):
        await machine.puller.pull(name, ignore)
    machine.credentials.store(locked.host, ADA)
    with pytest.raises(ModelNotFound):
        await machine.puller.pull(name, ignore)  # it may look now, and nothing is there
    assert (machine.folder / "logins.json").stat().st_mode & 0o777 == 0o600
    machine.credentials.forget(locked.host)
    assert await machine.credentials.find(locked.host) is None


async def test_a_login_is_tried_first(locked: Registry, machine: Machine) -> None:
    await check(machine.registries, locked.host, ADA)
    with pytest.raises(Exception, match="refuses the user or the password"):
        await check(machine.registries, locked.host, Credential("ada", "wrong"))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return self_signed(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, certificate: tuple[Path, Path]) -> Iterator[Registry]:
    with serving(tmp_path_factory.mktemp("secured"), users=HTPASSWD, tls=certificate) as running:
        yield running


def self_signed(folder: Path, host: str = "localhost") -> tuple[Path, Path]:
    """A certificate for `host`, and its key."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    unencrypted = serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, unencrypted))
    return paths


async def test_a_private_authority_is_trusted_where_it_is_named(
    secured: Registry, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    trusting = Machine(tmp_path / "trusting", {secured.host: RegistryRules(ca=certificate[0])})
    trusting.credentials.store(secured.host, ADA)
    with pytest.raises(ModelNotFound):
        await trusting.puller.pull(f"{secured.host}/ai/none", ignore)
    other = Machine(tmp_path / "other", {secured.host: RegistryRules(plain_http=False)})
    with pytest.raises(SourceFailed, match=r"certificate of localhost:.* is not trusted"):
        await other.puller.pull(f"{secured.host}/ai/none", ignore)
    assert "Authorization" not in secured.log.read_text()


async def test_mirrors_come_first_and_the_registry_last(registry: Registry, locked: Registry, tmp_path: Path) -> None:
    model = tiny(seed=7)
    publish(registry, "ai/mirrored", "latest", model)
    rules = RegistryRules(mirrors=(f"http://{locked.host}", f"http://{registry.host}"))
    machine = Machine(tmp_path / "m", {"docker.io": rules})
    pulled = await machine.puller.pull("mirrored", ignore)
    assert (pulled.id, pulled.name) == (model.id, "mirrored")
    fallen = Machine(tmp_path / "n", {registry.host: RegistryRules(mirrors=(f"http://{locked.host}",))})
    assert (await fallen.puller.pull(f"{registry.host}/ai/mirrored", ignore)).id == model.id
    moved = Machine(tmp_path / "o", {"docker.io": RegistryRules(location=registry.host)})
    assert (await moved.puller.pull("mirrored", ignore)).id == model.id


async def test_a_mirror_that_answers_nonsense_or_breaks_off_is_passed_over(registry: Registry, tmp_path: Path) -> None:
    model = tiny(3 << 20, seed=8)
    publish(registry, "ai/mirrored-too", "latest", model)
    async with FakeRegistry({"ai/mirrored-too": model}).running() as mirror:
        machine = Machine(tmp_path / "m", {registry.host: RegistryRules(mirrors=(f"http://{mirror.host}",))})
        for pattern, answer in (
            ("manifests", body(b"<html>log in</html>")),
            ("blobs", status(404)),
            ("$", status(500)),
        ):
            mirror.answers, mirror.seen = [(pattern, answer)], []
            name = f"{registry.host}/ai/mirrored-too"
            assert (await machine.puller.pull(name, ignore)).id == model.id
            assert mirror.seen
            machine.store.remove(name)


async def test_a_helper_for_all_registries(machine: Machine) -> None:
    """It may have a refresh token in place of a password, or fail."""
    docker = Path(machine.environ["DOCKER_CONFIG"])
    docker.mkdir()
    helper = machine.folder / "bin" / "docker-credential-all"
    helper.parent.mkdir()
    helper.write_text(
        '#!/bin/sh\nread host\ncase "$host" in\n'
        'refreshed.example) echo \'{"Username":"<token>","Secret":"hidden"}\';;\n'
        'https://index.docker.io/v1/) echo \'{"Username":"bob","Secret":"x"}\';;\n'
        "odd.example) echo nonsense;;\n*) exit 1;;\nesac\n"
    )
    helper.chmod(0o755)
    (docker / "config.json").write_text('{"auths": {"refreshed.example": {}}, "credsStore": "all"}')
    assert await machine.credentials.find("refreshed.example") == Credential(refresh="hidden")
    assert await machine.credentials.find("docker.io") == Credential("bob", "x")
    assert await machine.credentials.find("unknown.example") is None
    with pytest.raises(SourceFailed, match="docker-credential-all gave an answer that cannot be read"):
        await machine.credentials.find("odd.example")
    machine.credentials.store("docker.io", ADA)
    assert await machine.credentials.find("docker.io") == ADA  # our own login comes first
    helper.unlink()
    assert await machine.credentials.find("refreshed.example") is None


async def test_dockers_own_logins_and_helpers_are_used(machine: Machine) -> None:
    docker = Path(machine.environ["DOCKER_CONFIG"])
    docker.mkdir()
    helper = machine.folder / "bin" / "docker-credential-test"
    helper.parent.mkdir()
    helper.write_text(
        '#!/bin/sh\nread host\n[ "$host" = helped.example ] || exit 1\n'
        'echo \'{"ServerURL":"helped.example","Username":"bob","Secret":"hidden"}\'\n'
    )
    helper.chmod(0o755)
    (docker / "config.json").write_text(
        json.dumps(
            {
                "auths": {
                    "https://index.docker.io/v1/": {"auth": "YWRhOnNlY3JldA=="},
                    "token.example": {"identitytoken": "t"},
                },
                "credHelpers": {"helped.example": "test", "odd.example": "../../bin/sh"},
            }
        )
    )
    assert await machine.credentials.find("docker.io") == ADA
    assert await machine.credentials.find("helped.example") == Credential("bob", "hidden")
    assert await machine.credentials.find("token.example") == Credential(refresh="t")
    assert await machine.credentials.find("unknown.example") is None
    with pytest.raises(SourceFailed, match="invalid credential helper name"):
        await machine.credentials.find("odd.example")
    assert "hidden" not in repr(await machine.credentials.find("helped.example"))


async def test_dockers_file_may_be_a_link(machine: Machine) -> None:
    docker = Path(machine.environ["DOCKER_CONFIG"])
    docker.mkdir()
    (docker / "real.json").write_text('{"auths": {"private.example": {"auth": "YWRhOnNlY3JldA=="}}}')
    (docker / "config.json").symlink_to("real.json")
    assert await machine.credentials.find("private.example") == ADA


async def test_a_model_is_shown_without_a_pull(registry: Registry, machine: Machine) -> None:
    """Its configuration, licence and template, and the header of its one GGUF file, through a range."""
    licence, template = (f"{DOCKER}license", b"Apache License\n", NOTHING), b"{{ messages }}"
    weights = gguf(9 << 20)
    layers = [
        (f"{DOCKER}gguf.v3", weights, {PATH: "model.gguf"}),
        (f"{DOCKER}chat.template.jinja", template, NOTHING),
        licence,
    ]
    model = artifact(docker_config("gguf", layers), V2, layers)
    name = publish(registry, "shown/model", "v1", model)
    preview = await machine.puller.preview(name)
    assert preview.bundle is not None
    assert (preview.bundle.header.architecture, preview.bundle.name) == ("llama", name)
    assert (preview.version, preview.template, preview.licences) == (model.id, "{{ messages }}", ("Apache License\n",))
    assert (preview.files["model.gguf"], preview.config["parameters"]) == (len(weights), "1.10 B")
    assert not machine.store.list()
    for kind in ("docker v0.1, shards, projector, template and adapter", "docker v0.1, safetensors with an archive"):
        other = published()[kind][0]
        folder = await machine.puller.preview(publish(registry, "shown/other", "v1", other))
        assert (folder.bundle, folder.version) == (None, other.id)
        assert sum(folder.files.values()) < folder.size  # the configuration counts too
