"""What a store makes of a data directory that was damaged, or left by a daemon that was killed."""

import errno
import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from modelrunner.errors import InvalidModel, ModelNotFound, StorageFailed
from modelrunner.jsonfile import JsonFile
from modelrunner.store import Store
from modelrunner.store.sweeping import LeftoverKind
from tests.store.samples import add_model, files_under


@pytest.fixture
def data(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def store(data):
    store = Store(data)
    add_model(store, "a", seed=1)
    add_model(store, "b", seed=2)
    store.tag("a", "c")
    return Store(data)  # writes the index


def manifest_of(store, name):
    return store.data / "manifests/sha256" / store.get(name).id[7:]


def test_the_folders_are_private(store):
    for path in [store.data, *store.data.rglob("*")]:
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path


@pytest.mark.parametrize("text", ["3\n", "999", "", "one", "1.0", "0", "-1"])
def test_the_store_of_a_newer_release_is_left_untouched(store, text):
    (store.data / "format").write_text(text)
    (store.data / ".index.json.0.tmp").touch()
    before = files_under(store.data)
    with pytest.raises(StorageFailed, match="newer release"):
        Store(store.data)
    assert files_under(store.data) == before


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"models": [{"id": 1}]}', b"\0" * 400, b"\xff\xfe", b'{"models": null}']
)
def test_an_unreadable_index_is_set_aside_and_made_again(store, content):
    (store.data / "index.json").write_bytes(content)
    reopened = Store(store.data)
    assert names_in(reopened) == names_in(store)
    aside = list(store.data.glob("index.json.corrupt-*"))
    assert [path.read_bytes() for path in aside] == [content]
    assert names_in(Store(store.data)) == names_in(store)
    assert reopened.bundle("b").model_file.exists()


def test_no_flipped_bit_in_the_index_loses_anything(store):
    names, before = names_in(store), model_files(store)
    index = (store.data / "index.json").read_bytes()
    for bit in range(0, len(index) * 8, 97):
        damaged = bytearray(index)
        damaged[bit // 8] ^= 1 << (bit % 8)
        (store.data / "index.json").write_bytes(damaged)
        assert names_in(Store(store.data)) == names
        assert model_files(store) == before
        assert len(list(store.data.glob("index.json.corrupt-*"))) == 1
        store.prune()


def model_files(store):
    return {name for name in files_under(store.data) if name.startswith(("blobs", "manifests", "bundles"))}


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"{}"), lambda path: cut(path)])
def test_one_lost_copy_of_the_names_costs_nothing(store, damage):
    """Each model has a record beside its manifest, and a second copy of it; the index knows both."""
    manifests = store.data / "manifests/sha256"
    for path in (store.data / "index.json", *manifests.glob("*.names"), *manifests.glob("*.copy")):
        data = store.data.with_name(path.name)
        shutil.copytree(store.data, data)
        damage(data / path.relative_to(store.data))
        assert names_in(Store(data)) == names_in(store)
        assert names_in(Store(data)) == names_in(store)
        assert model_files(Store(data)) >= model_files(store) - {str(path.relative_to(store.data))}


def names_in(store):
    return {model.id: model.tags for model in store.list()}


def test_a_record_that_the_disk_cannot_read_costs_no_model_its_names(store, monkeypatch):
    record, names = manifest_of(store, "a").with_suffix(".names"), names_in(store)
    real = os.open

    def failing(path, *args, **options):
        if str(path) == str(record):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *args, **options)

    (store.data / "index.json").unlink()
    monkeypatch.setattr(os, "open", failing)
    assert names_in(Store(store.data)) == names


def test_no_flipped_bit_in_a_record_loses_anything(store):
    names = names_in(store)
    path = next((store.data / "manifests/sha256").glob("*.names"))
    record = path.read_bytes()
    for bit in range(0, len(record) * 8, 97):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(damaged)
        assert names_in(Store(store.data)) == names
        assert len(list(path.parent.glob("*.corrupt-*"))) == 1
        store.prune()


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def test_an_index_that_is_older_than_the_models_loses_none(store):
    before = (store.data / "index.json").read_bytes()
    add_model(store, "late", seed=9)
    (store.data / "index.json").write_bytes(before)
    reopened = Store(store.data)
    assert {name for model in reopened.list() for name in model.tags} == {"a", "b", "c", "late"}
    assert reopened.bundle("late").model_file.exists()


def test_a_name_keeps_its_revision_at_every_start(store):
    store.tag("a", "hf.co/org/repo:Q4_0@v1.2")
    for _ in range(3):  # from the records, then from the index that the first start writes
        store = Store(store.data)
        assert "hf.co/org/repo:Q4_0@v1.2" in store.get("a").tags


@pytest.mark.parametrize("again", [False, True])
def test_a_removed_model_does_not_come_back_with_an_old_or_lost_index(store, again):
    store.remove("b")
    if again:
        assert [model.tags for model in Store(store.data).list()] == [["a", "c"]]
    (store.data / "index.json").unlink()
    assert [model.tags for model in Store(store.data).list()] == [["a", "c"]]


def test_a_lost_index_and_lost_names_leave_the_models(store):
    ids = {model.id for model in store.list()}
    (store.data / "index.json").unlink()
    for suffix in (".names", ".copy"):
        for path in (store.data / "manifests/sha256").glob(f"*{suffix}"):
            path.unlink()
    reopened = Store(store.data)
    assert {model.id for model in reopened.list()} == ids
    assert all(model.tags == [] for model in reopened.list())
    assert add_model(reopened, "a", seed=1).id in ids
    assert len(reopened.list()) == 2


def test_nothing_that_no_model_names_is_removed_until_a_person_prunes(store):
    stray = store.data / "blobs/sha256" / ("ab" * 32)
    (store.data / "index.json").write_bytes(b"")
    stray.write_bytes(b"perhaps of a model")
    for _ in range(3):
        reopened = Store(store.data)
        assert stray.exists()
    found = reopened.leftovers()
    assert {(found.kind, found.size) for found in found} == {
        (LeftoverKind.UNNAMED, 18),
        (LeftoverKind.ASIDE, 0),
    }
    assert reopened.prune() == found
    assert not stray.exists()
    assert reopened.leftovers() == ()


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\0" * 100, b'{"schemaVersion": 2, "layers": []}'])
def test_a_corrupt_manifest_hides_no_other_model(store, content):
    manifest = manifest_of(store, "a")
    if content is None:
        manifest.unlink()
    else:
        manifest.write_bytes(content)
    reopened = Store(store.data)
    assert [model.tags for model in reopened.list()] == [["b"]]
    assert reopened.bundle("b").model_file.exists()
    with pytest.raises(InvalidModel, match="pull it again, or remove it"):
        reopened.get("a")
    with pytest.raises(InvalidModel):
        reopened.bundle("a")
    assert [str(digest) for digest in reopened.verify("a")] == [f"sha256:{manifest.name}"]


def test_a_corrupt_model_is_healed_by_the_next_pull(store):
    manifest_of(store, "a").write_bytes(b"garbage")
    reopened = Store(store.data)
    assert add_model(reopened, "a", seed=1).tags == ["a", "c"]
    assert reopened.bundle("c").model_file.exists()


def test_a_corrupt_model_can_be_removed(store):
    manifest_of(store, "a").write_bytes(b"garbage")
    reopened = Store(store.data)
    reopened.remove("a")
    reopened.remove("c")
    with pytest.raises(ModelNotFound):
        reopened.get("a")


def test_hostile_names_in_a_manifest_become_no_paths(store):
    """A manifest of the right digest, as a registry could send it, with a path in its annotation."""
    from modelrunner.store import Digest

    manifest = json.loads(manifest_of(store, "a").read_bytes())
    for name in ("../../escape", "/etc/x", "model.gguf\n", "a/b", "", "header"):
        manifest["layers"][0]["annotations"] = {"org.cncf.model.filepath": name}
        content = json.dumps(manifest).encode()
        digest = Digest.of(content)
        digest.within(store.data / "manifests/sha256").write_bytes(content)
        write_record(store, {"id": str(digest), "tags": ["hostile"], "created": 1, "version": 9})
        assert list(Store(store.data).bundle("hostile").files) == ["model.gguf"]
        Store(store.data).remove("hostile")


def write_record(store, record, stem=None):
    name = f"{stem or record['id'][7:]}.names"
    JsonFile(store.data / "manifests/sha256" / name, dict).save(record)


def test_hostile_records_are_passed_over(store):
    a, b = (model.id for model in store.list())
    tags = ["a", "c", "../x", "a\0", "B"]
    latest = {"number": 1, "version": 1 << 62}
    write_record(store, {"id": a, "tags": tags, "created": 1, "blobs": ["sha256:../x"], **latest})
    write_record(store, {"id": "sha256:../../../etc/passwd", "tags": ["evil"], "created": 1}, stem=b[7:])
    reopened = Store(store.data)
    assert [model.tags for model in reopened.list()] == [["a", "c", "b"], []]
    with pytest.raises(ModelNotFound):
        reopened.get("evil")


def test_a_tag_in_two_records_belongs_to_the_newer_one(store, tmp_path):
    """The daemon was killed, or the disk failed, after a name was moved and before the other record was written."""
    old = next((store.data / "manifests/sha256").glob(f"{store.get('a').id[7:]}.names"))
    before = old.read_bytes()
    store.tag("b", "a")
    old.write_bytes(before)
    for _ in range(2):
        reopened = Store(store.data)
        assert [model.tags for model in reopened.list()] == [["c"], ["b", "a"]]
    reopened.remove("a")
    reopened.remove("b")
    assert [model.tags for model in Store(store.data).list()] == [["c"]]


def test_leftovers_of_a_killed_daemon_are_cleared_away(store):
    """A pending record says which files may go; a file that another model has stays."""
    before = files_under(store.data)
    hexadecimal = "ab" * 32
    shared = [f"sha256:{path.name}" for path in (store.data / "blobs/sha256").iterdir()]
    pending = {"id": f"sha256:{hexadecimal}", "tags": ["x"], "created": 1, "blobs": [f"sha256:{hexadecimal}", *shared]}
    JsonFile(store.data / "manifests/sha256" / f"{hexadecimal}.pending", dict).save(pending)
    for name in (".index.json.0.tmp", f"blobs/sha256/.{hexadecimal}.0.tmp", f"manifests/sha256/{hexadecimal}"):
        (store.data / name).write_bytes(b"x")
    (store.data / "bundles" / hexadecimal).mkdir()
    (store.data / "bundles" / hexadecimal / "model.gguf").touch()
    (store.data / "blobs/sha256" / hexadecimal).touch()
    Store(store.data)
    assert files_under(store.data) == before


def test_a_pending_record_beside_a_models_own_costs_it_nothing(store):
    path = store.data / "manifests/sha256" / f"{store.get('a').id[7:]}.names"
    before = files_under(store.data)
    shutil.copy(path, path.with_suffix(".pending"))
    assert names_in(Store(store.data)) == names_in(store)
    assert files_under(store.data) == before


def test_unfinished_downloads_are_kept(store):
    (store.partial / "some").mkdir()
    (store.partial / "some" / "part").write_bytes(b"half")
    Store(store.data)
    assert (store.partial / "some" / "part").exists()


def test_a_finished_download_that_a_model_shares_is_cleared_away(store):
    """The daemon was killed after the model was stored: a writer to this file would write into the store."""
    os.link(store.bundle("a").model_file, store.partial / "finished")
    Store(store.data)
    assert not (store.partial / "finished").exists()
    assert store.verify("a") == ()


def test_nothing_is_cleared_while_nobody_knows_what_is_used(store):
    manifest_of(store, "a").write_bytes(b"garbage")
    before = files_under(store.data / "blobs")
    Store(store.data)
    assert files_under(store.data / "blobs") == before


def test_strangers_files_do_no_harm(store):
    for folder in ("blobs/sha256", "manifests/sha256", "bundles"):
        (store.data / folder / ".DS_Store").touch()
        (store.data / folder / "README").touch()
    reopened = Store(store.data)
    assert len(reopened.list()) == 2
    reopened.disk_usage()


FIRST_FORMAT = {"models": [["a", "c"], ["b"]]}


def as_first_format(store):
    """The store as the first release wrote it: an index that holds all names, and second copies without more."""
    ids = [model.id for model in store.list()]
    records = [{"id": id, "tags": tags, "created": 5} for id, tags in zip(ids, FIRST_FORMAT["models"], strict=True)]
    for path in (store.data / "manifests/sha256").glob("*.*"):
        path.unlink()
    JsonFile(store.data / "index.json", dict).save({"models": records, "complete": True})
    (store.data / "format").write_text("1\n")
    return records


@pytest.mark.parametrize("copies", [False, True])
def test_a_store_of_the_first_format_is_migrated(store, copies):
    records = as_first_format(store)
    for record in reversed(records):
        if copies:
            write_record(store, record)
    for _ in range(2):
        reopened = Store(store.data)
        assert [(model.tags, model.created) for model in reopened.list()] == [(["a", "c"], 5), (["b"], 5)]
        assert (store.data / "format").read_text() == "2\n"
    reopened.remove("b")
    assert reopened.leftovers() == ()
    assert reopened.verify("a") == ()


def test_a_migration_that_was_cut_off_is_done_again(store, monkeypatch):
    as_first_format(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        with pytest.raises(StorageFailed):
            Store(store.data)
    assert (store.data / "format").read_text() == "1\n"
    assert names_in(Store(store.data)) == names_in(store)


def refuse(*args, **options):
    raise OSError(5, "Input/output error")
