"""OpenAI's files and batches."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from aiohttp import BodyPartReader, MultipartReader, StreamReader, web
from aiohttp.http_exceptions import BadHttpMessage

from modelrunner import wire
from modelrunner.api.documented import Count, documented
from modelrunner.api.messages import json_response, page_of, read_json
from modelrunner.api.middleware import owner_of
from modelrunner.batches.batch import Batch, BatchState, LineError
from modelrunner.batches.batchstore import BatchStore
from modelrunner.batches.filestore import FileStore, UploadedFile
from modelrunner.batches.intake import BatchIntake
from modelrunner.errors import BadRequest

_PIECE = 1 << 18
_MOST_LINES = 200  # of a form, outside of its contents
_PAGED = {"limit": Count, "after": str}


class BatchRoutes:
    """An API key sees only its own files and batches; the daemon's owner sees all."""

    def __init__(self, batches: BatchStore, files: FileStore, intake: BatchIntake) -> None:
        self._batches = batches
        self._files = files
        self._intake = intake

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
        """Stores a file from a form with `purpose` and `file`. It is written to the disk as it comes."""
        if request.content_type != "multipart/form-data":
            raise BadRequest("send the file as multipart/form-data, with the fields purpose and file")
        file = await self._intake.upload(_Form(request), owner_of(request))
        return json_response(_file_status(file))

    @documented(wire.ListPage[wire.FileStatus], query={"purpose": str, "order": str, **_PAGED})
    async def list_files(self, request: web.Request) -> web.Response:
        """Lists the files, the newest first."""
        files = self._files.all(owner_of(request))
        purpose = request.query.get("purpose")
        items = [(file.id, _file_status(file)) for file in files if purpose in (None, file.purpose)]
        return page_of(request, items, usual=10_000)

    @documented(wire.FileStatus)
    async def get_file(self, request: web.Request) -> web.Response:
        """Shows a file."""
        return json_response(_file_status(self._file(request)))

    @documented({"application/octet-stream": bytes})
    async def content(self, request: web.Request) -> web.StreamResponse:
        """Sends the content of a file."""
        file = self._file(request)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = file.bytes
        with self._files.open(file) as opened:  # a thread that opens it would not end with this request
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
        """Starts a batch of the requests in a file."""
        wanted = await read_json(request, wire.BatchRequest)
        batch = await self._intake.create(
            wanted.input_file_id,
            wanted.endpoint,
            wanted.completion_window,
            wanted.metadata or {},
            owner_of(request),
        )
        return json_response(_batch_status(batch))

    @documented(wire.ListPage[wire.BatchStatus], query=_PAGED)
    async def list(self, request: web.Request) -> web.Response:
        """Lists the batches, the newest first."""
        batches = await asyncio.to_thread(self._batches.all, owner_of(request))
        return page_of(request, [(batch.id, _batch_status(batch)) for batch in batches], usual=20)

    @documented(wire.BatchStatus)
    async def get(self, request: web.Request) -> web.Response:
        """Shows a batch."""
        batch = await asyncio.to_thread(self._batches.get, request.match_info["id"], owner_of(request))
        return json_response(_batch_status(batch))

    @documented(wire.BatchStatus, errors=(409,))
    async def cancel(self, request: web.Request) -> web.Response:
        """Stops a batch: none of its further requests is sent."""
        batch = await self._intake.cancel(request.match_info["id"], owner_of(request))
        return json_response(_batch_status(batch))

    def _file(self, request: web.Request) -> UploadedFile:
        return self._files.get(request.match_info["id"], owner_of(request))


class _Form:
    """The `UploadForm` of a request. Only the first file counts."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.filename: str | None = None
        self.purpose = ""

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            lines = cast("StreamReader", _FewLines(self._request.content))
            async for part in MultipartReader(self._request.headers, lines):
                if not isinstance(part, BodyPartReader):
                    raise BadRequest("a part of the form is itself a form")
                if part.name == "purpose":
                    self.purpose = (await part.read_chunk(64)).decode("utf-8", "replace")
                elif part.name == "file" and self.filename is None:
                    self.filename = (part.filename or "file").encode("utf-8", "replace").decode()
                    while piece := await part.read_chunk(_PIECE):
                        yield piece
        except (ValueError, AssertionError, RuntimeError, BadHttpMessage) as error:
            raise BadRequest(f"the form cannot be read: {error}") from None


class _FewLines:
    """The body of a form, of which aiohttp reads boundaries, headers and what comes before them by line. Each line
    costs much, and a form of two fields has few."""

    def __init__(self, body: StreamReader) -> None:
        self._body = body
        self._left = _MOST_LINES

    async def readline(self, *, max_line_length: int | None = None) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise BadRequest("the form has too many parts: send the fields purpose and file")
        return await self._body.readline(max_line_length=max_line_length)

    def __getattr__(self, name: str) -> object:
        return getattr(self._body, name)


def _file_status(file: UploadedFile) -> wire.FileStatus:
    return wire.FileStatus(file.id, file.bytes, int(file.created), file.filename, file.purpose)


def _batch_status(batch: Batch) -> wire.BatchStatus:
    """Returns the batch object of OpenAI's API."""

    def at(moment: float | None, *states: BatchState) -> int | None:
        return int(moment) if moment is not None and (not states or batch.status in states) else None

    return wire.BatchStatus(
        id=batch.id,
        endpoint=batch.endpoint,
        errors={"object": "list", "data": list(map(_line_error, batch.errors))} if batch.errors else None,
        input_file_id=batch.input_file,
        completion_window=batch.window,
        status=batch.status.value,
        output_file_id=batch.output_file,
        error_file_id=batch.error_file,
        created_at=int(batch.created),
        in_progress_at=at(batch.created) if not batch.errors else None,
        expires_at=int(batch.expires),
        finalizing_at=at(batch.finalizing),
        completed_at=at(batch.ended, BatchState.COMPLETED),
        failed_at=at(batch.ended, BatchState.FAILED),
        expired_at=at(batch.ended, BatchState.EXPIRED),
        cancelling_at=at(batch.cancelling),
        cancelled_at=at(batch.ended, BatchState.CANCELLED),
        request_counts={"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        metadata=batch.metadata or None,
    )


def _line_error(error: LineError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message, "line": error.line, "param": error.param}
