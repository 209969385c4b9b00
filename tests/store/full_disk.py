"""Run by test_full_disk.py with a small file system of its own: what a store can still do when nothing is free."""

import asyncio
import os
import sqlite3
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from modelrunner.batches.batchstore import open_store
from modelrunner.config.modelconfig import ModelConfiguration
from modelrunner.database import Database
from modelrunner.errors import InsufficientDisk
from modelrunner.jsonfile import JsonFile
from modelrunner.keys.ring import KeyRing
from modelrunner.models.configurations import Configurations, PostedConfiguration
from modelrunner.store import Store
from tests.store.samples import add_model, files_under, ingest


def fill(folder: Path, name: str) -> None:
    with suppress(OSError), open(folder / name, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert os.statvfs(folder).f_bavail == 0


def refused(action: Callable[[], object]) -> str:
    try:
        action()
    except InsufficientDisk as error:
        return error.message
    raise AssertionError("it fitted after all")


def main(root: Path) -> None:
    store = Store(root / "data")
    (root / "state").mkdir()
    batches, files = open_store(root / "state", 1 << 30)
    line = b'{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m"}}'
    file = files.write("file-a", [line], "a", "")
    for seed, name in enumerate(("a", "b", "c")):
        add_model(store, name, seed=seed)
    store.tag("a", "a2")
    blob = ingest(store, 9)
    models, before = store.list(), files_under(store.data)
    fill(root, "one")

    refused(lambda: batches.create(file.id, "/v1/embeddings", "24h", 60.0, {}, ""))
    refused(lambda: KeyRing(root / "state/keys.json").create("kim"))
    assert (batches.all(""), list(KeyRing(root / "state/keys.json"))) == ([], [])

    message = refused(lambda: store.create({"m": blob}, "d"))
    assert "256KiB are needed and 0B free" in message, message
    assert "modelrunner rm" in message
    refused(lambda: Store(root / "another"))
    kept = Configurations(store.data / "configurations.json")
    before_any, wanted = kept.settings.posted_for("m"), PostedConfiguration(1, ModelConfiguration(parallel=2))
    message = refused(lambda: asyncio.run(kept.keep("m", None, before_any, wanted)))
    assert f"free in {store.data}: make room" in message, message
    assert kept.settings.posted_for("m") == before_any
    assert store.list() == models
    assert files_under(store.data) == before
    assert Store(store.data).list() == models

    store.remove("a2")
    fill(root, "two")  # what the reserve gave is not kept back again by anybody else
    store.remove("b")
    assert [model.tags for model in Store(store.data).list()] == [["a"], ["c"]]
    fill(root, "three")
    store.remove("c")
    store.remove("a")
    assert Store(store.data).list() == []

    for name in ("one", "two", "three"):
        (root / name).unlink()
    assert store.create({"m": blob}, "d").tags == ["d"]
    with_many_names(root)
    for name in ("four", "five", "six"):
        (root / name).unlink()
    damaged_database(root / "b.sqlite")


def damaged_database(path: Path) -> None:
    """A repair that finds no room loses no row."""
    database = Database(path, "create table things (name text, data blob);")
    with database.transaction() as connection:
        rows = [(str(number), os.urandom(500)) for number in range(400)]
        connection.executemany("insert into things (name, data) values (?, ?)", rows)
    data = bytearray(path.read_bytes())
    data[len(data) // 2 + 2000] ^= 4
    for kibibytes in (8, 300, 500, 600, 700):
        for file in path.parent.glob("b.sqlite*"):
            file.unlink()
        path.write_bytes(data)
        fill(path.parent, "seven")
        os.truncate(path.parent / "seven", (path.parent / "seven").stat().st_size - (kibibytes << 10))
        again = Database(path, "create table things (name text, data blob);")
        with suppress(sqlite3.Error, OSError), again.transaction():
            pass
        (path.parent / "seven").unlink()
        with again.transaction() as connection:
            [(kept,)] = connection.execute("select count(*) from things")
        assert kept >= 390, (kibibytes, kept)


def with_many_names(root: Path) -> None:
    """The names of a model, or of many, cost no disk space to remove."""
    data = root / "data"
    model = add_model(Store(data), "many", seed=4)
    names = data / "manifests/sha256" / f"{model.id[7:]}.names"
    record = JsonFile(names, dict)
    tags = [f"docker.io/an-organisation/a-model-of-theirs:{number}" for number in range(3400)]
    record.save((record.load() or {}) | {"tags": tags})
    store = Store(data)
    (store.partial / "left").mkdir()
    (store.partial / "left" / "part").write_bytes(bytes(20_000))
    fill(root, "four")
    assert store.remove("an-organisation/a-model-of-theirs:17").names == ("an-organisation/a-model-of-theirs:17",)
    fill(root, "five")
    assert sum(leftover.size for leftover in store.prune()) == 20_000
    assert os.statvfs(root).f_bavail > 0
    fill(root, "six")
    reopened = Store(data)
    assert [len(model.tags) for model in reopened.list()] == [1, 3399]
    assert reopened.verify("d") == reopened.verify(model.id) == ()
    removed = reopened.remove(model.id, force=True)
    assert (len(removed.names), removed.deleted) == (3399, model.id)
    assert [model.tags for model in Store(data).list()] == [["d"]]
    assert os.statvfs(root).f_bavail > 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
