"""The inference routes as ordinary aiohttp handlers: for connections that were handed to aiohttp, and the plain form of
what the fast lane does."""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator
from typing import NoReturn

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict

from modelrunner.errors import BadRequest, ModelRunnerError, RouteNotFound, UpgradeRefused
from modelrunner.proxy.exchange import Exchange
from modelrunner.proxy.head import request_line
from modelrunner.proxy.inference import Terms
from modelrunner.proxy.pipeline import HEADERS, Pipeline
from modelrunner.proxy.render import Header, new_request_id
from modelrunner.proxy.routes import match, patterns
from modelrunner.proxy.severing import sever

_HIGH_WATER = 64 << 10  # bytes that wait for the client before the engine is paused


def routes(pipeline: Pipeline) -> list[web.RouteDef]:
    """Errors that are found before the request is under way are raised as `ModelRunnerError`, for a middleware to
    render. The server must be made with `handler_cancellation=True`: that is how a client's leaving is noticed."""
    handlers = _Handlers(pipeline)
    return [web.post(path, handlers.answer, expect_handler=handlers.expect) for path in patterns()]


def refuse_oddities(request: web.BaseRequest) -> None:
    """What aiohttp's parser lets through and the fast lane does not, for a middleware to call first. Raises
    `BadRequest`, `MethodNotAllowed`, `NotImplementedHere`, `UpgradeRefused`."""
    line = "{} {} HTTP/{}.{}".format(request.method, request.raw_path, *request.version)
    request_line(line.encode("utf-8", "surrogateescape"))
    if hdrs.UPGRADE in request.headers:
        raise UpgradeRefused("this server speaks HTTP/1.1 and nothing else on a connection")


class _Handlers:
    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def expect(self, request: web.Request) -> None:
        """Says 100 to a request whose head is good; the handler finds and says what is wrong with another."""
        try:
            self._admit(request)
        except ModelRunnerError:
            return
        if request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        terms = self._admit(request)
        pipe = _Pipe()
        exchange = pipe.exchange = await self._read(request, terms, pipe)
        try:
            exchange.start()
            return await _send(request, pipe)
        finally:
            exchange.cancel()

    def _admit(self, request: web.Request) -> Terms:
        if any(len(request.headers.getall(name, ())) > 1 for name in HEADERS):
            raise BadRequest("a header that must be given once is given twice")
        chunked = hdrs.TRANSFER_ENCODING in request.headers
        if chunked and request.version < (1, 1):
            raise BadRequest("HTTP/1.0 has no transfer encodings")
        route = match(request.path)
        if route is None:
            raise RouteNotFound(f"there is no {request.path}")
        authority = None if request.raw_path.startswith("/") else request.url.authority
        local = request.transport is not None and _is_unix(request.transport)
        terms = self._pipeline.terms(route, request.headers.get, authority, local=local)
        length = request.content_length if request.content_length is not None else -1
        self._pipeline.buffer(0, 0 if chunked else length)
        return terms

    async def _read(self, request: web.Request, terms: Terms, pipe: "_Pipe") -> Exchange:
        """The exchange for the request with its whole body, which is counted as buffered."""
        body = bytearray()
        try:
            async for data in self._pieces(request):
                self._pipeline.buffer(len(data), len(body) + len(data))
                body += data
            return self._pipeline.exchange(terms, bytes(body), terms.request_id or new_request_id(), pipe)
        except BaseException:
            self._pipeline.unbuffer(len(body))
            raise

    async def _pieces(self, request: web.Request) -> AsyncIterator[bytes]:
        try:
            while True:
                async with asyncio.timeout(self._pipeline.limits.body_idle):
                    data = await request.content.readany()
                if not data:
                    return
                yield data
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            await _cancellation()
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise BadRequest(f"the body is not framed as HTTP says: {error}") from None


def _is_unix(transport: asyncio.Transport) -> bool:
    sock = transport.get_extra_info("socket")
    return sock is not None and sock.family == socket.AF_UNIX


class _Pipe:
    """The sink of an exchange, from callbacks to a coroutine."""

    takes_chunks = False  # aiohttp makes its own

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.head: tuple[int, CIMultiDict[str], int | None] | None = None
        self.was_cut = False
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._ended = False
        self._news = asyncio.Event()

    def respond(self, status: int, headers: tuple[Header, ...], own: bytes, length: int | None, data: bytes) -> None:
        lines = [line.partition(b": ")[::2] for line in own.split(b"\r\n")[:-1]]
        fields = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in (*headers, *lines))
        self.head = (status, fields, length)
        self.write(data)
        self._news.set()

    def write(self, data: bytes) -> None:
        if not data:
            return
        self._pieces.append(data)
        self._size += len(data)
        if self._size > _HIGH_WATER and self.exchange is not None:
            self.exchange.pause()
        self._news.set()

    def finish(self) -> None:
        self._ended = True
        self._news.set()

    def cut(self) -> None:
        self.was_cut = True
        self.finish()

    async def begin(self) -> tuple[int, CIMultiDict[str], int | None]:
        """The head, once there is one."""
        while self.head is None:
            await self._news.wait()
            self._news.clear()
        return self.head

    async def body(self) -> AsyncIterator[bytes]:
        while self._pieces or not self._ended:
            if not self._pieces:
                self._news.clear()
                await self._news.wait()
                continue
            data = self._pieces.popleft()
            yield data
            self._size -= len(data)
            if not self._pieces and self.exchange is not None:
                self.exchange.resume()


async def _send(request: web.Request, pipe: _Pipe) -> web.StreamResponse:
    status, headers, length = await pipe.begin()
    response = web.StreamResponse(status=status, headers=headers)
    response.content_length = length
    if length is None and request.version >= (1, 1):
        response.enable_chunked_encoding()
    await response.prepare(request)
    async for data in pipe.body():
        await response.write(data)
    if pipe.was_cut:
        if request.transport is not None:
            sever(request.transport)
        await _cancellation()
    await response.write_eof()
    return response


async def _cancellation() -> NoReturn:
    """After the connection was closed here: aiohttp then cancels the handler, and takes that for no fault of ours."""
    while True:
        await asyncio.get_running_loop().create_future()
