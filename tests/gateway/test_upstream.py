"""The connections to one engine, against an engine whose every byte is scripted."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelrunner.daemon.certificates import self_signed
from modelrunner.engine import connections
from modelrunner.engine.connections import UpstreamPool
from modelrunner.engine.receivers import Collector
from modelrunner.errors import EngineProtocolError
from modelrunner.http.responsebodies import TAIL
from modelrunner.types import Endpoint
from tests.gateway.fakes import OK, SSE, Call, chunk, event, scripted_engine, until
from tests.waiting import HUNG


class Recorder:
    """A receiver that keeps what it is told."""

    def __init__(self, decoded: bool = False) -> None:
        self.decoded = decoded
        self.connection: Any = None
        self.head: tuple[int, dict[bytes, bytes], int | None] | None = None
        self.body = bytearray()
        self.error: Exception | None = None
        self.began = asyncio.Event()
        self.ended = asyncio.Event()

    def splices(self, status: int, kind: bytes) -> bool:
        return not self.decoded

    def on_head(self, status: int, headers: tuple[tuple[bytes, bytes], ...], length: int | None, data: bytes) -> None:
        self.head = (status, dict(headers), length)
        self.body += data
        self.began.set()

    def on_data(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        self.ended.set()

    def on_failure(self, error: Exception) -> None:
        self.error = error
        self.ended.set()

    async def wait(self) -> None:
        async with asyncio.timeout(HUNG):
            await self.ended.wait()


REQUEST = UpstreamPool(Endpoint(path=Path("anywhere"))).request("POST", "/v1/chat/completions", b"{}")


async def exchange(pool: UpstreamPool, *, decoded: bool = False) -> Recorder:
    recorder = Recorder(decoded)
    recorder.connection = pool.send(REQUEST, recorder)
    await recorder.wait()
    return recorder


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "e.sock"


def script_of(*pieces: bytes, close: bool = False):
    async def script(call: Call) -> None:
        for piece in pieces:
            await call.send(piece)
            await asyncio.sleep(0)
        if close:
            call.close()

    return script


async def test_fetch_answers_status_and_body(socket_path: Path) -> None:
    async with scripted_engine(socket_path) as engine:
        assert await UpstreamPool(engine.endpoint).fetch("GET", "/health", timeout=HUNG) == (200, b'{"ok":true}')
        assert engine.received[0].path == "/health"
        await engine.until(lambda e: e.open == 0)


async def test_a_request_that_comes_as_a_fetch_ends_is_answered(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ending(Collector):
        def on_end(self) -> None:
            super().on_end()
            pool.send(REQUEST, follower)

    monkeypatch.setattr(connections, "Collector", Ending)
    async with scripted_engine(socket_path) as engine:
        pool, follower = UpstreamPool(engine.endpoint), Recorder()
        assert (await pool.fetch("GET", "/health", timeout=HUNG))[0] == 200
        async with asyncio.timeout(HUNG):
            await follower.wait()
        assert (follower.error, bytes(follower.body)) == (None, b'{"ok":true}')
        pool.close()


async def test_fetch_where_nobody_listens(socket_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await UpstreamPool(Endpoint(path=socket_path)).fetch("GET", "/health", timeout=HUNG)


async def test_fetch_of_a_silent_engine_times_out(socket_path: Path) -> None:
    async with scripted_engine(socket_path, Call.left) as engine:
        with pytest.raises(TimeoutError):
            await UpstreamPool(engine.endpoint).fetch("GET", "/health", timeout=0.05)
        await engine.until(lambda e: e.connections == 1 and e.open == 0)


async def test_fetch_over_tcp() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.read()
        writer.close()
        left.set()

    left = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert (await UpstreamPool(Endpoint(host="127.0.0.1", port=port)).fetch("GET", "/health", timeout=HUNG))[0] == 200
    await left.wait()
    server.close()
    await server.wait_closed()


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[tuple[Endpoint, list[bytes]]]:
    """An engine over TLS that never ends its answer, and the heads that it got; b"" once a client has left."""
    certificate = self_signed(tmp_path, ["engine.internal"])
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(OK if b"GET" in heads[-1] else SSE + event("a"))
            await reader.readexactly(1 << 20)
        heads.append(b"")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=certificate.current())
    trusted = ssl.create_default_context(cafile=str(tmp_path / "certificate.pem"))
    port = server.sockets[0].getsockname()[1]
    headers = (("Authorization", "Bearer of-this-runner"),)
    yield Endpoint(host="127.0.0.1", port=port, tls=trusted, name="engine.internal", headers=headers), heads
    server.close()
    await server.wait_closed()


async def test_an_engine_is_asked_over_tls_by_its_name_and_with_its_key(
    secured: tuple[Endpoint, list[bytes]], tmp_path: Path
) -> None:
    endpoint, heads = secured
    assert (await UpstreamPool(endpoint).fetch("GET", "/health", timeout=HUNG))[0] == 200
    assert b"Host: engine.internal\r\nAuthorization: Bearer of-this-runner\r\n" in heads[0]
    assert "of-this-runner" not in repr(endpoint), "a log must not have it"
    for wrong in (replace(endpoint, name="another.internal"), replace(endpoint, tls=ssl.create_default_context())):
        with pytest.raises(ConnectionError, match="its certificate is not trusted"):
            await UpstreamPool(wrong).fetch("GET", "/health", timeout=HUNG)


async def test_a_request_over_tls_that_is_left_closes_its_connection(secured: tuple[Endpoint, list[bytes]]) -> None:
    endpoint, heads = secured
    recorder, left = Recorder(), asyncio.Event()
    recorder.connection = UpstreamPool(endpoint).send(REQUEST, recorder)
    async with asyncio.timeout(HUNG):
        await recorder.began.wait()
    assert recorder.connection.leave(left.set)
    assert left.is_set()
    await until(lambda: heads[-1] == b"")


@pytest.mark.parametrize("header", [("X-Key", "a\r\nX-Other: b"), ("X-Key", "schl\u00fcssel"), ("X\n", "a")])
def test_a_header_of_an_endpoint_is_one_line(header: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="printable"):
        Endpoint(path=Path("e.sock"), headers=(header,))


async def test_a_connection_serves_again_after_a_sized_answer(socket_path: Path) -> None:
    async with scripted_engine(socket_path) as engine:
        pool = UpstreamPool(engine.endpoint)
        first, second = await exchange(pool), await exchange(pool)
        assert first.body == second.body == b'{"ok":true}'
        assert first.head == (200, {b"content-type": b"application/json"}, 11)
        assert (engine.connections, second.connection.reused) == (1, True)
        pool.close()


@pytest.mark.parametrize("name", [b"Content-Length: ", b"content-length: ", b"CONTENT-LENGTH:"])
async def test_heads_that_differ_in_their_length_only(socket_path: Path, name: bytes) -> None:
    bodies = [b"1", b"", b"another", b"1"]

    async def script(call: Call) -> None:
        body = bodies[len(call.engine.received) - 1]
        await call.send(b"HTTP/1.1 200 OK\r\n%b%d\r\nConnection: keep-alive\r\n\r\n%b" % (name, len(body), body))

    async with scripted_engine(socket_path, script) as engine:
        pool = UpstreamPool(engine.endpoint)
        assert [bytes((await exchange(pool)).body) for _ in bodies] == bodies
        pool.close()


async def test_a_connection_serves_again_after_a_stream(socket_path: Path) -> None:
    async with scripted_engine(socket_path, script_of(SSE, event("a"), chunk(b"x") + b"0\r\n\r\n")) as engine:
        pool = UpstreamPool(engine.endpoint)
        raw, plain = await exchange(pool), await exchange(pool, decoded=True)
        assert raw.body == event("a") + chunk(b"x") + b"0\r\n\r\n"
        assert plain.body == b"data: a\n\nx"
        assert raw.head is not None
        assert raw.head[2] is None
        assert (engine.connections, plain.connection.reused) == (1, True)
        pool.close()


class Follower(Recorder):
    """Sends a request as soon as the one before is answered, when nobody can have seen yet that the engine hangs up."""

    def __init__(self, pool: UpstreamPool) -> None:
        super().__init__()
        self.pool, self.next = pool, Recorder()

    def on_end(self) -> None:
        self.next.connection = self.pool.send(REQUEST, self.next)
        super().on_end()


async def test_an_engine_that_closes_once_after_a_stream_keeps_its_later_connections(socket_path: Path) -> None:
    """A request that is sent before the end is seen is lost, and an exchange sends it anew."""

    async def script(call: Call) -> None:
        await call.send(SSE + event("a") + b"0\r\n\r\n")
        if len(call.engine.received) == 1:
            call.close()

    async with scripted_engine(socket_path, script) as engine:
        pool = UpstreamPool(engine.endpoint)
        follower = Follower(pool)
        pool.send(REQUEST, follower)
        await follower.next.wait()
        assert isinstance(follower.next.error, ConnectionResetError)
        assert (follower.next.connection.reused, follower.next.connection.answered) == (True, False)
        assert [(await exchange(pool)).error for _ in range(3)] == [None] * 3
        assert engine.connections == 2
        pool.close()


@pytest.mark.parametrize("cut", range(1, len(SSE + event("hello") + b"0\r\n\r\n")))
async def test_an_answer_may_be_cut_anywhere(socket_path: Path, cut: int) -> None:
    whole = SSE + event("hello") + b"0\r\n\r\n"

    async def script(call: Call) -> None:
        await call.send(whole[:cut])
        await asyncio.sleep(0.001)
        await call.send(whole[cut:])

    async with scripted_engine(socket_path, script) as engine:
        recorder = await exchange(UpstreamPool(engine.endpoint))
        assert (recorder.error, bytes(recorder.body)) == (None, whole[len(SSE) :])


async def test_a_body_that_ends_with_the_connection_is_put_into_chunks(socket_path: Path) -> None:
    async with scripted_engine(socket_path, script_of(b"HTTP/1.1 200 OK\r\n\r\nabc", close=True)) as engine:
        pool = UpstreamPool(engine.endpoint)
        assert (await exchange(pool)).body == b"3\r\nabc\r\n0\r\n\r\n"
        assert (await exchange(pool, decoded=True)).body == b"abc"


@pytest.mark.parametrize(
    ("media_type", "body", "whole"),
    [
        (b"application/json", b'{"a":[1,"]}\\"{"]}', True),
        (b"application/json; charset=utf-8", b'{"a":[1,"]}\\"{"]', False),
        (b"application/json", b'{"a":"}', False),
        (b"application/json", b"", False),
        (b"text/event-stream", b"data: a\n\ndata: [DONE]\n\n", True),
        (b"text/event-stream", b"event: message_stop\r\ndata: {}\r\n\r\n", True),
        (b"text/event-stream", b"data: a\n\ndata: [DONE]\n", False),
        (b"text/event-stream", b"data: [DO", False),
        (b"text/event-stream", b"data: a\n\n", False),
        (b"text/plain", b"{", True),
    ],
)
@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_a_body_without_a_frame_must_end_of_itself(
    socket_path: Path, media_type: bytes, body: bytes, whole: bool, step: int
) -> None:
    pieces = [body[at : at + step] for at in range(0, len(body), step)]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n\r\n" % media_type
    async with scripted_engine(socket_path, script_of(head, *pieces, close=True)) as engine:
        recorder = await exchange(UpstreamPool(engine.endpoint), decoded=True)
        assert recorder.body == body
        assert isinstance(recorder.error, EngineProtocolError) is not whole


@pytest.mark.parametrize("extension", [b"d;x=y", b"d"])
@pytest.mark.parametrize("last", [b"0;x=y", b"0", b"000"])
async def test_chunk_extensions_are_passed_on(socket_path: Path, extension: bytes, last: bytes) -> None:
    raw = extension + b"\r\n" + b"x" * 13 + b"\r\n" + last + b"\r\n\r\n"
    async with scripted_engine(socket_path, script_of(SSE, raw)) as engine:
        pool = UpstreamPool(engine.endpoint)
        assert (await exchange(pool)).body == raw
        assert (await exchange(pool, decoded=True)).body == b"x" * 13


async def test_a_head_is_held_back_until_the_body_begins(socket_path: Path) -> None:
    gate = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(SSE)
        await gate.wait()
        await call.send(event("a") + b"0\r\n\r\n")

    async with scripted_engine(socket_path, script) as engine:
        recorder = Recorder()
        connection = UpstreamPool(engine.endpoint).send(REQUEST, recorder)
        await until(lambda: connection.answered)
        assert (recorder.head, connection.begun) == (None, False)
        gate.set()
        await recorder.wait()
        assert recorder.head is not None
        assert connection.begun


async def test_a_connection_that_was_paused_to_the_end_serves_again(socket_path: Path) -> None:
    async with scripted_engine(socket_path) as engine:
        pool = UpstreamPool(engine.endpoint)
        for _ in range(3):
            recorder = Recorder()
            recorder.on_data = recorder.body.extend  # type: ignore[method-assign, assignment]
            connection = pool.send(REQUEST, recorder)
            taken = recorder.on_head

            def pausing(*answer: object, take=taken, connection=connection) -> None:
                connection.pause()
                take(*answer)

            recorder.on_head = pausing  # type: ignore[method-assign, assignment]
            await recorder.wait()
        assert engine.connections == 1
        pool.close()


async def test_interim_answers_are_skipped(socket_path: Path) -> None:
    async with scripted_engine(socket_path, script_of(b"HTTP/1.1 100 Continue\r\n\r\n" + OK)) as engine:
        pool = UpstreamPool(engine.endpoint)
        assert (await exchange(pool)).body == b'{"ok":true}'
        pool.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\nContent-Length: 0\n\n\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\x00b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        SSE + b"zz\r\n",
        SSE + b"0\r\n\r\nHTTP/1.1 200 OK\r\n",
        SSE + b"0\r\n\r\n" + SSE + b"0\r\n\r\n",
        SSE + b"0\r\n\r\n\r\n",
        SSE + b"0\r\nX: y\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20000,
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nContent-Type: a/b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 102 Processing\r\n\r\n" * 3000,
    ],
)
async def test_what_is_not_one_well_formed_answer_fails(socket_path: Path, answer: bytes) -> None:
    async with scripted_engine(socket_path, script_of(answer)) as engine:
        recorder = await exchange(UpstreamPool(engine.endpoint))
        assert isinstance(recorder.error, EngineProtocolError)
        await engine.until(lambda e: e.open == 0)


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize(
    ("sent", "boundary"),
    [
        (b"", True),
        (event("a"), True),
        (event("a") + chunk(b"data: b"), False),
        (event("a") + b"f\r\ndata: ", False),
        (chunk(b"data: b\n") + chunk(b"\n"), True),
        (chunk(b"data: \xe2\x82"), False),
    ],
)
async def test_where_an_answer_was_cut_is_known(socket_path: Path, sent: bytes, boundary: bool, decoded: bool) -> None:
    async with scripted_engine(socket_path, script_of(SSE, sent, close=True)) as engine:
        recorder = await exchange(UpstreamPool(engine.endpoint), decoded=decoded)
        assert isinstance(recorder.error, ConnectionResetError)
        assert recorder.connection.at_event_boundary() is boundary


async def test_a_chunk_that_looks_like_a_boundary_is_none(socket_path: Path) -> None:
    async with scripted_engine(socket_path, script_of(SSE, b"20\r\ndata: a\n\n\r\n", close=True)) as engine:
        recorder = await exchange(UpstreamPool(engine.endpoint))
        assert recorder.connection.at_event_boundary() is False


@pytest.mark.parametrize("length", [1, 10, 100, 2000])
async def test_the_size_and_the_end_of_a_stream_are_known(socket_path: Path, length: int) -> None:
    """The end from the last event but one on, if each comes by itself."""
    pieces = [event(str(number) * length) for number in range(200)]
    whole = b"".join(pieces) + b"0\r\n\r\n"

    async def script(call: Call) -> None:
        await call.send(SSE)
        for piece in pieces:
            await call.send(piece)
            await asyncio.sleep(0)
        await call.send(b"0\r\n\r\n")

    async with scripted_engine(socket_path, script) as engine:
        size, end = (await exchange(UpstreamPool(engine.endpoint))).connection.received
        assert size == len(whole)
        assert whole.endswith(end)
        assert end.endswith((pieces[-1] + b"0\r\n\r\n")[-TAIL:])


async def test_an_aborted_exchange_closes_the_connection_and_says_nothing(socket_path: Path) -> None:
    async with scripted_engine(socket_path, Call.left) as engine:
        recorder = Recorder()
        connection = UpstreamPool(engine.endpoint).send(REQUEST, recorder)
        await engine.until(lambda e: len(e.received) == 1)
        connection.abort()
        await engine.until(lambda e: e.open == 0)
        assert not recorder.ended.is_set()


async def test_a_paused_exchange_takes_no_more(socket_path: Path) -> None:
    sent = 0

    async def script(call: Call) -> None:
        nonlocal sent
        await call.send(SSE)
        for _ in range(400):
            await call.send(chunk(b"x" * 65536))
            sent += 1
        await call.send(b"0\r\n\r\n")

    async with scripted_engine(socket_path, script) as engine:
        recorder = Recorder(decoded=True)
        connection = UpstreamPool(engine.endpoint).send(REQUEST, recorder)
        await recorder.began.wait()
        connection.pause()
        before = -1
        while before != sent:  # until the engine is stuck
            before = sent
            await asyncio.sleep(0.02)
        assert sent < 50
        connection.resume()
        await recorder.wait()
        assert len(recorder.body) == 400 * 65536


async def test_closing_the_pool_fails_what_is_under_way(socket_path: Path) -> None:
    async with scripted_engine(socket_path, Call.left) as engine:
        pool = UpstreamPool(engine.endpoint)
        recorder = Recorder()
        pool.send(REQUEST, recorder)
        await engine.until(lambda e: len(e.received) == 1)
        pool.close()
        await recorder.wait()
        assert isinstance(recorder.error, ConnectionAbortedError)
        await engine.until(lambda e: e.open == 0)


async def test_an_idle_connection_that_the_engine_closed_is_forgotten(socket_path: Path) -> None:
    async def script(call: Call) -> None:
        await call.send(OK)
        call.close()

    async with scripted_engine(socket_path, script) as engine:
        pool = UpstreamPool(engine.endpoint)
        await exchange(pool)
        await engine.until(lambda e: e.open == 0)
        await until(lambda: "0 open" in repr(pool))
        assert (await exchange(pool)).body == b'{"ok":true}'
        assert engine.connections == 2
        await asyncio.sleep(0)


async def test_other_work_has_its_turn_while_a_body_is_sent_in_pieces(tmp_path: Path) -> None:
    """An engine may take them as fast as they are read."""
    turns, seen = 0, list[int]()

    def tick() -> None:
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(tick)

    def pieces() -> Iterator[bytes]:
        for _ in range(400):
            seen.append(turns)
            yield b"x"

    async def script(call: Call) -> None:
        await call.send(OK)

    async with scripted_engine(tmp_path / "engine.sock", script) as engine:
        pool, receiver = UpstreamPool(engine.endpoint), Recorder()
        for _ in range(2):  # on a new connection, and on one that is used again
            seen.clear()
            receiver.ended.clear()
            tick()
            pool.send(pool.request("POST", "/v1/chat/completions", b"", size=400), receiver, rest=pieces())
            await receiver.wait()
            assert receiver.error is None
            assert len(seen) == 400
            assert max(map(seen.count, seen)) <= 4
        pool.close()
