"""Streams the progress of long work, as NDJSON for programs and plain lines for people, and feeds as server-sent
events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, ClassVar, TypeVar

import msgspec
from aiohttp import web

from modelrunner.api import modelforms
from modelrunner.api.middleware import TRANSPORT
from modelrunner.errors import BadRequest, ModelRunnerError
from modelrunner.gateway.calls import Dialect
from modelrunner.gateway.routes import dialect_of
from modelrunner.progress import ProgressReport
from modelrunner.wire import Progress

T = TypeVar("T")
ALIVE = 15.0
"""Seconds of silence after which a feed sends a comment."""
Work = Callable[[ProgressReport], Awaitable[Progress]]


class _Mailbox:
    """Keeps the newest line of each kind, in the order in which the kinds first came. So a slow client misses some
    figures, and lines do not pile up in the daemon."""

    def __init__(self) -> None:
        self._lines: dict[Any, Progress] = {}
        self._filled = asyncio.Event()

    def put(self, line: Progress) -> None:
        kind = line.layer.id if line.layer else (line.type, line.phase, line.message if not line.total else "")
        self._lines[kind] = line
        self._filled.set()

    async def take(self) -> list[Progress]:
        await self._filled.wait()
        self._filled.clear()
        lines, self._lines = list(self._lines.values()), {}
        return lines


async def stream_progress(
    request: web.Request, work: Work, *, mode: str, lines: "type[ProgressLines] | None" = None
) -> web.StreamResponse:
    """Runs `work` and sends its progress; its result is the last line. Lines without a mode get `mode` ("pull",
    "install"). An error before the first line is an ordinary error answer; a later one is a line of type error with the
    same object. The work is cancelled when the client leaves. `lines` writes the lines in another form than ours."""
    mailbox = _Mailbox()
    answer = (lines or ProgressLines)(request, mode)
    task = asyncio.ensure_future(work(lambda step: mailbox.put(modelforms.progress(step))))
    taking = asyncio.ensure_future(mailbox.take())
    try:
        while not task.done():
            await asyncio.wait((task, taking), return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                for line in taking.result():
                    await answer.send(line)
                taking = asyncio.ensure_future(mailbox.take())
        await answer.finish(task)
    finally:
        for left in (task, taking):
            left.cancel()
        await asyncio.gather(task, taking, return_exceptions=True)
    return answer.response


async def stream_events(
    request: web.Request, feed: AsyncGenerator[T | None, None], render: Callable[[T], bytes]
) -> web.StreamResponse:
    """Sends a feed as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) until it ends
    or the client leaves; to HEAD only the head. `render` gives an item's event, b"" to leave an item out; None from the
    feed becomes a comment."""
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    async with aclosing(feed):
        if request.method == "HEAD":
            return response
        async for item in feed:
            event = b": alive\n\n" if item is None else render(item)
            if event:
                await response.write(event)
    await response.write_eof()
    return response


class ProgressLines:
    """The answer, whose head is sent with the first line. The client chooses between JSON and text; a subclass may have
    another `render` and `content_type`."""

    content_type: ClassVar[str] = ""

    def __init__(self, request: web.Request, mode: str) -> None:
        self._request = request
        self._mode = mode
        self._json = "application/json" in request.headers.get("Accept", "")
        kind = self.content_type or ("application/x-ndjson" if self._json else "text/plain; charset=utf-8")
        self.response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-store"})

    async def send(self, line: Progress) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        line = line if line.mode else msgspec.structs.replace(line, mode=self._mode)
        await self.response.write(self.render(line))

    def render(self, line: Progress) -> bytes:
        return msgspec.json.encode(line) + b"\n" if self._json else _text(line)

    def failed(self, error: ModelRunnerError, dialect: Dialect, request_id: str) -> bytes:
        """Returns the last line of work that failed. `dialect` is the family of the route."""
        _, body = dialect.error(error, request_id)
        details = msgspec.json.decode(body)["error"]
        return self.render(Progress("error", error.message, error=details, mode=self._mode))

    async def finish(self, task: "asyncio.Future[Progress]") -> None:
        try:
            await self.send(task.result())
        except ModelRunnerError as error:
            if not self.response.prepared:
                raise
            request_id = self._request[TRANSPORT].request_id
            await self.response.write(self.failed(error, dialect_of(self._request.path), request_id))
        await self.response.write_eof()


async def body_pieces(request: web.Request, what: str) -> AsyncIterator[bytes]:
    """Yields the body as it comes. Raises `BadRequest` if it breaks off; `what` names it in the message."""
    try:
        while piece := await request.content.readany():
            yield piece
    except (OSError, web.HTTPException) as error:
        raise BadRequest(f"{what} broke off: {error}") from None


def _text(line: Progress) -> bytes:
    amount = f" {line.current * 100 // line.total}%" if line.total else ""
    return f"{line.type}: {line.message}{amount}\n".encode()
