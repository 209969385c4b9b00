"""The memory of streams that outlive their connection."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from modelrunner.errors import NotFound
from modelrunner.gateway.interceptors import resumable_streams as streams
from modelrunner.gateway.interceptors.resumable_streams import ResumableStreams
from tests.gateway.fakes import SSE, Call, chunk, until
from tests.gateway.harness import Proxy, proxy, request

PIECE = b"x" * 1000


def asked(name: str) -> bytes:
    return request(stream=True, X_Resumable="true", X_Request_ID=name)


def kept(served: Proxy, memory: int) -> ResumableStreams:
    made = ResumableStreams(served.pipeline.exchanges, memory, 1e6)
    served.pipeline.use_interceptors(streams=made)
    return made


async def test_what_the_client_has_may_go_and_the_rest_pauses_the_engine(folder: Path, kind: str) -> None:
    gate, sent = asyncio.Event(), 0

    async def script(call: Call) -> None:
        nonlocal sent
        await call.send(SSE)
        for number in range(3000):
            if number == 20:
                await gate.wait()
            await call.send(chunk(PIECE))
            sent += 1
        await call.send(b"0\r\n\r\n")

    async with proxy(folder, kind, script) as served:
        made = kept(served, 10_000)
        client = await served.connect()
        await client.send(asked("r"))
        answer = await client.head()
        while len(answer.body) < 20_000:
            await client.more(answer)
        stream = made.find("r", "")
        assert len(stream.data) == 10_000
        with pytest.raises(NotFound, match="kept from byte 10000"):
            await anext(stream.read(9_999))
        await client.leave()
        await until(lambda: bool(made._timers))  # the client's end was noticed
        gate.set()
        await until(lambda: len(stream.data) > 10_000)
        held = len(stream.data)
        assert held < 1_000_000  # what was on its way from the engine when it was paused
        assert sent < 3000
        async with aclosing(stream.read(20_000)) as pieces:
            assert sum([len(piece) async for piece in pieces]) == 2980 * 1000
        assert stream.complete
        made.close()


async def test_streams_together_are_bounded(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LIMIT", 1000)
    gate = asyncio.Event()

    async def script(call: Call) -> None:
        await call.send(SSE + chunk(b"begun"))
        await gate.wait()
        await call.send(b"0\r\n\r\n")

    async with proxy(folder, kind, script) as served:
        made = kept(served, 2000)
        clients = [await served.connect() for _ in range(3)]
        answers = []
        for number, client in enumerate(clients):
            await client.send(asked(f"r{number}"))
            answers.append(await client.head())
        named = ["x-modelrunner-stream" in answer.headers for answer in answers]
        assert named == [True, True, False]
        gate.set()
        for client, answer in zip(clients, answers, strict=True):
            while await client.more(answer):
                pass
            assert answer.complete
        assert "x-modelrunner-stream" in (await served.ask(asked("r3"))).headers
        made.close()


async def test_a_client_that_took_no_more_does_not_hold_the_engine(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE)
        for _ in range(8000):
            await call.send(chunk(PIECE))
        await call.send(b"0\r\n\r\n")

    async with proxy(folder, kind, script) as served:
        made = kept(served, 1 << 20)
        client = await served.connect()
        await client.send(asked("r"))
        await client.head()
        stream = made.find("r", "")
        await until(lambda: any(stream._requests.values()))  # it reads nothing, and its connection is full
        async with aclosing(stream.read(stream.end)) as pieces:
            async for _ in pieces:
                pass
        assert stream.complete
        assert stream.end == 8000 * len(PIECE)
        made.close()
