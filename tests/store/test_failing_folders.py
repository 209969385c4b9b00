"""An error at every call of the system for one of several folders: what is acknowledged is done, in memory and on disk,
and what is refused has changed nothing."""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from modelrunner.errors import ModelRunnerError
from modelrunner.store import Store
from tests.pull.disks import before_each
from tests.store.samples import add_model, write_gguf

FOLDERS = ("data", "one", "two")
Means = dict[str, str]


def means(store: Store) -> Means:
    """The ID of the model that each name means."""
    return {tag: model.id for model in store.list() for tag in model.tags}


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """`a` lies in the first folder, `b` in the second one, `both` in both."""
    root = tmp_path / "template"
    for name in FOLDERS:
        (root / name).mkdir(parents=True)
    for folder in ("one", "two"):
        store = Store(root / "data", None, [root / folder])
        add_model(store, "both", seed=3)
        store.close()
    store = opened(root)
    add_model(store, "a", seed=1)
    store.create({"m": store.ingest(write_gguf(root / "two/partial/b.gguf", seed=2))}, "b", folder=root / "two")
    store.close()
    write_gguf(root / "two/partial/new.gguf", seed=4)
    return root


def opened(root: Path) -> Store:
    return Store(root / "data", None, [root / "one", root / "two"])


def create(store: Store) -> Means:
    new = store.ingest(store.data.parent / "two/partial/new.gguf")
    made = store.create({"m": new}, "a", folder=store.data.parent / "two")
    return {"a": made.id}


def tag(store: Store) -> Means:
    id = store.get("b").id
    store.tag("b", "a")
    return {"a": id}


def remove(store: Store) -> Means:
    store.remove("both")
    return {"both": ""}


@contextmanager
def failing(folder: Path, at: int, error: int, *, for_good: bool) -> Iterator[Callable[[], bool]]:
    """Fails call number `at` for something in the folder, `for_good` also the later ones. Yields whether any did."""
    calls = 0

    def fail(name: str, path: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == at or (for_good and calls > at):
            raise OSError(error, os.strerror(error), str(path))

    with pytest.MonkeyPatch.context() as patch:
        before_each(patch, (folder,), fail)
        sync = os.fsync

        def fsync(descriptor: int) -> None:
            if (path := Path(os.readlink(f"/proc/self/fd/{descriptor}"))).is_relative_to(folder):
                fail("fsync", path)
            sync(descriptor)

        patch.setattr(os, "fsync", fsync)
        yield lambda: calls >= at


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("folder", ["one", "two"])
@pytest.mark.parametrize("change", [create, tag, remove])
def test_a_change_is_done_or_refused(
    tmp_path: Path, template: Path, change: Callable[[Store], Means], folder: str, for_good: bool, error: int
) -> None:
    for at in count(1):
        root = tmp_path / str(at)
        shutil.copytree(template, root, symlinks=True)
        store = opened(root)
        before = means(store)
        with failing(root / folder, at, error, for_good=for_good) as struck:
            try:
                expected, is_refused = before | change(store), False
            except ModelRunnerError:
                expected, is_refused = before, True
        store.look()
        wanted = {name: id for name, id in expected.items() if id}
        assert means(store) == wanted, at
        store.close()
        if not (is_refused and for_good):  # a change that the disk lets nobody undo is known to the next start alone
            again = opened(root)
            assert means(again) == wanted, at
            again.close()
        shutil.rmtree(root)
        if not struck():
            return
