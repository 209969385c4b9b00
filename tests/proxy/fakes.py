"""Engines of any behaviour, byte by byte, and a scheduler that grants at once: what the proxy's tests stand on."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from modelrunner.types import Endpoint

OK = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{"ok":true}'
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


async def until(condition: Callable[[], bool], within: float = 5.0) -> None:
    """Lets the event loop run until `condition` holds."""
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110  what is watched has no event of its own
            await asyncio.sleep(0.001)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str) -> bytes:
    return chunk(b"data: %b\n\n" % text.encode())


@dataclass
class Received:
    """A request as an engine saw it."""

    head: bytes
    body: bytes

    @property
    def path(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    def header(self, name: str) -> str | None:
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name.lower().encode():
                return value.strip().decode()
        return None


class Call:
    """One request at a scripted engine, to be answered with raw bytes."""

    def __init__(
        self, engine: "ScriptedEngine", request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.engine, self.request, self._reader, self._writer = engine, request, reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        self._writer.transport.abort()

    async def left(self) -> None:
        """Until the other side has closed the connection."""
        while await self._reader.read(65536):
            pass


Script = Callable[[Call], Awaitable[None]]


async def answer_ok(call: Call) -> None:
    await call.send(OK)


@dataclass
class ScriptedEngine:
    """An HTTP server on a Unix socket whose answers are what `script` sends. `received` are the requests seen;
    `connections` counts those that were opened, `open` those that still are."""

    endpoint: Endpoint
    script: Script = answer_ok
    received: list[Received] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                request = Received(head, b"")
                request.body = await reader.readexactly(int(request.header("content-length") or 0))
                self.received.append(request)
                await self._notify()
                await self.script(Call(self, request, reader, writer))
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the other side left, or the test is over
        finally:
            self.open -= 1
            writer.close()
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, predicate: Callable[["ScriptedEngine"], bool], within: float = 5.0) -> None:
        async with asyncio.timeout(within), self._changed:
            await self._changed.wait_for(lambda: predicate(self))


@asynccontextmanager
async def scripted_engine(path: Path, script: Script = answer_ok) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(Endpoint(path=path), script)
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await engine.serve(reader, writer)

    server = await asyncio.start_unix_server(accept, str(path))
    try:
        yield engine
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
