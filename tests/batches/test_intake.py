"""What a client may do with files and batches, below the routes."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from modelrunner.batches.batchstore import BatchStore, open_store
from modelrunner.batches.filestore import FileStore
from modelrunner.batches.intake import BatchIntake
from modelrunner.errors import BadRequest, Conflict

CHAT = "/v1/chat/completions"


class Form:
    """A form whose purpose comes after its file."""

    def __init__(self, content: bytes, purpose: str = "batch", *, has_file: bool = True, broken: bool = False) -> None:
        self.filename: str | None = None
        self.purpose = ""
        self._content, self._purpose = content, purpose
        self._has_file, self._broken = has_file, broken

    async def pieces(self) -> AsyncIterator[bytes]:
        if self._has_file:
            self.filename = "a.jsonl"
            yield self._content
        self.purpose = self._purpose
        if self._broken:
            raise BadRequest("the form breaks off")


def open_intake(folder: Path) -> tuple[BatchIntake, BatchStore, FileStore, list[str]]:
    batches, files = open_store(folder, 1 << 20)
    changes: list[str] = []
    return BatchIntake(batches, files, lambda: changes.append("changed")), batches, files, changes


@pytest.mark.parametrize(
    "form", [Form(b"x", "mischief"), Form(b"x", ""), Form(b"x", has_file=False), Form(b"x", broken=True)]
)
async def test_a_form_that_is_wrong_at_its_end_keeps_nothing(tmp_path: Path, form: Form) -> None:
    intake, _, files, _ = open_intake(tmp_path)
    with pytest.raises(BadRequest):
        await intake.upload(form, "")
    assert files.all("") == []
    assert list((tmp_path / "files").iterdir()) == []


async def test_the_worker_is_told_of_each_change(tmp_path: Path) -> None:
    intake, batches, _, changes = open_intake(tmp_path)
    line = json.dumps({"custom_id": "1", "method": "POST", "url": CHAT, "body": {"model": "m"}}).encode()
    file = await intake.upload(Form(line), "kim")
    assert (file.filename, file.purpose, file.owner, file.bytes) == ("a.jsonl", "batch", "kim", len(line))
    for window in ("0", "91d"):
        with pytest.raises(BadRequest, match="completion_window"):
            await intake.create(file.id, CHAT, window, {}, "kim")
    with pytest.raises(BadRequest, match="endpoint"):
        await intake.create(file.id, "/v1/images", "24h", {}, "kim")
    assert changes == []
    batch = await intake.create(file.id, CHAT, "24h", {"a": "b"}, "kim")
    assert (len(changes), batch.metadata) == (1, {"a": "b"})
    assert (await intake.cancel(batch.id, "kim")).cancelling is not None
    assert len(changes) == 2
    batches.finish(batches.get(batch.id, ""))
    with pytest.raises(Conflict):
        await intake.cancel(batch.id, "kim")
    assert len(changes) == 2
