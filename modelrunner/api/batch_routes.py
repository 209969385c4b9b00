"""OpenAI's files and batches."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import BadHttpMessage

from modelrunner import wire
from modelrunner.api import wireforms
from modelrunner.api.documented import Count, documented
from modelrunner.api.messages import json_response, query_count, read_json
from modelrunner.api.middleware import owner_of
from modelrunner.batches.batch import ENDPOINTS
from modelrunner.batches.batchstore import BatchStore
from modelrunner.batches.filestore import FileStore, UploadedFile
from modelrunner.errors import BadRequest
from modelrunner.units import parse_age

_PURPOSES = ("batch", "user_data", "assistants", "fine-tune", "vision", "evals")
_LONGEST_WINDOW = 90 * 86400.0
_PIECE = 1 << 18
_PAGE = 20
_PAGED = {"limit": Count, "after": str}
Entry = TypeVar("Entry", wire.FileStatus, wire.BatchStatus)


class BatchRoutes:
    """`changed` is called after a batch was made or cancelled. What a key made, only that key and the daemon's owner
    see."""

    def __init__(self, batches: BatchStore, files: FileStore, changed: Callable[[], None]) -> None:
        self._batches = batches
        self._files = files
        self._changed = changed

    def routes(self) -> list[web.RouteDef]:
        return [
            route
            for prefix in ("/v1", "/engines/v1")
            for route in (
                web.post(f"{prefix}/files", self.upload),
                web.get(f"{prefix}/files", self.list_files),
                web.get(f"{prefix}/files/{{id}}", self.get_file),
                web.get(f"{prefix}/files/{{id}}/content", self.content),
                web.delete(f"{prefix}/files/{{id}}", self.delete_file),
                web.post(f"{prefix}/batches", self.create),
                web.get(f"{prefix}/batches", self.list),
                web.get(f"{prefix}/batches/{{id}}", self.get),
                web.post(f"{prefix}/batches/{{id}}/cancel", self.cancel),
            )
        ]

    @documented(wire.FileStatus, body={"multipart/form-data": wire.FileForm}, errors=(507,))
    async def upload(self, request: web.Request) -> web.Response:
        """Keeps a file, of a form with `purpose` and `file`. The file goes to the disk as it comes."""
        if request.content_type != "multipart/form-data":
            raise BadRequest("send the file as multipart/form-data, with the fields purpose and file")
        purpose, made = "", None
        try:
            async for part in await request.multipart():
                if not isinstance(part, BodyPartReader):
                    raise BadRequest("a part of the form is itself a form")
                if part.name == "purpose":
                    purpose = (await part.read_chunk(64)).decode("utf-8", "replace")
                elif part.name == "file" and made is None:
                    name = (part.filename or "file")[:255]
                    made = await self._files.upload(_pieces(part), name, purpose or "batch", owner_of(request))
        except BaseException as error:
            if made is not None:  # its client will never know its ID
                await asyncio.shield(asyncio.to_thread(self._files.delete, made.id, made.owner))
            if isinstance(error, ValueError | AssertionError | BadHttpMessage):
                raise BadRequest(f"the form cannot be read: {error}") from None
            raise
        if made is None:
            raise BadRequest("the form has no field `file`", param="file")
        if purpose not in _PURPOSES:
            await asyncio.to_thread(self._files.delete, made.id, made.owner)
            raise BadRequest(f"purpose is one of {', '.join(_PURPOSES)}", param="purpose")
        return json_response(wireforms.file(made))

    @documented(wire.ListPage[wire.FileStatus], query={"purpose": str, "order": str, **_PAGED})
    async def list_files(self, request: web.Request) -> web.Response:
        """Lists the files, the newest first."""
        files = await asyncio.to_thread(self._files.all, owner_of(request))
        purpose = request.query.get("purpose")
        return _page(request, [wireforms.file(file) for file in files if purpose in (None, file.purpose)], 10_000)

    @documented(wire.FileStatus)
    async def get_file(self, request: web.Request) -> web.Response:
        """Shows a file."""
        return json_response(wireforms.file(await self._file(request)))

    @documented({"application/octet-stream": bytes})
    async def content(self, request: web.Request) -> web.StreamResponse:
        """Sends what a file holds."""
        file = await self._file(request)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = file.bytes
        with await asyncio.to_thread(self._files.open, file.id) as opened:
            await response.prepare(request)
            while piece := await asyncio.to_thread(opened.read, _PIECE):
                await response.write(piece)
        await response.write_eof()
        return response

    @documented(wire.DeletedObject)
    async def delete_file(self, request: web.Request) -> web.Response:
        """Removes a file."""
        id = request.match_info["id"]
        await asyncio.to_thread(self._files.delete, id, owner_of(request))
        return json_response(wire.DeletedObject(id, "file"))

    @documented(wire.BatchStatus, body=wire.BatchRequest, errors=(507,))
    async def create(self, request: web.Request) -> web.Response:
        """Begins to ask the requests of a file."""
        wanted = await read_json(request, wire.BatchRequest)
        if wanted.endpoint not in ENDPOINTS:
            raise BadRequest(f"endpoint is one of {', '.join(ENDPOINTS)}", param="endpoint")
        seconds = parse_age(wanted.completion_window)
        if not 0 < seconds <= _LONGEST_WINDOW:
            raise BadRequest("completion_window is a time such as 24h, of at most 90 days", param="completion_window")
        batch = await asyncio.to_thread(
            self._batches.create,
            wanted.input_file_id,
            wanted.endpoint,
            wanted.completion_window,
            seconds,
            wanted.metadata or {},
            owner_of(request),
        )
        self._changed()
        return json_response(wireforms.batch(batch))

    @documented(wire.ListPage[wire.BatchStatus], query=_PAGED)
    async def list(self, request: web.Request) -> web.Response:
        """Lists the batches, the newest first."""
        found = await asyncio.to_thread(self._batches.all, owner_of(request))
        return _page(request, [wireforms.batch(batch) for batch in found], _PAGE)

    @documented(wire.BatchStatus)
    async def get(self, request: web.Request) -> web.Response:
        """Shows a batch."""
        found = await asyncio.to_thread(self._batches.get, request.match_info["id"], owner_of(request))
        return json_response(wireforms.batch(found))

    @documented(wire.BatchStatus, errors=(409,))
    async def cancel(self, request: web.Request) -> web.Response:
        """Asks no further request of a batch."""
        found = await asyncio.to_thread(self._batches.cancel, request.match_info["id"], owner_of(request))
        self._changed()
        return json_response(wireforms.batch(found))

    async def _file(self, request: web.Request) -> UploadedFile:
        return await asyncio.to_thread(self._files.get, request.match_info["id"], owner_of(request))


async def _pieces(part: BodyPartReader) -> AsyncIterator[bytes]:
    while piece := await part.read_chunk(_PIECE):
        yield piece


def _page(request: web.Request, items: list[Entry], usual: int) -> web.Response:
    """A page of OpenAI's lists: `limit` items after the one with the ID `after`."""
    ids = [item.id for item in items]
    if (after := request.query.get("after")) is not None:
        if after not in ids:
            raise BadRequest(f"there is no {after!r}", param="after")
        items = items[ids.index(after) + 1 :]
    limit = query_count(request, "limit") or usual
    page = items[:limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return json_response(wire.ListPage(page, first, last, len(items) > limit))
