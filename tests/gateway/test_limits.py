"""Clients that take too long or too much are closed at their limits; the others notice nothing."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import pytest

from modelrunner.http.limits import Limits
from modelrunner.http.listener import Listener
from modelrunner.ui.staticfiles import STATIC
from tests.gateway.fakes import SSE, Call, chunk, event, until
from tests.gateway.harness import CHAT, Client, only, proxy, request
from tests.waiting import HUNG


async def drip(client: Client, data: bytes, every: float) -> None:
    with suppress(ConnectionError):
        for byte in data:
            await client.send(bytes([byte]))
            await asyncio.sleep(every)


@pytest.mark.parametrize("first", [b"", b"P", b"POST / HTTP/1.1\r\nHost: x\r\n"])
async def test_a_head_that_does_not_end(folder: Path, first: bytes) -> None:
    async with proxy(folder, "fast", limits=only(header_timeout=0.05)) as served:
        client = await served.connect()
        await client.send(first)
        assert await client.closed() == b""


async def test_a_head_in_drops_is_not_given_more_time(folder: Path) -> None:
    async with proxy(folder, "fast", limits=only(header_timeout=1.0)) as served:
        client = await served.connect()
        assert (await client.ask()).status == 200
        dripping = asyncio.ensure_future(drip(client, request()[:20] + b"x" * 10_000, 0.02))
        assert await client.closed() == b""
        await dripping


async def test_a_body_that_stops(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, limits=only(body_idle=0.1)) as served:
        client = await served.connect()
        await client.send(request()[:-3])
        assert await client.closed() == b""
        await until(lambda: served.pipeline.in_flight.buffered == 0)


async def test_a_body_in_drops(folder: Path) -> None:
    async with proxy(folder, "fast", limits=only(body_idle=0.2)) as served:
        client = await served.connect()
        ask = request(body={"model": "m", "x": "y" * 1000})
        await client.send(ask[:-1000])
        dripping = asyncio.ensure_future(drip(client, ask[-1000:], 0.05))
        assert await client.closed() == b""
        dripping.cancel()


async def test_a_body_in_chunks_that_stops(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, limits=only(body_idle=0.1)) as served:
        client = await served.connect()
        await client.send(
            f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode() + chunk(b"{")
        )
        assert await client.closed() == b""


async def test_an_idle_connection(folder: Path) -> None:
    async with proxy(folder, "fast", limits=only(idle=0.1)) as served:
        client = await served.connect()
        assert (await client.ask()).status == 200
        assert await client.closed() == b""


async def test_a_reader_that_stalls(folder: Path) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE)
        while True:
            await call.send(event("x" * 10000))

    async with proxy(folder, "fast", script, limits=only(write_stall=0.2)) as served:
        client = await served.connect()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.send(request(stream=True))
        await served.engine.until(lambda e: len(e.received) == 1)
        await served.engine.until(lambda e: e.open == 0)


async def test_a_reader_that_is_slow_but_reads_is_served(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE)
        for _ in range(100):
            await call.send(event("x" * 10000))
        await call.send(b"0\r\n\r\n")

    async with proxy(folder, kind, script) as served:
        client = await served.connect()
        await client.send(request(stream=True))
        answer = await client.head()
        while await client.more(answer):  # noqa: ASYNC110  being slow is the point
            await asyncio.sleep(0.002)
        assert (len(answer.body), answer.complete) == (100 * 10008, True)


async def test_a_slow_answer_has_no_limit(folder: Path) -> None:
    async def script(call: Call) -> None:
        await gate.wait()
        await call.send(SSE + b"0\r\n\r\n")

    gate = asyncio.Event()
    async with proxy(folder, "fast", script, limits=only(check_every=1e6)) as served:
        client = await served.connect()
        await client.send(request(stream=True))
        await served.engine.until(lambda e: len(e.received) == 1)
        served.look(1e6)
        gate.set()
        assert (await client.answer()).complete


# A client that never asked is silent for the longest, also where both came within the clock's resolution.
FULL = pytest.mark.parametrize(
    ("tcp", "limits"),
    [(True, only(per_peer=2, header_timeout=50 * HUNG)), (False, only(connections=2, header_timeout=50 * HUNG))],
)


@FULL
async def test_more_connections_than_allowed_while_all_are_busy(folder: Path, tcp: bool, limits: Limits) -> None:
    gate = asyncio.Event()

    async def script(call: Call) -> None:
        await gate.wait()
        await call.send(SSE + b"0\r\n\r\n")

    async with proxy(folder, "fast", script, limits=limits) as served:
        ask = request(Host=served.host())
        busy = [await served.connect(tcp=tcp) for _ in range(2)]
        for client in busy:
            await client.send(ask)
        await served.engine.until(lambda e: len(e.received) == 2)
        third = await served.connect(tcp=tcp)
        answer = await third.answer()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert await third.closed() == b""
        await third.leave()
        gate.set()
        assert [(await client.answer()).status for client in busy] == [200, 200]
        assert (await (await served.connect(tcp=tcp)).ask(ask)).status == 200


@FULL
async def test_a_crowd_beyond_the_limit_while_all_are_busy(folder: Path, tcp: bool, limits: Limits) -> None:
    async with proxy(folder, "fast", Call.left, limits=limits) as served:
        for _ in range(2):
            await (await served.connect(tcp=tcp)).send(request(Host=served.host()))
        await served.engine.until(lambda e: len(e.received) == 2)
        listener = served.lanes["tcp" if tcp else "unix"].listener
        for _ in range(100):
            client = await served.connect(tcp=tcp)
            await client.send(request(Host=served.host()))
            assert len(listener) <= 2 + 32
        assert len(served.engine.received) == 2


@FULL
async def test_who_holds_a_place_for_nothing_gives_it_to_the_next(folder: Path, tcp: bool, limits: Limits) -> None:
    """Idle ones and such that were handed over, each in turn the one that was silent the longest."""
    async with proxy(folder, "fast", limits=limits) as served:
        look = request("/health", b"", method="GET", Host=served.host())
        first, second = [await served.connect(tcp=tcp) for _ in range(2)]
        assert (await second.ask(look)).status == 200
        third = await served.connect(tcp=tcp)
        assert (await third.ask(request(Host=served.host()))).status == 200
        assert await first.closed() == b""
        assert (await second.ask(look)).status == 200
        assert (await (await served.connect(tcp=tcp)).ask(look)).status == 200
        assert len(served.lanes["tcp" if tcp else "unix"].listener) == 2


class Silent:
    """A connection that never sends anything."""

    peer = ""
    ended = False

    def check(self, now: float) -> None: ...

    def abort(self) -> None:
        self.ended = True

    def drain(self) -> None: ...


async def test_a_new_client_at_the_limit_costs_the_same_however_many_there_are(folder: Path) -> None:
    most = 4000
    listener = Listener(only(connections=most, check_every=1e6), local=True)
    first, more = [Silent() for _ in range(most)], [Silent() for _ in range(most)]
    for connection in first:
        assert listener.enter(connection, asyncio.Transport()) is None
    began = time.process_time()
    for connection in more:
        assert listener.enter(connection, asyncio.Transport()) is None
    assert time.process_time() - began < 0.5  # two seconds where each looks at all
    assert all(connection.ended for connection in first)
    for connection in more:
        listener.leave(connection)


async def test_unread_files_of_the_page_take_little_memory(folder: Path, kind: str) -> None:
    """No client that does not read has more than a few pieces of a file in memory."""
    path, clients = "/ui/swagger-ui-bundle.js", 30
    size = len((STATIC / "swagger-ui-bundle.js").read_bytes())
    async with proxy(folder, kind) as served:
        ask = request(path, b"", method="GET", Content_Length="")
        deaf = [await (await served.connect()).send(ask) for _ in range(clients)]
        for client in deaf:
            assert (await client.head()).headers["content-length"] == str(size)
        assert len((await served.ask(ask)).body) == size
        assert served.unsent() < clients * 160_000


async def test_unread_answers_have_one_bound(folder: Path, kind: str) -> None:
    """Of answers that come in one piece; who left the most unread goes first."""
    bound = 16 << 20
    async with proxy(folder, kind, limits=only(total_unsent=bound)) as served:
        ask = request("/large", b"", method="GET", Content_Length="")
        deaf = [await (await served.connect()).send(ask) for _ in range(20)]
        for client in deaf:
            await client.head()
        assert served.unsent() <= bound
        answer = await served.ask(ask)
        assert (len(answer.body), answer.complete) == (4 << 20, True)


def test_limits_leave_descriptors_for_engines_and_files() -> None:
    for descriptors in (64, 256, 1024, 65536):
        limits = Limits.within(descriptors, body=7)
        assert limits.body == 7
        assert limits.per_peer <= limits.connections
        assert limits.connections * 4 <= max(64, descriptors - 256)
    assert Limits.within(65536) == Limits()


async def test_all_bodies_together(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, limits=only(total_body=1000)) as served:
        large = request(body={"model": "m", "x": "y" * 900})
        holding = await served.connect()
        await holding.send(large[:-10])
        await until(lambda: served.pipeline.in_flight.buffered > 800)
        answer = await served.ask(large)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert (await holding.ask(large[-10:])).status == 200
        assert (await served.ask(large)).status == 200


async def test_one_client_leaves_room_for_the_bodies_of_others(folder: Path) -> None:
    """Bodies that never end, of one address, against one body of the Unix socket."""
    large = request(body={"model": "m", "x": "y" * 960})
    async with proxy(folder, "fast", limits=only(body=1000, total_body=16_000)) as served:
        endless = large.replace(b"Host: test", b"Host: " + served.host().encode())[:-10]
        statuses = []
        for _ in range(17):
            client, before = await served.connect(tcp=True), served.pipeline.in_flight.buffered
            answering = asyncio.ensure_future((await client.send(endless)).answer())
            await until(lambda b=before, a=answering: a.done() or served.pipeline.in_flight.buffered > b)  # type: ignore[misc]
            if answering.done():
                statuses.append(answering.result().status)
            else:
                answering.cancel()
        assert statuses == [503] * 9
        assert (await served.ask(large)).status == 200


async def test_a_body_that_comes_steadily_has_an_end(folder: Path) -> None:
    async with proxy(folder, "fast", limits=only(body_time=0.3)) as served:
        client = await served.connect()
        ask = request(body={"model": "m", "x": "y" * 1000})
        await client.send(ask[:-1000])
        dripping = asyncio.ensure_future(drip(client, ask[-1000:], 0.01))
        assert await client.closed() == b""
        dripping.cancel()


async def test_what_is_pipelined_is_not_read_without_end(folder: Path) -> None:
    gate = asyncio.Event()

    async def script(call: Call) -> None:
        await gate.wait()
        await call.send(SSE + b"0\r\n\r\n")

    async with proxy(folder, "fast", script, limits=only(pipelined=10_000)) as served:
        client = await served.connect()
        many = 20_000
        sending = asyncio.ensure_future(client.send(request() * many))
        await served.engine.until(lambda e: len(e.received) == 1)
        await asyncio.sleep(0.1)
        assert not sending.done()
        sending.cancel()
        gate.set()
        assert [(await client.answer()).status for _ in range(50)] == [200] * 50
        client.writer.transport.abort()


async def test_draining_lets_answers_end_and_takes_nothing_new(folder: Path) -> None:
    gate = asyncio.Event()

    async def script(call: Call) -> None:
        await gate.wait()
        await call.send(SSE + b"0\r\n\r\n")

    async with proxy(folder, "fast", script) as served:
        idle, busy = await served.connect(), await served.connect()
        await busy.send(request())
        await served.engine.until(lambda e: len(e.received) == 1)
        served.lanes["unix"].drain()
        assert await idle.closed() == b""
        gate.set()
        assert (await busy.answer()).complete
        assert await busy.closed() == b""


async def test_a_busy_data_plane_leaves_control_requests_alone(folder: Path) -> None:
    """Slow heads, slow bodies and readers that never read: control requests are answered, and cost what they cost
    without all that. Processor time is compared, since it is the same on a busy machine."""

    async def script(call: Call) -> None:
        await call.send(SSE)
        while True:
            await call.send(event("x" * 1000))

    async with proxy(folder, "fast", script) as served:
        control = await served.connect()

        async def cost() -> float:
            began = time.thread_time()
            for _ in range(100):
                assert (await control.ask(request("/health", b"", method="GET"))).status == 200
            return time.thread_time() - began

        await cost()
        alone = min([await cost() for _ in range(3)])
        for number in range(60):
            client = await served.connect()
            await client.send([b"POST / HT", request()[:-3], request(stream=True)][number % 3])
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await served.engine.until(lambda e: len(e.received) == 20)
        assert min([await cost() for _ in range(3)]) < 3 * alone
