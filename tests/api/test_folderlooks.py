"""A disk that does not answer keeps nobody waiting who does not need it."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelrunner.models.library import FolderLooks
from modelrunner.store import Store
from tests.gateway.fakes import until
from tests.waiting import HUNG


class SlowStore(Store):
    """Its disks answer once `answer` is set."""

    def __init__(self, root: Path) -> None:
        (root / "disk").mkdir()
        self.answer, self.asked = threading.Event(), 0
        super().__init__(root / "data", None, [root / "disk"])

    def look(self) -> None:
        self.asked += 1
        self.answer.wait(HUNG)
        super().look()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SlowStore]:
    made = SlowStore(tmp_path)
    yield made
    made.answer.set()
    made.close()


async def test_who_asks_goes_on_with_what_was_known(store: SlowStore, tmp_path: Path) -> None:
    looks = FolderLooks(store, wait=0.01)
    (tmp_path / "disk").rename(tmp_path / "away")
    async with asyncio.timeout(HUNG):
        assert await asyncio.gather(*(looks.absent() for _ in range(5))) == [()] * 5
        assert store.asked == 1
        assert "a disk of model_dirs has not answered" in looks.trouble
        store.answer.set()
        await until(lambda: not looks.trouble)
        assert [folder.path for folder in await looks.absent()] == [tmp_path / "disk"]


async def test_all_who_ask_share_a_look(store: SlowStore) -> None:
    looks = FolderLooks(store, wait=HUNG)
    asking = [asyncio.create_task(looks.absent()) for _ in range(5)]
    async with asyncio.timeout(HUNG):
        await until(lambda: store.asked > 0)
        assert (looks.trouble, any(task.done() for task in asking)) == ("", False)
        store.answer.set()
        assert await asyncio.gather(*asking) == [()] * 5
    assert store.asked == 1
