"""Nothing ends the work on batches."""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from modelrunner.batches.batch import Batch
from modelrunner.batches.batchstore import SCHEMA, BatchStore, LineAnswer, open_store
from modelrunner.batches.filestore import FileStore
from modelrunner.batches.worker import BatchWorker
from modelrunner.database import Database
from tests.waiting import HUNG

CHAT = "/v1/chat/completions"


class Store(BatchStore):
    """A store that cannot end the batch `broken`."""

    broken = ""

    def __init__(self, state: Path) -> None:
        self.files = FileStore(state / "files", 1 << 30)
        super().__init__(state / "batches", Database(state / "batches.sqlite", SCHEMA), self.files)
        self.over = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def finish(self, batch: Batch) -> Batch:
        if batch.id == self.broken:
            raise OSError("no space left on device")
        ended = super().finish(batch)
        self._loop.call_soon_threadsafe(self.over.set)
        return ended

    def add(self) -> Batch:
        line = json.dumps({"custom_id": "1", "method": "POST", "url": CHAT, "body": {"model": "m"}}).encode()
        return self.create(self.files.write("file-a", [line], "a", "").id, CHAT, "24h", 60.0, {}, "")


def faulty() -> Any:
    """A pipeline with a fault."""

    def exchange(*_: object, **__: object) -> None:
        raise RuntimeError("a fault")

    return SimpleNamespace(
        keys=None,
        in_flight=SimpleNamespace(buffer=lambda *_: None, unbuffer=lambda _: None),
        exchanges=None,
        exchange=exchange,
        resolve=SimpleNamespace(known={}),
        scheduler=SimpleNamespace(awaited=lambda beside: False),
    )


async def test_a_fault_is_the_answer_of_its_line_and_a_batch_that_cannot_end_stops_no_other(tmp_path: Path) -> None:
    pipeline = faulty()
    store = Store(tmp_path)
    store.broken = store.add().id
    other = store.add()
    working = asyncio.create_task(BatchWorker(store, pipeline).run())
    try:
        async with asyncio.timeout(HUNG):
            await store.over.wait()
    finally:
        working.cancel()
        await asyncio.wait([working])
    ended = store.get(other.id, "")
    assert (ended.status, ended.failed) == ("completed", 1)
    assert store.get(store.broken, "").status == "in_progress"


async def test_a_disk_that_stays_full_does_not_hold_up_the_end(tmp_path: Path) -> None:
    tried = asyncio.Event()
    loop = asyncio.get_running_loop()

    class FullStore(Store):
        def record(self, answers: Iterable[LineAnswer]) -> None:
            loop.call_soon_threadsafe(tried.set)
            raise OSError("no space left on device")

    store = FullStore(tmp_path)
    batch = store.add()
    working = asyncio.create_task(BatchWorker(store, faulty()).run())
    async with asyncio.timeout(HUNG):
        await tried.wait()
        working.cancel()
        await asyncio.wait([working])
    assert store.get(batch.id, "").status == "in_progress"


async def test_uploads_of_a_killed_daemon_are_removed(tmp_path: Path) -> None:
    open_store(tmp_path, 1 << 30)
    (left := tmp_path / "files" / ".file-1.0123456789abcdef.tmp").write_bytes(b"half a file")
    open_store(tmp_path, 1 << 30)
    assert not left.exists()
