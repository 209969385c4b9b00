import os

import pytest

from modelrunner.errors import InvalidModel
from modelrunner.store import Store
from tests.store.samples import add_model, ingest


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "data")


def test_a_bundle_is_hard_links_and_a_header(store):
    model = add_model(store, "a")
    bundle = store.bundle("a")
    assert bundle.model_id == model.id
    assert bundle.references == ("a",)
    assert bundle.directory == store.data / "bundles" / model.id[7:]
    assert bundle.files == {"model.gguf": bundle.directory / "model.gguf"}
    assert bundle.model_file.stat().st_nlink == 2
    assert bundle.size == bundle.model_file.stat().st_size
    assert bundle.context_length == 2048
    assert [t.name for t in bundle.header.tensors] == ["blk.0.weight", "blk.1.weight"]


def test_a_second_look_is_the_same_value_until_the_names_change(store):
    add_model(store, "a")
    bundle = store.bundle("a")
    assert store.bundle("a") is bundle
    store.tag("a", "b")
    assert store.bundle("a").references == ("a", "b")


def test_the_header_is_not_parsed_again(store):
    add_model(store, "a")
    before = store.bundle("a")
    blob = next(path for path in (store.data / "blobs/sha256").iterdir() if path.stat().st_nlink == 2)
    blob.chmod(0o644)
    with blob.open("r+b") as file:
        file.write(b"XXXX")  # parsing it would fail
    assert Store(store.data).bundle("a") == before


@pytest.mark.parametrize("damage", [b"", b"x", bytes(32), bytes(1000)])
def test_a_damaged_header_is_made_again(store, damage):
    add_model(store, "a")
    before = store.bundle("a")
    (before.directory / "header").write_bytes(damage)
    assert Store(store.data).bundle("a") == before
    assert (before.directory / "header").stat().st_size > 100


def test_a_damaged_bundle_is_made_again(store):
    add_model(store, "a")
    bundle = store.bundle("a")
    content = bundle.model_file.read_bytes()
    for damage in (
        lambda path: None,
        lambda path: path.write_bytes(b"something else"),
        lambda path: path.symlink_to("/etc/passwd"),
    ):
        bundle.model_file.unlink()
        damage(bundle.model_file)
        assert store.bundle("a").model_file.read_bytes() == content
        assert Store(store.data).bundle("a").model_file.stat().st_nlink == 2


@pytest.mark.parametrize("damage", [os.unlink, lambda path: os.truncate(path, 10)])
def test_a_damaged_blob_is_said_and_healed_by_the_next_pull(store, damage):
    model = add_model(store, "a")
    add_model(store, "b", seed=7)
    blob = next(p for p in (store.data / "blobs/sha256").iterdir() if p.samefile(store.bundle("a").model_file))
    damage(blob)
    reopened = Store(store.data)
    with pytest.raises(InvalidModel, match="pull the model again"):
        reopened.bundle("a")
    assert [str(digest) for digest in reopened.verify("a")] == [f"sha256:{blob.name}"]
    assert reopened.verify("b") == ()
    assert reopened.bundle("b").model_file.exists()
    assert reopened.create({"m": ingest(reopened)}, "a").id == model.id
    assert reopened.verify("a") == ()
    assert reopened.bundle("a").model_file.samefile(blob)


def test_flipped_bits_are_found_and_healed(store):
    add_model(store, "a")
    bundle = store.bundle("a")
    bundle.model_file.chmod(0o644)
    with bundle.model_file.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert len(store.verify("a")) == 1
    add_model(store, "a")
    assert store.verify("a") == ()
    assert not store.bundle("a").model_file.read_bytes().endswith(b"\xff")
