"""A data directory in which links, FIFOs and folders were planted, files were removed, and disks that fail."""

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from modelrunner.errors import ModelNotFound, StorageFailed
from modelrunner.store import Store, blobs
from tests.core.test_durable import ODD
from tests.store.samples import add_model, deep_folder, ingest, unusable, write_gguf


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "data")
    add_model(store, "a", seed=1)
    add_model(store, "b", seed=2)
    store.bundle("a")
    return Store(store.data)  # which writes the index


def replace_by(odd: str, path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    ODD[odd](path)


def files_of_a(store: Store) -> dict[str, Path]:
    bundle = store.bundle("a")
    id = bundle.model_id[7:]
    weights = next(p for p in (store.data / "blobs/sha256").iterdir() if p.samefile(bundle.model_file))
    small = next(p for p in (store.data / "blobs/sha256").iterdir() if p.stat().st_nlink == 1)
    return {
        "index": store.data / "index.json",
        "names": store.data / f"manifests/sha256/{id}.names",
        "manifest": store.data / f"manifests/sha256/{id}",
        "weights": weights,
        "configuration": small,
        "header": bundle.directory / "header",
        "linked": bundle.model_file,
        "reserve": store.data / "reserve",
        "bundle": bundle.directory,
        "bundles": store.data / "bundles",
    }


@pytest.mark.parametrize("odd", [*sorted(ODD.keys() - {"socket"}), "link to a folder"])
@pytest.mark.parametrize(
    "place",
    ["index", "names", "manifest", "weights", "configuration", "header", "linked", "reserve", "bundle", "bundles"],
)
@pytest.mark.parametrize("running", [False, True])
def test_nothing_planted_is_followed_or_waited_for(
    store: Store, tmp_path: Path, odd: str, place: str, running: bool
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    path = files_of_a(store)[place]
    if odd == "link to a folder":
        replace_by("link", path)
        path.unlink()
        path.symlink_to(outside)
    else:
        replace_by(odd, path)
    opened = store if running else Store(store.data)
    assert opened.bundle("b").model_file.is_file()
    healed = add_model(opened, "a", seed=1)
    assert "a" in healed.tags
    assert opened.verify("a") == opened.missing("a") == ()
    add_model(opened, "c", seed=7)
    Store(store.data)  # which writes the index
    for name, file in files_of_a(opened).items():
        assert not file.is_symlink(), name
        assert file.is_dir() if name.startswith("bundle") else file.is_file(), name
    assert list(outside.iterdir()) == []
    opened.remove("a")
    opened.prune()
    assert [model.tags for model in Store(store.data).list()] == [["b"], ["c"]]


@pytest.mark.parametrize("name", ["bundles", "partial", "blobs", "manifests"])
def test_a_folder_that_was_removed_is_made_again(store: Store, name: str) -> None:
    shutil.rmtree(store.data / name)
    add_model(store, "a", seed=1)
    assert store.verify("a") == ()
    assert store.bundle("a").model_file.is_file()


def test_a_reserve_that_is_a_second_link_is_not_written_through(store: Store, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    (store.data / "reserve").unlink()
    os.link(mine, store.data / "reserve")
    add_model(Store(store.data), "c", seed=3)
    assert mine.read_text() == "precious"


@pytest.mark.parametrize("failing", range(1, 16))
def test_memory_and_disk_agree_whatever_a_sync_says(store: Store, monkeypatch: Any, failing: int) -> None:
    """From the given sync on all of them fail: an error is an error after a restart as well, and nothing is lost."""
    blob = ingest(store, 3)
    calls, real = 0, os.fsync

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= failing:
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    for change in (
        lambda: store.tag("b", "a2"),
        lambda: store.remove("a"),
        lambda: store.create({"m": blob}, "c"),
    ):
        calls = 0
        monkeypatch.setattr(os, "fsync", fsync)
        before = store.list()
        try:
            change()
        except StorageFailed:
            assert store.list() == before
        monkeypatch.setattr(os, "fsync", real)
        assert {m.id: m.tags for m in Store(store.data).list()} == {m.id: m.tags for m in store.list()}
        for model in store.list():
            assert store.verify(model.id) == ()


def test_a_flipped_bit_that_was_found_is_not_served_until_it_is_healed(store: Store) -> None:
    from modelrunner.errors import InvalidModel

    weights = files_of_a(store)["weights"]
    weights.chmod(0o644)
    with weights.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert store.missing("a") == ()
    read: list[int] = []
    assert [digest.hex for digest in store.verify("a", read.append)] == [weights.name]
    assert sum(read) >= weights.stat().st_size
    assert [digest.hex for digest in store.missing("a")] == [weights.name]
    assert store.have(f"sha256:{weights.name}") is None
    with pytest.raises(InvalidModel, match="pull the model again"):
        store.bundle("a")
    add_model(store, "a", seed=1)
    assert store.missing("a") == store.verify("a") == ()
    assert store.bundle("a").model_file.samefile(store.data / "blobs/sha256" / weights.name)


def test_verifying_can_be_stopped(store: Store) -> None:
    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.verify("a", stop)
    assert store.missing("a") == ()


def test_a_blob_that_is_here_is_not_hashed_under_the_lock(store: Store, monkeypatch: Any) -> None:
    real, free = blobs.is_intact, []

    def try_lock() -> None:
        free.append(store._lock.acquire(blocking=False))
        if free[-1]:
            store._lock.release()

    def is_intact(file: Path, *rest: Any) -> bool:
        if file.parent.name == "sha256" and file.stat().st_size > 3000:
            thread = threading.Thread(target=try_lock)
            thread.start()
            thread.join()
        return real(file, *rest)

    blob = store.ingest(write_gguf(store.partial / "again.gguf", seed=1))
    monkeypatch.setattr(blobs, "is_intact", is_intact)
    store.create({"m": blob}, "again")
    assert free == [True]


def test_a_download_of_any_depth_is_measured_and_pruned(store: Store) -> None:
    """As an engine may make it that quantizes a model."""
    with deep_folder(store.partial / "deep"):
        reopened = Store(store.data)
        assert [leftover.size for leftover in reopened.leftovers()] == [0]
        assert reopened.disk_usage().partial == 0
        reopened.prune()
        assert list(store.partial.iterdir()) == []


def test_what_killed_pulls_left_is_listed_and_pruned(store: Store) -> None:
    for name in ("busy", "left"):
        (store.partial / name).mkdir()
        (store.partial / name / "part").write_bytes(b"12345")
    is_busy = {store.partial / "busy"}.__contains__
    (found,) = store.leftovers(is_busy)
    assert (found.path, found.size, str(found.kind)) == (store.partial / "left", 5, "unfinished download")
    assert store.prune(is_busy) == (found,)
    assert [path.name for path in store.partial.iterdir()] == ["busy"]
    assert store.leftovers(is_busy) == ()
    assert len(store.list()) == 2


def test_what_comes_into_use_while_leftovers_are_removed_stays(store: Store) -> None:
    (store.partial / "left").write_bytes(b"12345")
    asked: list[Path] = []

    def is_busy(path: Path) -> bool:
        asked.append(path)
        return asked.count(path) > 1

    assert store.prune(is_busy) == ()
    assert [path.name for path in store.partial.iterdir()] == ["left"]


def test_a_damaged_model_is_told_with_its_fault_and_can_be_removed(store: Store) -> None:
    files_of_a(store)["manifest"].write_bytes(b"garbage")
    opened = Store(store.data)
    (damaged,) = unusable(opened)
    assert damaged.tags == ["a"]
    assert "manifest is damaged" in damaged.damage
    assert opened.whole("a") == (damaged, "a")
    assert [model.tags for model in opened.list()] == [["b"]]
    before = opened.disk_usage()[1]
    opened.remove("a")
    assert unusable(opened) == []
    with pytest.raises(ModelNotFound):
        opened.whole("a")
    assert opened.disk_usage()[1] < before  # its record still knew its files
    assert opened.leftovers() == ()
