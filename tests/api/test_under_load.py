"""The control plane while a thousand requests wait and streams run. Time is counted in turns of the event
loop, which are as many on a busy machine."""

import asyncio
import json
import resource
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.api.conftest import Daemon, StartDaemon
from tests.fakes import of_code

WAITING, STREAMS, ASKS = 1000, 50, 200


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """A client and the daemon's side of it are in this process, and a daemon uses a quarter of what it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8 * (WAITING + STREAMS)
    if hard not in (-1, resource.RLIM_INFINITY) and hard < wanted:
        pytest.skip(f"this process may open {hard} descriptors only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Client:
    """A connection to the Unix socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> None:
        data = json.dumps(body).encode() if body else b""
        self.writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    async def answer(self) -> bytes:
        head = await self.reader.readuntil(b"\r\n\r\n")
        [length] = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        return await self.reader.readexactly(int(length.partition(b":")[2]))


@of_code("it takes runtime flags")
async def test_a_control_request_waits_for_none_of_them(start_daemon: StartDaemon, many_descriptors: None) -> None:
    daemon = await start_daemon(models={"cold": 0, "warm": 1}, listen="", max_queue=2 * WAITING)
    clients: list[Client] = []
    turns = 0

    async def connect() -> Client:
        clients.append(Client(*await asyncio.open_unix_connection(str(daemon.settings.socket))))
        return clients[-1]

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def taken() -> list[int]:
        """The turns that each of many requests took, the most last."""
        found = []
        for _ in range(ASKS):
            before = turns
            control.send("GET", "/version")
            assert b'"pid"' in await control.answer()
            found.append(turns - before)
        return sorted(found)

    control = await connect()
    counting = asyncio.create_task(count())
    await taken()
    alone = await taken()
    reading = await crowd(daemon, connect)
    beside = await taken()
    assert not any(task.done() for task in reading)
    counting.cancel()
    for task in reading:
        task.cancel()
    for client in clients:
        client.writer.close()
    await asyncio.wait([counting, *reading])
    p99 = ASKS * 99 // 100
    assert beside[p99] <= 2 * alone[p99]


async def crowd(daemon: Daemon, connect: Any) -> "list[asyncio.Task[None]]":
    """Streams without end of a warm model, which are read, and requests for one that never gets ready."""
    await configure(daemon, "warm", parallel=STREAMS, **{"runtime-flags": ["--rate=50"]})
    await configure(daemon, "cold", **{"runtime-flags": ["--never-ready"]})
    reading = []
    for _ in range(STREAMS):
        client = await connect()
        client.send("POST", "/v1/completions", {"model": "warm", "prompt": "x", "stream": True, "max_tokens": 10**9})
        assert await client.reader.readline() == b"HTTP/1.1 200 OK\r\n"
        reading.append(asyncio.create_task(read(client)))
    for _ in range(WAITING):
        (await connect()).send("POST", "/v1/completions", {"model": "cold", "prompt": "x"})
    while await active(daemon) < STREAMS + WAITING:
        pass
    return reading


async def read(client: Client) -> None:
    with suppress(ConnectionError):
        while await client.reader.read(1 << 16):
            pass


async def configure(daemon: Daemon, model: str, **settings: Any) -> None:
    async with daemon.unix.post("/engines/_configure", json={"model": model, **settings}) as answer:
        assert answer.status == 202, await answer.text()


async def active(daemon: Daemon) -> int:
    async with daemon.unix.get("/health") as answer:
        return int((await answer.json())["active_requests"])
