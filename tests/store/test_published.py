"""Models that keep the manifest they were published with: docker's, with and without names for their files."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from modelrunner.defaults import DefaultMessage, ModelDefaults
from modelrunner.errors import InvalidModel
from modelrunner.store import Blob, Store
from modelrunner.store.manifests import MOST_LAYERS
from modelrunner.store.mediatypes import FILE_TYPE, GGUF_TYPE, PROJECTOR_TYPE, SAFETENSORS_TYPE, TEMPLATE_TYPE
from tests.store.folders import model_files, write
from tests.store.samples import write_gguf

LICENSE = "application/vnd.docker.ai.license"
CONFIG = {"format": "gguf", "quantization": "Q4_0", "parameters": "1 M", "architecture": "llama", "size": "1 MB"}
V1, V2 = (f"application/vnd.docker.ai.model.config.v0.{n}+json" for n in (1, 2))
Layers = list[tuple[str, bytes, str | None]]


def publish(store: Store, layers: Layers, version: str = V1, **more: Any) -> tuple[bytes, dict[str, Blob]]:
    """What a registry has: the manifest, and the blobs, downloaded. `more` stands in the configuration."""
    created = {"created": "2026-01-01T00:00:00Z"}
    config = json.dumps({"config": CONFIG | more, "descriptor": created, "rootfs": {}}).encode()
    blobs: dict[str, Blob] = {}

    def put(media_type: str, data: bytes, name: str | None) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (store.partial / digest).write_bytes(data)
        blobs[digest] = store.ingest(store.partial / digest)
        told: dict[str, Any] = {"mediaType": media_type, "size": len(data), "digest": f"sha256:{digest}"}
        return told if name is None else told | {"annotations": {"org.cncf.model.filepath": name, "other": "x"}}

    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put(version, config, None),
        "layers": [put(*layer) for layer in layers],
        "annotations": {"made": "elsewhere"},
    }
    return json.dumps(manifest, indent=3).encode(), blobs


def gguf(tmp_path: Path, **options: Any) -> bytes:
    return write_gguf(tmp_path / "some.gguf", **options).read_bytes()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "data")


def test_the_digest_of_the_manifest_is_the_models_id(store: Store, tmp_path: Path) -> None:
    manifest, blobs = publish(store, [(GGUF_TYPE, gguf(tmp_path), None), (LICENSE, b"free", None)])
    model = store.create(blobs, "mine", manifest=manifest)
    assert model.id == f"sha256:{hashlib.sha256(manifest).hexdigest()}"
    assert (store.data / "manifests/sha256" / model.id[7:]).read_bytes() == manifest
    assert store.get(f"anything@{model.id}") == model
    assert model.config == CONFIG
    for opened in (store, Store(store.data)):
        assert opened.list() == [model]
        assert list(opened.bundle("mine").files) == ["model.gguf"]
        assert opened.verify("mine") == opened.missing("mine") == ()
        assert opened.leftovers() == ()
        assert {digest: opened.have(f"sha256:{digest}") is not None for digest in blobs} == dict.fromkeys(blobs, True)
    store.remove("mine")
    assert list((store.data / "blobs/sha256").iterdir()) == []


@pytest.mark.parametrize(
    ("told", "carried"), [(512, 512), (2048, None), (100_000, None), (0, None), (-1, None), ("512", None), (True, None)]
)
def test_the_context_size_that_others_publish(store: Store, tmp_path: Path, told: Any, carried: int | None) -> None:
    """One beyond the trained length, or that length itself, asks for nothing."""
    manifest, blobs = publish(store, [(GGUF_TYPE, gguf(tmp_path), None)], context_size=told)
    store.create(blobs, "mine", manifest=manifest)
    for opened in (store, Store(store.data)):
        defaults = opened.bundle("mine").defaults
        assert (defaults and defaults.context_size) == carried


def test_the_context_size_that_we_publish(store: Store, tmp_path: Path) -> None:
    given = {"model.gguf": store.ingest(write_gguf(store.partial / "x.gguf"))}
    plain = store.create(given, "plain")
    small = store.create(store.files("plain"), "small", defaults=ModelDefaults(context_size=512))
    assert (plain.config["context_size"], small.config["context_size"]) == (2048, 512)
    assert store.bundle("plain").defaults is None


def test_a_model_that_the_next_start_would_not_read_is_refused(store: Store) -> None:
    given = {"model.gguf": store.ingest(write_gguf(store.partial / "x.gguf"))}
    long = ModelDefaults(messages=(DefaultMessage("user", "x" * (1 << 17)),) * 40)
    with pytest.raises(InvalidModel, match="over 4 MiB"):
        store.create(given, "mine", defaults=long)
    files = {name: store.ingest(write(store.partial, {name: data}) / name) for name, data in model_files().items()}
    many = {f"words-{number}.txt": files["tokenizer.json"] for number in range(MOST_LAYERS)}
    with pytest.raises(InvalidModel, match=f"the most allowed are {MOST_LAYERS}"):
        store.create(files | many, "mine")
    assert Store(store.data).list() == []


@pytest.mark.parametrize("version", [V1, V2])
@pytest.mark.parametrize("named", [False, True])
def test_shards_projector_and_template(store: Store, tmp_path: Path, version: str, named: bool) -> None:
    shards = [gguf(tmp_path, shard=(n, 2), seed=n) for n in range(2)]
    layers: Layers = [
        (GGUF_TYPE, shard, f"x-{n:05}-of-00002.gguf" if named else None) for n, shard in enumerate(shards, 1)
    ]
    layers += [(PROJECTOR_TYPE, gguf(tmp_path, architecture="clip"), "clip.gguf" if named else None)]
    layers += [(TEMPLATE_TYPE, b"{{ messages }}", None)]
    manifest, blobs = publish(store, layers[::-1] if named else layers, version)
    store.create(blobs, "mine", manifest=manifest)
    names = ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf", "mmproj.gguf", "chat_template.jinja"]
    for opened in (store, Store(store.data)):
        bundle = opened.bundle("mine")
        assert list(bundle.files) == names
        assert [bundle.files[name].read_bytes() for name in names[:2]] == shards
        assert bundle.capabilities == {"chat", "completion", "vision"}


def test_a_folder(store: Store) -> None:
    files = model_files()
    layers: Layers = [(SAFETENSORS_TYPE if n.endswith("tensors") else FILE_TYPE, data, n) for n, data in files.items()]
    manifest, blobs = publish(store, [*layers[::-1], (FILE_TYPE, b"# Read me", "README.md")], V2)
    store.create(blobs, "mine", manifest=manifest)
    for opened in (store, Store(store.data)):
        bundle = opened.bundle("mine")
        assert {name: path.read_bytes() for name, path in bundle.files.items()} == files
        assert next(iter(bundle.files)) == "config.json"


def test_what_is_here_already_need_not_be_fetched_again(store: Store, tmp_path: Path) -> None:
    content = gguf(tmp_path)
    manifest, blobs = publish(store, [(GGUF_TYPE, content, None)])
    store.create(blobs, "old", manifest=manifest)
    manifest, _ = publish(store, [(GGUF_TYPE, content, None), (LICENSE, b"new", None)])
    digests = {layer["digest"] for layer in json.loads(manifest)["layers"]} | {json.loads(manifest)["config"]["digest"]}
    have = {digest: store.have(digest) for digest in digests}
    assert sum(blob is None for blob in have.values()) == 1
    fetched = store.ingest(store.partial / hashlib.sha256(b"new").hexdigest())
    store.create({digest: blob or fetched for digest, blob in have.items()}, "new", manifest=manifest)
    store.remove("old")
    assert store.bundle("new").model_file.read_bytes() == content
    assert store.verify("new") == ()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda manifest: manifest["config"].update(mediaType="application/vnd.oci.image.config.v1+json"),
            "media type",
        ),
        (lambda manifest: manifest["layers"].clear(), "names no usable file"),
        (lambda manifest: manifest["layers"][0].update(size=5), "missing"),
        (lambda manifest: manifest["layers"][0].update(digest=f"sha256:{'0' * 64}"), "missing"),
        (lambda manifest: manifest["layers"][0].update(digest="sha512:00"), "cannot be parsed"),
        (lambda manifest: [layer.update(mediaType=SAFETENSORS_TYPE) for layer in manifest["layers"]], "no config.json"),
        (lambda manifest: manifest["layers"].reverse(), "wrong order"),
        (lambda manifest: manifest.update(schemaVersion=1), "cannot be parsed"),
    ],
)
def test_what_is_no_model(store: Store, tmp_path: Path, change: Any, match: str) -> None:
    shards = [gguf(tmp_path, shard=(n, 2), seed=n) for n in range(2)]
    manifest, blobs = publish(store, [(GGUF_TYPE, shard, None) for shard in shards])
    changed = json.loads(manifest)
    change(changed)
    with pytest.raises(InvalidModel, match=match):
        store.create(blobs, "mine", manifest=json.dumps(changed).encode())
    assert store.list() == []
    assert store.disk_usage()[1] == 0
    store.create(blobs, "mine", manifest=manifest)
