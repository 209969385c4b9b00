"""The client leaves, in every phase and by every way: the engine's connection closes at once, while all limits are
far away."""

import asyncio
import inspect
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from modelrunner.gateway.request.waiting import guarded
from modelrunner.keys.ring import KeyRing
from tests.gateway.fakes import OK, SSE, Call, event, until
from tests.gateway.harness import Client, proxy, request


async def close(client: Client) -> None:
    await client.leave()


async def reset(client: Client) -> None:
    client.writer.transport.abort()


async def half_close(client: Client) -> None:
    with socket.socket(fileno=socket.dup(client.writer.get_extra_info("socket").fileno())) as sock:
        sock.shutdown(socket.SHUT_WR)  # over TLS, too: without a word of TLS's own


WAYS = [pytest.param(way, tcp, id=f"{way.__name__}-{'tcp' if tcp else 'unix'}")
        for way, tcp in [(close, True), (reset, True), (half_close, True), (close, False)]]  # fmt: skip
WITHOUT_TLS = pytest.mark.parametrize("kind", ["fast", "aiohttp"])  # only the Unix socket serves who half-closes
Leave = Callable[[Client], Awaitable[None]]


@pytest.mark.parametrize(("leave", "tcp"), WAYS)
async def test_in_the_queue(folder: Path, kind: str, leave: Leave, tcp: bool) -> None:
    async with proxy(folder, kind) as served:
        served.scheduler.is_warm = False
        client = await served.connect(tcp=tcp)
        await client.send(request(Host=served.host()))
        await until(lambda: served.scheduler.waiting == 1)
        await leave(client)
        await until(lambda: served.scheduler.waiting == 0 and not served.pipeline.running)
        assert served.engine.received == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("leave", "tcp"), WAYS)
async def test_before_the_first_token(folder: Path, kind: str, leave: Leave, tcp: bool, stream: bool) -> None:
    async with proxy(folder, kind, Call.left) as served:
        client = await served.connect(tcp=tcp)
        await client.send(request(stream=stream, Host=served.host()))
        await served.engine.until(lambda e: len(e.received) == 1)
        await leave(client)
        await served.engine.until(lambda e: e.open == 0)
        await until(lambda: not served.pipeline.running)


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize(("leave", "tcp"), WAYS)
async def test_in_the_middle_of_a_stream(folder: Path, kind: str, leave: Leave, tcp: bool, endless: bool) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + event("a"))
        while endless:
            await call.send(event("b"))
        await call.left()

    async with proxy(folder, kind, script) as served:
        client = await served.connect(tcp=tcp)
        await client.send(request(stream=True, Host=served.host()))
        await client.more(await client.head())
        await leave(client)
        await served.engine.until(lambda e: e.open == 0)
        await until(lambda: not served.pipeline.running)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_lease_lasts_until_the_engine_closes_and_has_settled(folder: Path, kind: str, stream: bool) -> None:
    """Engines close a connection when they are through with its request; what else they do about it, they say."""
    done = asyncio.Event()

    async def script(call: Call) -> None:
        if stream:
            await call.send(SSE + event("a"))
        await call.left()
        await done.wait()

    async with proxy(folder, kind, script) as served:
        served.runner.settling = asyncio.Event()
        client = await served.connect()
        await client.send(request(stream=stream))
        await served.engine.until(lambda e: len(e.received) == 1)
        await client.leave()
        await until(lambda: not served.pipeline.running)
        assert (served.engine.open, served.scheduler.leases) == (1, 1)
        assert (await served.ask(request("/other"))).status == 200  # some turns of the loop
        assert served.scheduler.leases == 1
        done.set()
        await served.engine.until(lambda e: e.open == 0)
        assert (await served.ask(request("/other"))).status == 200
        assert served.scheduler.leases == 1
        served.runner.settling.set()
        await until(lambda: served.scheduler.leases == 0)


async def test_a_key_keeps_its_place_until_the_engine_is_done(folder: Path, kind: str) -> None:
    """Else a client that leaves early takes all places of an engine with a key for one request at once."""
    done = asyncio.Event()

    async def script(call: Call) -> None:
        if len(served.engine.received) == 1:
            await call.left()
            await done.wait()
        else:
            await call.send(OK)

    async with proxy(folder, kind, script) as served:
        served.pipeline.keys = ring = KeyRing(folder / "keys.json")
        _, text = ring.create("kim", concurrency=1)
        ask = request(Host=served.host(), X_API_Key=text)
        client, other = await served.connect(tcp=True), await served.connect(tcp=True)
        await client.send(ask)
        await served.engine.until(lambda e: len(e.received) == 1)
        await client.leave()
        await until(lambda: not served.pipeline.running)
        assert (await other.ask(ask)).error["code"] == "rate_limited"
        done.set()
        await until(lambda: served.scheduler.leases == 0)
        assert (await other.ask(ask)).status == 200


async def test_the_lease_ends_with_the_engine(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await asyncio.Event().wait()

    async with proxy(folder, kind, script) as served:
        client = await served.connect()
        await client.send(request())
        await served.engine.until(lambda e: len(e.received) == 1)
        await client.leave()
        await until(lambda: not served.pipeline.running)
        assert served.scheduler.leases == 1
        served.runner.abandoned.end()
        served.runner.upstream.close()
        assert served.scheduler.leases == 0


@WITHOUT_TLS
async def test_a_half_closed_client_of_the_unix_socket_is_served(folder: Path, kind: str) -> None:
    gate = asyncio.Event()

    async def script(call: Call) -> None:
        await gate.wait()
        await call.send(SSE + event("a") + b"0\r\n\r\n")

    async with proxy(folder, kind, script) as served:
        client = await served.connect()
        await client.send(request(stream=True))
        client.writer.write_eof()
        await served.engine.until(lambda e: len(e.received) == 1)
        gate.set()
        answer = await client.answer()
        assert (answer.body, answer.complete) == (b"data: a\n\n", True)
        assert await client.closed() == b""


@WITHOUT_TLS
async def test_a_half_closed_client_of_the_unix_socket_may_still_leave(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, Call.left) as served:
        client = await served.connect()
        await client.send(request())
        client.writer.write_eof()
        await served.engine.until(lambda e: len(e.received) == 1)
        await client.leave()
        await served.engine.until(lambda e: e.open == 0)


async def test_one_who_leaves_takes_nobody_along(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        served.scheduler.is_warm = False
        going, staying = await served.connect(), await served.connect()
        await going.send(request())
        await staying.send(request())
        await until(lambda: served.scheduler.waiting == 2)
        await going.leave()
        await until(lambda: served.scheduler.waiting == 1)
        served.scheduler.gate.set()
        assert (await staying.answer()).status == 200


async def test_in_the_middle_of_the_body(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        await client.send(request()[:-5])
        await until(lambda: served.pipeline.in_flight.buffered > 0)
        await client.leave()
        await until(lambda: served.pipeline.in_flight.buffered == 0)


async def test_a_reader_that_stops_stops_the_engine(folder: Path, kind: str) -> None:
    sent = 0

    async def script(call: Call) -> None:
        nonlocal sent
        await call.send(SSE)
        while True:
            await call.send(event("x" * 10000))
            sent += 10000

    async with proxy(folder, kind, script) as served:
        client = await served.connect()
        sock = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(request(stream=True))
        before = -1
        while sent != before or not sent:  # until the engine is stuck
            before = sent
            await asyncio.sleep(0.05)
        assert sent < 6_000_000
        await reset(client)  # a goodbye of TLS would wait behind what it does not read
        await served.engine.until(lambda e: e.open == 0)


async def test_work_that_is_cancelled_before_it_begins_leaves_nothing() -> None:
    """The client leaves in the turn of the loop in which its engine fails."""

    async def work() -> None:
        raise AssertionError("it began")

    begun = work()
    task = guarded(begun, "x", lambda error: pytest.fail(str(error)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inspect.getcoroutinestate(begun) == inspect.CORO_CLOSED
