"""The batches in SQLite."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from modelrunner.batches.batch import Batch
from modelrunner.batches.batchstore import SCHEMA, BatchStore, LineAnswer
from modelrunner.batches.filestore import FileStore
from modelrunner.batches.worker import BatchWorker
from modelrunner.database import Database
from modelrunner.errors import Conflict
from tests.waiting import HUNG

CHAT = "/v1/chat/completions"


async def test_a_batch_that_ends_while_it_is_cancelled_keeps_its_answers(tmp_path: Path) -> None:
    ending: list[Batch] = []

    def clock() -> float:
        """The batch ends at the moment at which it is to be cancelled."""
        if ending:
            store.finish(ending.pop())
        return 1.0

    files = FileStore(tmp_path / "files", 1 << 30)
    store = BatchStore(tmp_path / "batches", Database(tmp_path / "batches.sqlite", SCHEMA), files, clock)

    async def pieces() -> AsyncIterator[bytes]:
        yield json.dumps({"custom_id": "1", "method": "POST", "url": CHAT, "body": {"model": "m"}}).encode()

    file = await files.upload(pieces(), lambda: ("a.jsonl", "batch"), "")
    batch = store.create(file.id, CHAT, "24h", 60.0, {}, "")
    [line] = store.waiting("m", {batch.id: 0}, 1)
    store.record([LineAnswer(line, 200, b"{}", "r")])
    ending.append(batch)
    with pytest.raises(Conflict):
        store.cancel(batch.id, "")
    ended = store.get(batch.id, "")
    assert (ended.status, ended.completed) == ("completed", 1)
    assert ended.output_file is not None


async def test_uploads_that_run_together_have_one_limit(tmp_path: Path) -> None:
    files = FileStore(tmp_path / "files", 1000)
    begun = asyncio.Barrier(3)

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * 100
        await begun.wait()  # all of them have looked at what is here
        yield b"x" * 350

    uploads = [files.upload(pieces(), lambda: ("f", "batch"), "") for _ in range(3)]
    found = await asyncio.gather(*uploads, return_exceptions=True)
    assert sorted(type(one).__name__ for one in found) == ["InsufficientDisk", "UploadedFile", "UploadedFile"]
    assert sorted(file.bytes for file in files.all("")) == [450, 450]


def with_a_line(folder: Path, clock: Callable[[], float] = time.time) -> tuple[BatchStore, FileStore, Batch]:
    files = FileStore(folder / "files", 1 << 30)
    store = BatchStore(folder / "batches", Database(folder / "batches.sqlite", SCHEMA), files, clock)
    line = b'\xef\xbb\xbf{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m"}}'
    return store, files, store.create(files.write("file-a", [line], "a", "").id, CHAT, "24h", 60.0, {}, "")


def test_the_results_have_a_line_for_each_answer(tmp_path: Path) -> None:
    """Whatever line breaks an engine's JSON has, and a byte order mark before the input."""
    store, files, batch = with_a_line(tmp_path)
    [line] = store.waiting("m", {batch.id: 0}, 1)
    store.record([LineAnswer(line, 200, b'{\r\n  "a":\n "x\\ny"\n}\n', "r")])
    ended = store.finish(batch)
    assert ended.output_file is not None
    with files.open(files.get(ended.output_file, "")) as output:
        [result] = [json.loads(text) for text in output]
    assert result["response"]["body"] == {"a": "x\ny"}


async def test_a_clock_that_is_set_forward_expires_no_batch(tmp_path: Path) -> None:
    """A machine without a clock of its own begins in 1970, and is set once it has a network."""
    now = [1000.0]
    store, _, batch = with_a_line(tmp_path, lambda: now[0])
    asked = asyncio.Event()

    async def ask(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    worker = BatchWorker(store, SimpleNamespace(), lambda: now[0])  # type: ignore[arg-type]
    worker._asker = SimpleNamespace(ask=ask, together=lambda: None)  # type: ignore[assignment]
    now[0] += 1e9
    working = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(HUNG):
            await asked.wait()
    finally:
        working.cancel()
        await asyncio.wait([working])
    found = store.get(batch.id, "")
    assert found.status == "in_progress"
    assert found.expires == pytest.approx(1e9 + 1060.0, abs=30)
