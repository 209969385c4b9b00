"""A request whose engine is on another host: over TLS, with the name and the key of its runner."""

import asyncio
from pathlib import Path

from tests.gateway.fakes import SSE, Call, FakeRunner, event, until
from tests.gateway.harness import proxy, request


async def test_it_is_answered_and_the_connection_serves_again(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, remote=True) as served:
        for _ in range(3):
            answer = await served.ask(request())
            assert (answer.status, answer.complete) == (200, True)
        assert served.engine.connections == 1
        seen = served.engine.received[0]
        assert (seen.header("host"), seen.header("authorization")) == ("engine.internal", "Bearer of-this-runner")


async def test_a_stream_comes_piece_by_piece(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + event("a"))
        await more.wait()
        await call.send(event("b") + b"0\r\n\r\n")

    more = asyncio.Event()
    async with proxy(folder, kind, script, remote=True) as served:
        client = await served.connect()
        await client.send(request(stream=True))
        answer = await client.head()
        assert await client.more(answer) == b"data: a\n\n"
        more.set()
        assert await client.more(answer) == b"data: b\n\n"
        await client.leave()


async def test_a_client_that_leaves_ends_its_request_there(folder: Path, kind: str) -> None:
    async def endless(call: Call) -> None:
        await call.send(SSE + event("a"))
        await call.left()

    async with proxy(folder, kind, endless, remote=True) as served:
        client = await served.connect()
        await client.send(request(stream=True))
        await client.more(await client.head())
        await client.leave()
        await until(lambda: served.scheduler.leases == 0)
        await until(lambda: served.engine.open == 0)


async def test_a_request_without_a_byte_is_asked_again_elsewhere(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        if len(served.engine.received) == 1:
            lost = served.runner
            served.scheduler.runner = served.runner = FakeRunner(lost.endpoint)
            lost.die("the host b does not answer any more")
            call.reset()
        else:
            await call.send(SSE + event("a") + b"0\r\n\r\n")

    async with proxy(folder, kind, script, remote=True) as served:
        answer = await served.ask(request(stream=True))
        assert (answer.status, answer.body) == (200, b"data: a\n\n")


async def test_a_stream_that_a_host_takes_with_it_says_so(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + event("a"))
        served.runner.die("the host b does not answer any more")
        call.reset()

    async with proxy(folder, kind, script, remote=True) as served:
        answer = await served.ask(request(stream=True))
        assert b"the host b does not answer any more" in answer.body
