"""The room that models on their way have in the quota, while disks are slow and models become stored."""

import threading
from collections.abc import Hashable
from pathlib import Path

import pytest

from modelrunner.errors import QuotaExceeded
from modelrunner.pull.claims import Claims
from modelrunner.store import Blob, Digest, Store
from tests.store.samples import add_model
from tests.waiting import HUNG


class SlowStore(Store):
    """Says what it has once `answer` is set."""

    def __init__(self, data: Path, quota: int) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()
        super().__init__(data, quota)

    def have(self, digest: str) -> Blob | None:
        self.asked.set()
        assert self.answer.wait(HUNG)
        return super().have(digest)


def test_nobody_waits_for_the_disk_of_another(tmp_path: Path) -> None:
    store = SlowStore(tmp_path / "data", 100)
    claims, refused = Claims(store), []

    def slow() -> None:
        with claims.claim() as claim:
            try:
                claim.require({Digest("a" * 64): 60})
            except QuotaExceeded as error:
                refused.append(error.message)

    thread = threading.Thread(target=slow)
    thread.start()
    assert store.asked.wait(HUNG)
    with claims.claim() as claim:
        claim.require({"of an index": 50})  # while the other one's disk does not answer
        store.answer.set()
        thread.join(HUNG)
        assert len(refused) == 1  # what was claimed meanwhile counts
        assert "promised to models on their way" in refused[0]


class BusyStore(Store):
    """A model is stored just after it was looked for the first time."""

    def have(self, digest: str) -> Blob | None:
        found = super().have(digest)
        if not self.list():
            add_model(self, "m")
        return found


def test_what_is_stored_during_a_look_counts_once(tmp_path: Path) -> None:
    model = add_model(Store(tmp_path / "other"), "m")
    stored = (tmp_path / "other/blobs/sha256").iterdir()
    sizes: dict[Hashable, int] = {Digest(path.name): path.stat().st_size for path in stored}
    store = BusyStore(tmp_path / "data", sum(sizes.values()) + 50)
    claims = Claims(store)
    with claims.claim() as bringing, claims.claim() as other:
        bringing.files.update(sizes)
        with pytest.raises(QuotaExceeded, match="models_quota"):
            other.require({"too much": 51})
        store.remove("m")
        other.require({"just enough": 50})
    assert store.get("m").id == model.id


@pytest.mark.parametrize("count", [8])
def test_many_at_once_never_pass_the_quota(tmp_path: Path, count: int) -> None:
    """Each wants more than a half."""
    claims = Claims(Store(tmp_path / "data", 100))
    together, taken = threading.Barrier(count), []

    def take(number: int) -> None:
        with claims.claim() as claim:
            together.wait(HUNG)
            try:
                claim.require({Digest(f"{number:064x}"): 51})
                taken.append(number)
            except QuotaExceeded:
                pass
            together.wait(HUNG)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HUNG)
    assert len(taken) == 1
