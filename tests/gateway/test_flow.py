"""What flows between a client and an engine, or a client and the control plane: nobody's answer hangs, and what waits
for a client that does not read is bounded. For every size around the buffers' limits, on both listeners."""

import asyncio
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gateway.fakes import OK, SSE, Call, answer_ok, chunk, event, until
from tests.gateway.harness import Client, Proxy, only, proxy, request

SIZES = [size + more for size in (1 << 16, 1 << 17, 1 << 18, 1 << 20) for more in (-1, 0, 1, 40_000)]
BOTH = pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
PLAIN = pytest.mark.parametrize("kind", ["fast", "aiohttp"])
"""Not over TLS: the Unix socket alone serves who half-closes, and a client of TLS cannot count the socket's bytes."""
BOUND = 6_000_000
"""Bytes that sockets and buffers may hold of one client: far below what it could send or be sent meanwhile."""


def plain(size: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (size, b"y" * size)


def look(served: Proxy, path: str = "/health") -> bytes:
    return request(path, b"", method="GET", Host=served.host())


async def deaf(served: Proxy, *, tcp: bool) -> Client:
    """A client that reads nothing."""
    client = await served.connect(tcp=tcp)
    client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    return client


async def standstill(count: Callable[[], int], quiet: float = 0.1) -> int:
    """The count once it no longer grows for `quiet` seconds, or has grown beyond `BOUND`."""
    before = -1
    while before != (now := count()) < BOUND:
        before = now
        await asyncio.sleep(quiet)
    return now


@BOTH
async def test_an_engines_connection_serves_the_next_request(folder: Path, kind: str, tcp: bool) -> None:
    """Also after an answer that its client was too slow for, at whichever byte that was."""

    async def script(call: Call) -> None:
        await call.send(plain(int(call.request.header("x-request-id") or 0)))

    async with proxy(folder, kind, script) as served:
        for size in SIZES:
            clients = [await served.connect(tcp=tcp) for _ in range(3)]
            for client in clients:
                await client.send(request(Host=served.host(), X_Request_ID=str(size)) * 2)
            for client in clients * 2:
                assert len((await client.answer()).body) == size
            for client in clients:
                await client.leave()
        assert served.engine.connections <= 6


@BOTH
async def test_what_was_sent_ahead_begins_when_the_client_has_read(folder: Path, kind: str, tcp: bool) -> None:
    sent = 0

    async def script(call: Call) -> None:
        nonlocal sent
        if len(served.engine.received) == 1:
            await call.send(plain(300_000))
            return
        await call.send(SSE)
        for _ in range(80):
            await call.send(event("x" * 100_000))
            sent += 100_000
        await call.send(b"0\r\n\r\n")

    async with proxy(folder, kind, script) as served:
        client = await deaf(served, tcp=tcp)
        await client.send(request(Host=served.host()) + request(stream=True, Host=served.host()))
        await served.engine.until(lambda e: len(e.received) >= 1)
        assert await standstill(lambda: sent) < BOUND
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len((await client.answer()).body) == 300_000
        assert (await client.answer()).complete


@pytest.mark.parametrize("ahead", ["refused", "looks"])
async def test_answers_that_nobody_reads_are_bounded(folder: Path, ahead: str) -> None:
    taken = 0

    async def flood() -> None:
        nonlocal taken
        one = request(body=b"{", Host=served.host()) if ahead == "refused" else look(served)
        while True:
            await client.send(one * 200)
            taken += 200 * len(one)

    async with proxy(folder, "fast") as served:
        client = await deaf(served, tcp=False)
        flooding = asyncio.ensure_future(flood())
        assert await standstill(lambda: taken, quiet=1.0) < BOUND
        client.writer.transport.abort()
        await asyncio.gather(flooding, return_exceptions=True)


@BOTH
async def test_a_control_answer_waits_for_its_reader(folder: Path, tcp: bool) -> None:
    async with proxy(folder, "fast") as served:
        client = await deaf(served, tcp=tcp)
        await client.send(look(served, "/lines?count=800") + request(Host=served.host()))
        assert 0 < await standstill(lambda: served.written[0]) < BOUND
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len((await client.answer()).body) == 8_000_000
        assert (await client.answer()).body == b'{"ok":true}'


@BOTH
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_control_body_waits_for_its_handler(folder: Path, tcp: bool, chunked: bool) -> None:
    """The handler answers without having read it all: then where a next request begins is not known."""
    taken = 0

    async def flood() -> None:
        nonlocal taken
        while True:
            await client.send(chunk(b"x" * 100_000) if chunked else b"x" * 100_000)
            taken += 100_000

    async with proxy(folder, "fast") as served:
        client = await served.connect(tcp=tcp)
        framing = "Transfer-Encoding: chunked" if chunked else "Content-Length: 1000000000"
        await client.send(f"POST /unread?size=1 HTTP/1.1\r\nHost: {served.host()}\r\n{framing}\r\n\r\n".encode())
        flooding = asyncio.ensure_future(flood())
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.closed() == b""
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)


@BOTH
@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 1_000_000])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_control_body_of_any_size(folder: Path, tcp: bool, size: int, chunked: bool) -> None:
    async with proxy(folder, "fast") as served:
        client = await served.connect(tcp=tcp)
        framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
        head = f"POST /unread?size={size} HTTP/1.1\r\nHost: {served.host()}\r\n{framing}\r\n\r\n".encode()
        body = chunk(b"x" * size) + b"0\r\nX: trailer\r\n\r\n" if chunked else b"x" * size
        for _ in range(2):
            assert (await client.ask(head + body)).status == 200
        assert (await client.ask(request(Host=served.host()))).status == 200


async def test_trailers_belong_to_no_request(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        for path in ("/headers", "/v1/chat/completions", "/headers"):
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
            answer = await client.ask(head + chunk(b'{"model":"m"}') + b"0\r\nX-Caller: evil\r\nHost: evil\r\n\r\n")
            assert answer.status == 200
            assert b"x-caller" not in answer.body
        assert b"evil" not in served.engine.received[0].head + served.engine.received[0].body


async def test_one_request_is_handed_over_and_the_connection_stays(folder: Path) -> None:
    """What is expensive for a chat is not done because something else was asked before."""
    async with proxy(folder, "fast") as served:
        lane = served.lanes["unix"]
        made, fallback = 0, lane.fallback

        def counted() -> asyncio.Protocol:
            nonlocal made
            made += 1
            return fallback()

        lane.fallback = counted
        client = await served.connect()
        for ask in (request(), look(served), request(), look(served), request()):
            assert (await client.ask(ask)).status == 200
        assert made == 2


async def test_a_fault_in_a_control_answer_cuts_it(folder: Path) -> None:
    async with proxy(folder, "fast") as served:
        client = await served.connect()
        answer = await client.ask(look(served, "/lines?count=1&fault=1") + request())
        assert (len(answer.body), answer.complete) == (10_000, False)
        assert served.engine.received == []


@pytest.mark.parametrize("path", ["/lines?count=3", "/health"])
async def test_http_1_0_with_keep_alive_gets_to_the_end(folder: Path, kind: str, path: str) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        raw = request(path, b"", method="GET", http="1.0", Connection="keep-alive")
        assert (await client.ask(raw)).complete
        assert await client.closed() == b""


async def test_a_stream_to_http_1_0_with_keep_alive_ends(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + event("a") + b"0\r\n\r\n")

    async with proxy(folder, kind, script) as served:
        client = await served.connect()
        answer = await client.ask(request(stream=True, http="1.0", Connection="keep-alive"))
        assert (answer.body, answer.complete) == (b"data: a\n\n", True)


@BOTH
async def test_who_leaves_takes_what_was_sent_ahead_along(folder: Path, kind: str, tcp: bool) -> None:
    async with proxy(folder, kind, Call.left) as served:
        client = await served.connect(tcp=tcp)
        await client.send(request(Host=served.host()) * 40)
        await served.engine.until(lambda e: len(e.received) == 1)
        await client.leave()
        await until(lambda: served.scheduler.leases == len(served.pipeline.running) == 0)
        assert len(served.engine.received) == 1


@PLAIN
async def test_a_half_closed_client_that_was_answered_is_done(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        client = await served.connect()
        assert (await client.ask()).status == 200
        client.writer.write_eof()
        assert await client.closed() == b""


@PLAIN
async def test_a_half_closed_client_gets_all_that_it_asked_for(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(plain(300_000))

    async with proxy(folder, kind, script) as served:
        client = await deaf(served, tcp=False)
        await client.send((request() + look(served)) * 5)
        client.writer.write_eof()
        await served.engine.until(lambda e: len(e.received) >= 1)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert [len((await client.answer()).body) for _ in range(10)] == [300_000, 19] * 5
        assert await client.closed() == b""


@PLAIN
@BOTH
async def test_a_slow_reader_is_served_and_a_deaf_one_is_not(folder: Path, kind: str, tcp: bool) -> None:
    """The buffers never drain; that something is taken is enough. The times are told, not waited for."""
    sent = 0

    async def script(call: Call) -> None:
        nonlocal sent
        await call.send(SSE)
        while True:
            await call.send(event("x" * 10_000))
            sent += 1

    async with proxy(folder, kind, script, limits=only(check_every=1e6, write_stall=60.0)) as served:
        client = await deaf(served, tcp=tcp)
        listener = served.lanes["tcp" if tcp else "unix"].listener
        [connection] = listener._connections
        with socket.socket(fileno=socket.dup(client.writer.get_extra_info("socket").fileno())) as sock:
            sock.setblocking(False)
            await client.send(request(stream=True, Host=served.host()))
            await served.engine.until(lambda e: len(e.received) == 1)
            loop = asyncio.get_running_loop()
            for step in range(20):
                await standstill(lambda: sent)
                connection.check(loop.time() + 40 * step)
                assert served.engine.open == 1
                taken = 0
                while taken < 200_000 + 1000 * step:
                    taken += len(await loop.sock_recv(sock, 100_000))
            await standstill(lambda: sent)
            connection.check(loop.time() + 1000)
            assert served.engine.open == 1
            connection.check(loop.time() + 1059)
            assert served.engine.open == 1
            connection.check(loop.time() + 1061)
            await served.engine.until(lambda e: e.open == 0)


async def test_a_large_body_is_read_beside_the_others(folder: Path, kind: str) -> None:
    """It takes long to decode; one that was sent after it is answered before it."""
    hard = b'{"model":"m","x":["' + b'\\u006f","' * 120_000 + b'"]}'
    async with proxy(folder, kind) as served:
        first, second = await served.connect(), await served.connect()
        await first.send(request(body=hard))
        await until(lambda: served.pipeline.in_flight.buffered == len(hard))
        assert (await second.ask()).status == 200
        assert (await first.answer()).status == 200
        assert [len(seen.body) for seen in served.engine.received] == [
            len(request().partition(b"\r\n\r\n")[2]),
            len(hard),
        ]


async def test_who_leaves_while_a_large_body_is_decoded(folder: Path, kind: str) -> None:
    hard = b'{"model":"m","x":["' + b'\\u006f","' * 120_000 + b'"]}'
    async with proxy(folder, kind, answer_ok) as served:
        client = await served.connect()
        await client.send(request(body=hard))
        await until(lambda: served.pipeline.in_flight.buffered == len(hard))
        await client.leave()
        await until(lambda: served.pipeline.in_flight.buffered == 0)
        assert served.engine.received == []
        await until(lambda: all(thread.name != "bodies" for thread in threading.enumerate()))  # it reads to the end


@pytest.mark.parametrize(
    "first",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"SSH-2.0-OpenSSH_9.9\r\n", b"*1\r\n$4\r\nPING\r\n", bytes(8), b"GET /\r\n",
     b"\x00", b"GET  /", b"{", b"A" * 41, b"BREW / HTTP/1.1\r\n", b"GET / HTTP/3"],
)  # fmt: skip
async def test_bytes_that_are_no_http_are_refused_as_they_come(folder: Path, first: bytes) -> None:
    async with proxy(folder, "fast", limits=only()) as served:
        client = await served.connect()
        await client.send(first)
        assert (await client.answer()).status in (400, 501)
        assert await client.closed() == b""


@pytest.mark.parametrize("whole", [request(), request("http://test/v1/completions?x=y"), b"\r\n" + request()])
async def test_a_good_head_is_good_at_every_byte(folder: Path, whole: bytes) -> None:
    async with proxy(folder, "fast") as served:
        client = await served.connect()
        for end in range(1, whole.index(b"\r\n\r\n") + 3):
            await client.send(whole[end - 1 : end])
            await asyncio.sleep(0)
        assert (await client.ask(whole[end:])).body == OK.partition(b"\r\n\r\n")[2]
