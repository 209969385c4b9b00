"""A store in several folders: where a model goes, what its name means, and a folder that is away."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from modelrunner.errors import BadRequest, Conflict, FolderMissing, InsufficientDisk, InvalidModel, StorageFailed
from modelrunner.store import Store
from tests.pull.disks import before_each
from tests.store.samples import add_model, files_under, ingest, unusable, write_gguf


class Disks:
    """A data directory and two folders; each opening is that of another daemon."""

    def __init__(self, root: Path) -> None:
        self.data, self.one, self.two = root / "data", root / "one", root / "two"
        self.one.mkdir()
        self.two.mkdir()
        self._opened: list[Store] = []

    def open(self, *folders: Path, data: Path | None = None, quota: int | None = None) -> Store:
        self.close()
        self._opened.append(Store(data or self.data, quota, folders or (self.one, self.two)))
        return self._opened[-1]

    def beside(self, *folders: Path, data: Path) -> Store:
        """Opens one more, while the others stay open."""
        self._opened.append(Store(data, None, folders))
        return self._opened[-1]

    def close(self) -> None:
        while self._opened:
            self._opened.pop().close()

    def unmount(self, folder: Path) -> Path:
        """Leaves an empty folder, as a disk does. Returns where its files are now."""
        away = folder.with_name(f"{folder.name}-away")
        folder.rename(away)
        folder.mkdir()
        return away

    def mount(self, folder: Path) -> None:
        shutil.rmtree(folder)
        folder.with_name(f"{folder.name}-away").rename(folder)


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Disks]:
    made = Disks(tmp_path)
    yield made
    made.close()


def names(store: Store) -> list[list[str]]:
    return sorted(model.tags for model in store.list())


def add_to(store: Store, folder: Path, name: str | None, seed: int = 0) -> str:
    return store.create({"m": ingest(store, seed)}, name, folder=folder).id


def weights(folder: Path) -> set[str]:
    return {path.name for path in (folder / "blobs/sha256").iterdir() if path.stat().st_size > 3000}


def flip_a_byte(folder: Path) -> str:
    """Of the weights in the folder. Returns their digest."""
    (digest,) = weights(folder)
    path = folder / "blobs/sha256" / digest
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    return digest


def test_a_name_keeps_its_revision_while_its_folder_is_away(disks: Disks) -> None:
    store = disks.open()
    add_to(store, disks.one, "hf.co/org/repo@v1.2")
    store = disks.open()
    disks.unmount(disks.one)
    store = disks.open()
    assert [model.tags for model in unusable(store)] == [["hf.co/org/repo@v1.2"]]


def test_a_new_model_goes_to_the_first_folder_and_all_are_listed(disks: Disks) -> None:
    store = disks.open()
    add_model(store, "a")
    add_to(store, disks.two, "b", 1)
    add_to(store, disks.data, "c", 2)
    assert [bool(weights(folder)) for folder in (disks.one, disks.two, disks.data)] == [True] * 3
    reopened = disks.open()
    assert names(reopened) == [["a"], ["b"], ["c"]]
    for name, folder in (("a", disks.one), ("b", disks.two), ("c", disks.data)):
        assert reopened.bundle(name).model_file.is_relative_to(folder)
        assert reopened.verify(name) == reopened.missing(name) == ()
        assert reopened.get(reopened.get(name).id[:20]).tags == [name]


def test_each_folder_is_a_store_of_its_own(disks: Disks) -> None:
    store = disks.open()
    add_to(store, disks.two, "b", 1)
    before = files_under(disks.two)
    disks.close()
    assert names(disks.open(disks.data, data=disks.two)) == [["b"]]
    disks.close()
    assert before.keys() <= files_under(disks.two).keys()
    (disks.one / "format").write_text("99\n")
    before = files_under(disks.one)
    store = disks.open()
    assert [folder.path for folder in store.absent()] == [disks.one]
    assert "newer release" in store.absent()[0].reason
    assert files_under(disks.one).keys() - before.keys() <= {"daemon.lock"}
    assert names(store) == [["b"]]


def test_a_folder_serves_one_daemon(disks: Disks, tmp_path: Path) -> None:
    store = disks.open(disks.one)
    add_model(store, "a")
    other = disks.beside(disks.one, disks.two, data=tmp_path / "other")
    assert [(folder.path, "a daemon uses it" in folder.reason) for folder in other.absent()] == [(disks.one, True)]
    assert other.list() == []
    store.close()
    other.look()
    assert names(other) == [["a"]]


def test_removing_and_naming_work_where_the_model_lies(disks: Disks) -> None:
    store = disks.open()
    id = add_to(store, disks.two, "b", 1)
    add_to(store, disks.one, "a")
    before = files_under(disks.one)
    store.tag("b", "b2")
    assert store.remove("b").deleted is None
    assert files_under(disks.one) == before
    assert names(disks.open()) == [["a"], ["b2"]]
    store = disks.open()
    assert store.remove("b2").deleted == id
    assert not weights(disks.two)
    assert names(disks.open()) == [["a"]]


def test_a_name_is_taken_from_a_model_of_another_folder(disks: Disks) -> None:
    store = disks.open()
    old = add_to(store, disks.one, "a")
    new = add_to(store, disks.two, "a", 1)
    other = add_to(store, disks.data, "b", 2)
    assert store.get("a").id == new
    store.tag("b", "a")
    for opened in (store, disks.open()):
        assert opened.get("a").id == other
        assert {model.id: model.tags for model in opened.list()} == {old: [], new: [], other: ["b", "a"]}


def with_a_name_in_both(disks: Disks) -> tuple[str, str]:
    """Two daemons give the same name, each in a folder of its own. Returns both models."""
    first = add_model(disks.open(disks.one), "a").id
    return first, add_model(disks.open(disks.two), "a", seed=1).id


def test_a_name_in_two_folders_means_the_model_that_got_it_last(disks: Disks) -> None:
    first, second = with_a_name_in_both(disks)
    for folders in ((disks.one, disks.two), (disks.two, disks.one)):
        store = disks.open(*folders)
        assert store.get("a").id == second
        assert {model.id: model.tags for model in store.list()} == {first: [], second: ["a"]}
    assert store.remove("a").deleted == second
    assert store.get("a").id == first
    assert names(disks.open()) == [["a"]]


def test_a_name_that_was_lost_does_not_come_back_with_another_name(disks: Disks) -> None:
    first, second = with_a_name_in_both(disks)
    disks.open().tag(first, "b")
    store = disks.open()
    assert {model.id: model.tags for model in store.list()} == {first: ["b"], second: ["a"]}


def test_a_model_in_two_folders_is_one_model(disks: Disks) -> None:
    for folder, name in ((disks.one, "a"), (disks.two, "b")):
        id = add_model(disks.open(folder), name).id
    store = disks.open()
    assert names(store) == [["a", "b"]]
    assert [size.folder for size in store.disk_usage().models] == [disks.one, disks.two]
    assert store.used() == 2 * store.get(id).size == sum(store.freed([id]))
    assert store.bundle("b").model_file.is_relative_to(disks.one)
    blob = next((disks.one / "blobs/sha256").glob(next(iter(weights(disks.one)))))
    blob.chmod(0o600)
    os.truncate(blob, 5)
    assert store.missing("a")
    assert store.remove("b").deleted is None
    assert store.remove("a").deleted == id
    assert not weights(disks.one) | weights(disks.two)
    assert disks.open().list() == []


def test_what_is_damaged_in_one_folder_is_used_from_another(disks: Disks) -> None:
    for folder in (disks.one, disks.two):
        id = add_model(disks.open(folder), "a").id
    (disks.one / "manifests/sha256" / id[7:]).write_bytes(b"{}")
    store = disks.open()
    assert unusable(store) == []
    assert store.bundle("a").model_file.is_relative_to(disks.two)


def test_what_lies_elsewhere_is_copied_and_not_linked(disks: Disks, tmp_path: Path) -> None:
    store = disks.open()
    add_to(store, disks.one, "a")
    (digest,) = weights(disks.one)
    blob = store.have(f"sha256:{digest}")
    assert blob is not None
    template = tmp_path / "data/partial/t"
    template.write_text("{{ messages }}")
    files = {"model.gguf": blob, "chat_template.jinja": store.ingest(template)}
    beside = store.create(files, "near")  # most of it is in the first folder
    assert store.bundle("near").directory.is_relative_to(disks.one)
    store.create({"model.gguf": blob}, "copy", folder=disks.two)
    assert weights(disks.two) == weights(disks.one) == {digest}
    assert (disks.two / "blobs/sha256" / digest).stat().st_ino != blob.path.stat().st_ino
    store.remove("a")
    store.remove(beside.id)
    assert disks.open(disks.two).verify("copy") == ()


def test_a_damaged_file_is_not_copied(disks: Disks) -> None:
    store = disks.open()
    add_to(store, disks.one, "a")
    digest = flip_a_byte(disks.one)
    blob = store.have(f"sha256:{digest}")
    assert blob is not None
    before = files_under(disks.two)
    with pytest.raises(Exception, match="damaged"):
        store.create({"model.gguf": blob}, "copy", folder=disks.two)
    assert files_under(disks.two) == before
    assert names(store) == [["a"]]


def test_a_folder_that_is_missing_at_the_start(disks: Disks) -> None:
    store = disks.open()
    add_to(store, disks.one, "a")
    id = add_to(store, disks.two, "big", 1)
    disks.close()
    disks.two.rename(disks.two.with_name("two-away"))
    store = disks.open()
    assert names(store) == [["a"]]
    (away,) = unusable(store)
    assert (away.id, away.tags) == (id, ["big"])
    assert f"the folder {disks.two} is not there" in away.damage
    for ask in (store.get, store.bundle, store.remove, store.manifest, lambda name: store.tag(name, "x")):
        with pytest.raises(FolderMissing, match=f"big: the folder {disks.two} is not there: mount its disk"):
            ask("big")
    with pytest.raises(FolderMissing):
        store.places(wanted=disks.two)
    add_model(store, "c", seed=2)
    disks.two.with_name("two-away").rename(disks.two)
    store.look()
    assert store.absent() == ()
    assert store.get("big").id == id
    assert store.verify("big") == ()


def test_nothing_is_written_into_the_place_of_a_disk(disks: Disks) -> None:
    """An empty folder is what a disk leaves that is not mounted."""
    store = disks.open()
    id = add_to(store, disks.two, "big", 1)
    disks.close()
    disks.unmount(disks.two)
    store = disks.open()
    assert "is empty, and it had models" in store.absent()[0].reason
    with pytest.raises(FolderMissing):
        store.get("big")
    assert list(disks.two.iterdir()) == []
    disks.mount(disks.two)
    store.look()
    assert store.get("big").id == id


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.remove("big"),
        lambda store: store.remove("second"),
        lambda store: store.remove(store.whole("big")[0].id, force=True),
        lambda store: store.tag("big", "third"),
    ],
)
def test_a_change_of_a_folder_that_is_lost_is_refused(disks: Disks, change: Callable[[Store], object]) -> None:
    store = disks.open()
    id = add_to(store, disks.two, "big", 1)
    store.tag("big", "second")
    disks.unmount(disks.two)
    with pytest.raises(FolderMissing, match=f"{disks.two}.*mount its disk"):
        change(store)
    assert list(disks.two.iterdir()) == []
    disks.mount(disks.two)
    store.look()
    assert {name: store.get(name).id for name in ("big", "second")} == {"big": id, "second": id}


def test_another_disk_in_the_place_of_a_folder_is_not_written_to(disks: Disks) -> None:
    store = disks.open()
    add_to(store, disks.two, "big", 1)
    disks.unmount(disks.two)
    shutil.copytree(disks.one, disks.two, dirs_exist_ok=True)  # with a format, as a store has it
    (disks.two / "daemon.lock").unlink()
    before = files_under(disks.two)
    with pytest.raises(FolderMissing):
        store.create({"m": ingest(store, 2)}, "new", folder=disks.two)
    assert files_under(disks.two) == before


def test_the_other_folders_are_pruned_while_one_is_lost(disks: Disks) -> None:
    store = disks.open()
    add_to(store, disks.one, "a", 1)
    write_gguf(disks.two / "partial/left.gguf")
    write_gguf(disks.data / "partial/left.gguf")
    disks.unmount(disks.one)
    assert {leftover.path for leftover in store.prune()} == {
        disks.two / "partial/left.gguf",
        disks.data / "partial/left.gguf",
    }
    assert list(disks.one.iterdir()) == []


def test_the_other_folders_are_pruned_when_one_fails(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    store = disks.open()
    write_gguf(disks.one / "partial/left.gguf")
    write_gguf(disks.two / "partial/left.gguf")

    def fail(call: str, path: Path) -> None:
        if call == "unlink":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    before_each(monkeypatch, (disks.one,), fail)
    with pytest.raises(StorageFailed, match=r"left\.gguf"):
        store.prune()
    assert [(folder / "partial/left.gguf").exists() for folder in (disks.one, disks.two)] == [True, False]


def test_a_model_with_a_copy_on_a_disk_that_is_away_is_not_called_removed(disks: Disks) -> None:
    for folder in (disks.one, disks.two):
        id = add_model(disks.open(folder), "a").id
    store = disks.open()
    disks.unmount(disks.two)
    with pytest.raises(FolderMissing, match=str(disks.two)):
        store.remove("a")
    assert store.get("a").id == id
    disks.mount(disks.two)
    assert store.remove("a").deleted == id
    assert disks.open().list() == []


def test_a_folder_that_is_lost_meanwhile(disks: Disks) -> None:
    store = disks.open()
    add_to(store, disks.one, "a")
    id = add_to(store, disks.two, "big", 1)
    bundle = store.bundle("big")
    file = ingest(store, 2)
    disks.unmount(disks.two)
    with pytest.raises(FolderMissing, match="not there any more"):
        store.create({"m": file}, "new", folder=disks.two)
    assert list(disks.two.iterdir()) == []
    with pytest.raises(FolderMissing, match=r"big: the folder .* is empty, and it had models"):
        store.bundle("big")
    assert names(store) == [["a"]]
    assert [model.id for model in unusable(store)] == [id]
    assert store.create({"m": file}, "new").tags == ["new"]
    assert store.prune() == ()
    disks.mount(disks.two)
    told: list[None] = []
    store.watchers.append(lambda: told.append(None))
    looks = store.looks
    store.look()
    assert (len(told), store.looks) == (1, looks + 1)
    assert store.bundle("big") == bundle
    store.look()
    assert store.looks == looks + 1


def test_a_name_of_a_folder_that_is_away_can_be_given_again(disks: Disks) -> None:
    store = disks.open()
    old = add_to(store, disks.two, "a", 1)
    disks.unmount(disks.two)
    store.look()
    new = add_model(store, "a", seed=2).id
    assert store.get("a").id == new
    assert [model.tags for model in unusable(store)] == [[]]
    disks.mount(disks.two)
    store.look()
    assert store.get("a").id == new
    assert {model.id: model.tags for model in store.list()} == {new: ["a"], old: []}


def test_the_folders_can_be_changed(disks: Disks) -> None:
    store = disks.open(disks.one)
    add_model(store, "a")
    store.set_folders([disks.two, disks.one])
    add_model(store, "b", seed=1)
    assert store.bundle("b").directory.is_relative_to(disks.two)
    store.set_folders([disks.one])
    assert names(store) == [["a"]]
    assert (unusable(store), store.absent()) == ([], ())
    shutil.rmtree(disks.two)
    disks.two.mkdir()
    store.set_folders([disks.two, disks.one])  # emptied on purpose, and taken out in between
    assert store.absent() == ()
    assert add_model(store, "c", seed=2).tags == ["c"]


def test_a_link_to_a_folder_is_not_a_second_one(disks: Disks) -> None:
    disks.two.rmdir()
    disks.two.symlink_to(disks.one)
    store = disks.open()
    assert [folder.path for folder in store.absent()] == [disks.two]


def test_where_a_model_may_go(disks: Disks) -> None:
    store = disks.open()
    add_to(store, disks.two, "b", 1)
    assert [folder.data for folder in store.places()] == [disks.one, disks.two, disks.data]
    assert [folder.data for folder in store.places("b")] == [disks.two]
    assert [folder.data for folder in store.places(wanted=disks.data)] == [disks.data]
    with pytest.raises(Conflict, match=f"lies in {disks.two}: remove it"):
        store.places("b", disks.one)
    with pytest.raises(BadRequest, match=f"only .*{disks.one}.* model_dirs"):
        store.places(wanted=disks.one.parent)


def test_the_quota_counts_all_folders(disks: Disks) -> None:
    store = disks.open()
    size = add_model(store, "a").size
    store = disks.open(disks.one, disks.two, quota=size * 3 // 2)
    (digest,) = weights(disks.one)
    blob = store.have(f"sha256:{digest}")
    assert blob is not None
    with pytest.raises(InsufficientDisk, match="models_quota"):
        store.create({"m": blob}, "b", folder=disks.two)  # a second copy takes its bytes again
    assert store.create({"m": blob}, "b", folder=disks.one).tags == ["a", "b"]


def test_pruning_looks_into_each_folder_for_itself(disks: Disks) -> None:
    store = disks.open()
    add_to(store, disks.one, "a")
    (digest,) = weights(disks.one)
    blob = store.have(f"sha256:{digest}")
    assert blob is not None
    shutil.copy(blob.path, disks.two / "blobs/sha256" / digest)  # in use in the other folder alone
    write_gguf(disks.two / "partial/left.gguf")
    assert {leftover.path for leftover in store.leftovers()} == {
        disks.two / "blobs/sha256" / digest,
        disks.two / "partial/left.gguf",
    }
    assert len(store.prune()) == 2
    assert store.verify("a") == ()


def test_damage_is_that_of_one_folder(disks: Disks) -> None:
    add_model(disks.open(disks.one), "a")
    add_model(disks.open(disks.two), "b", seed=1)
    store = disks.open()
    digest = flip_a_byte(disks.two)
    assert [str(found)[7:] for found in store.verify("b")] == [digest]
    assert [bool(model.damage) for model in store.list()] == [False, True]
    with pytest.raises(InvalidModel):
        store.bundle("b")
    assert store.bundle("a")


def test_a_damaged_copy_leaves_the_model_served_from_the_other(disks: Disks) -> None:
    for folder in (disks.one, disks.two):
        add_model(disks.open(folder), "a")
    store = disks.open()
    digest = flip_a_byte(disks.one)
    assert [str(found)[7:] for found in store.verify("a")] == [digest]
    assert store.missing("a") == store.verify("a") == ()
    assert store.bundle("a").model_file.is_relative_to(disks.two)
    assert [model.damage for model in store.list()] == [""]
    flip_a_byte(disks.two)
    assert store.verify("a")
    assert [bool(model.damage) for model in store.list()] == [True]
    with pytest.raises(InvalidModel):
        store.bundle("a")
