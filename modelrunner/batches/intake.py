"""Takes files and batches in, and gives batches up: the operations on what a client sends."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

from modelrunner.batches.batch import ENDPOINTS, Batch
from modelrunner.batches.batchstore import BatchStore
from modelrunner.batches.filestore import FileStore, UploadedFile
from modelrunner.errors import BadRequest
from modelrunner.units import parse_age

PURPOSES = ("batch", "user_data", "assistants", "fine-tune", "vision", "evals")
_LONGEST_WINDOW = 90 * 86400.0
_LONGEST_NAME = 255  # characters


class UploadForm(Protocol):
    """A form as it comes. Its fields are known once all `pieces` of its file have come: `filename` is None without a
    file, and `purpose` is "" without that field."""

    filename: str | None
    purpose: str

    def pieces(self) -> AsyncIterator[bytes]:
        """Yields the content of the file, and ends with the form. Raises `BadRequest` for a broken form."""


class BatchIntake:
    """`changed` is called after a batch was made or cancelled. An `owner` is the name of an API key, "" for the
    daemon's owner."""

    def __init__(self, batches: BatchStore, files: FileStore, changed: Callable[[], None]) -> None:
        self._batches = batches
        self._files = files
        self._changed = changed

    async def upload(self, form: UploadForm, owner: str) -> UploadedFile:
        """Keeps the file of a form that is complete and right. Raises `BadRequest`, and as `FileStore.upload`."""
        return await self._files.upload(form.pieces(), lambda: _checked(form), owner)

    async def create(
        self, input_file: str, endpoint: str, window: str, metadata: Mapping[str, str], owner: str
    ) -> Batch:
        """Begins to ask the requests of a file, within a time such as `24h`. Raises `BadRequest`, and as
        `BatchStore.create`."""
        if endpoint not in ENDPOINTS:
            raise BadRequest(f"endpoint is one of {', '.join(ENDPOINTS)}", param="endpoint")
        seconds = parse_age(window)
        if not 0 < seconds <= _LONGEST_WINDOW:
            raise BadRequest("completion_window is a time such as 24h, of at most 90 days", param="completion_window")
        create = self._batches.create
        batch = await asyncio.to_thread(create, input_file, endpoint, window, seconds, dict(metadata), owner)
        self._changed()
        return batch

    async def cancel(self, id: str, owner: str) -> Batch:
        """Asks no further request of a batch. Raises as `BatchStore.cancel`."""
        batch = await asyncio.to_thread(self._batches.cancel, id, owner)
        self._changed()
        return batch


def _checked(form: UploadForm) -> tuple[str, str]:
    """Returns the name and the purpose of the form's file."""
    if form.filename is None:
        raise BadRequest("the form has no field `file`", param="file")
    if form.purpose not in PURPOSES:
        raise BadRequest(f"purpose is one of {', '.join(PURPOSES)}", param="purpose")
    return form.filename[:_LONGEST_NAME], form.purpose
