"""What the number of models must not cost: files that are read, and bytes that are written."""

import os
from pathlib import Path

import pytest

from modelrunner.store import Store
from tests.opened import opened_in
from tests.store.samples import add_model


def filled(data: Path, count: int) -> Store:
    store = Store(data)
    for seed in range(count):
        add_model(store, f"m{seed:03}", seed=seed, vocabulary=16 + seed)
    return store


@pytest.fixture
def stores(tmp_path: Path) -> list[Path]:
    """Two stores, with few and with more models, whose indexes are written."""
    for count in (2, 30):
        Store(filled(tmp_path / str(count), count).data)
    return [tmp_path / "2", tmp_path / "30"]


def test_a_start_reads_as_many_files_for_many_models_as_for_few(stores: list[Path]) -> None:
    counts = []
    for data in stores:
        with opened_in(data) as opened:
            store = Store(data)
        counts.append(len(opened))
    assert len(store.list()) == 30
    assert counts[0] == counts[1] < 10


def test_a_start_reads_the_files_of_the_models_that_changed(stores: list[Path]) -> None:
    data = stores[1]
    id = Store(data).get("m007").id[7:]
    Store(data).tag("m007", "again")
    with opened_in(data) as opened:
        assert Store(data).get("again").id[7:] == id
    read = {path for path in opened if "/manifests/sha256/" in path}
    assert {Path(path).name.partition(".")[0] for path in read} == {id}


def test_a_change_opens_as_many_files_beside_many_models_as_beside_few(stores: list[Path]) -> None:
    found = []
    for data in stores:
        store = Store(data)
        index = (data / "index.json").stat()
        with opened_in(data) as opened:
            store.tag("m001", "other")
            add_model(store, "new", seed=77)
            store.remove("other")
            store.remove("new")
        assert os.path.samestat((data / "index.json").stat(), index)
        found.append(len(opened))
    assert found[0] == found[1]
