"""The batches in SQLite."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from modelrunner.batches.batch import Batch
from modelrunner.batches.batchstore import SCHEMA, BatchStore, LineAnswer
from modelrunner.batches.filestore import FileStore
from modelrunner.database import Database
from modelrunner.errors import Conflict

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
