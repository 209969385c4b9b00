"""A connection to one MCP server.

Source of the protocol: https://modelcontextprotocol.io/specification, as the package `mcp` speaks it.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import httpx2
from mcp import Client
from mcp.client import Transport
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from modelrunner.processes import process
from modelrunner.types import McpServer, ProcessOptions

_BRIDGE = Path(__file__).with_name("bridge.py")
_LONGEST_LINE = 16 << 20
_LARGEST_BODY = 16 << 20  # of an answer that is no event stream, whose events the package bounds itself
_CONNECT = 30.0  # seconds
_GRACE = 2.0  # seconds between asking a server to end and killing it


@asynccontextmanager
async def session(name: str, server: McpServer, folder: Path, logs: Path) -> AsyncGenerator[Client, None]:
    """The client of a server. Its process, if it is one, and every process of that end with the block. Raises the
    errors of the start and of the protocol."""
    async with transport(name, server, folder, logs) as carrier, Client(carrier) as client:
        yield client


@asynccontextmanager
async def transport(name: str, server: McpServer, folder: Path, logs: Path) -> AsyncGenerator[Transport, None]:
    if server.command:
        options = ProcessOptions(logs / f"mcp-{name}.log", stop_grace=_GRACE)
        yield _stdio(server, folder / f"mcp-{name}.sock", options)
        return
    bounded = _BoundedTransport(httpx2.AsyncHTTPTransport())
    async with httpx2.AsyncClient(headers=dict(server.headers), timeout=_CONNECT, transport=bounded) as http:
        yield streamable_http_client(server.url, http_client=http)


class _BoundedTransport(httpx2.AsyncBaseTransport):
    """Fails an answer that has more than `_LARGEST_BODY` bytes, or a content coding that could unpack to more."""

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["Accept-Encoding"] = "identity"
        answer = await self._inner.handle_async_request(request)
        coding = answer.headers.get("content-encoding", "identity")
        if coding != "identity":
            await answer.aclose()
            raise httpx2.DecodingError(f"the answer has a content coding that was not asked for: {coding!a:.40}")
        if not answer.headers.get("content-type", "").lower().startswith("text/event-stream"):
            assert isinstance(answer.stream, httpx2.AsyncByteStream)
            answer.stream = _BoundedStream(answer.stream)
        return answer

    async def aclose(self) -> None:
        await self._inner.aclose()


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = _LARGEST_BODY
        async for data in self._inner:
            if (left := left - len(data)) < 0:
                raise httpx2.ReadError(f"the answer has more than {_LARGEST_BODY} bytes")
            yield data

    async def aclose(self) -> None:
        await self._inner.aclose()


Streams = tuple[
    anyio.streams.memory.MemoryObjectReceiveStream[SessionMessage | Exception],
    anyio.streams.memory.MemoryObjectSendStream[SessionMessage],
]


@asynccontextmanager
async def _stdio(server: McpServer, path: Path, options: ProcessOptions) -> AsyncGenerator[Streams, None]:
    """Runs the server under a guardian, as an engine, with a socket for its stdin and stdout."""
    async with _running(server.command, dict(server.environment), path, options) as (reader, writer):
        put, messages = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        answers, taken = anyio.create_memory_object_stream[SessionMessage](0)

        async def read() -> None:
            async with put:
                with suppress(OSError, ValueError, anyio.BrokenResourceError):
                    while line := await reader.readline():
                        await put.send(SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False)))

        async def write() -> None:
            with suppress(OSError):
                async for message in taken:
                    writer.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await writer.drain()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            tasks.start_soon(write)
            try:
                yield messages, answers
            finally:
                tasks.cancel_scope.cancel()
                for stream in (put, messages, answers, taken):
                    stream.close()


@asynccontextmanager
async def _running(
    command: Sequence[str], environment: dict[str, str], path: Path, options: ProcessOptions
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter], None]:
    begun: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    begun = asyncio.get_running_loop().create_future()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if begun.done():
            writer.close()
        else:
            begun.set_result((reader, writer))

    path.unlink(missing_ok=True)
    listener = await asyncio.start_unix_server(accept, path, limit=_LONGEST_LINE)
    argv = [sys.executable, "-I", "-S", str(_BRIDGE), str(path), *command]
    env = process.scrubbed_environment() | environment
    running = asyncio.create_task(process.run(argv, env=env, options=options), name=path.name)
    try:
        await asyncio.wait((running, begun), timeout=_CONNECT, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        if not begun.done():
            raise TimeoutError("the program did not begin")
        yield begun.result()
    finally:
        listener.close()
        path.unlink(missing_ok=True)
        if not begun.cancel():
            begun.result()[1].close()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
