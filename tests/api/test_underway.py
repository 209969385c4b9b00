"""What is under way ends with the API key that it was admitted with, until a model answers it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.api.conftest import Daemon, StartDaemon
from tests.api.test_keys import CHAT, call, make_key
from tests.waiting import HUNG

STREAMS = ["/engines/requests", "/engines/events?since=0", "/engines/now", "/logs?follow=true"]


async def revoke(daemon: Daemon) -> None:
    async with daemon.unix.delete("/keys/kim") as answer:
        assert answer.status == 200


async def rotate(daemon: Daemon) -> None:
    async with daemon.unix.post("/keys/kim/rotate") as answer:
        assert answer.status == 200


@asynccontextmanager
async def stream(daemon: Daemon, path: str, key: str = "") -> AsyncIterator[aiohttp.StreamReader]:
    headers = {"Accept": "text/event-stream"} | ({"X-API-Key": key} if key else {})
    async with daemon.tcp.get(path, headers=headers) as answer:
        assert answer.status == 200
        yield answer.content


async def assert_cut(content: aiohttp.StreamReader) -> None:
    async with asyncio.timeout(HUNG):
        with pytest.raises(aiohttp.ClientPayloadError):
            await content.read()


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("end", [revoke, rotate])
async def test_a_stream_ends_with_the_text_of_its_key(
    start_daemon: StartDaemon, path: str, end: Callable[[Daemon], Awaitable[None]]
) -> None:
    daemon = await start_daemon(models={"smol": 0})
    other = await make_key(daemon, name="other", scopes=["admin"])
    key = await make_key(daemon, scopes=["admin"])
    async with stream(daemon, path, key) as content, stream(daemon, "/engines/requests", other) as kept:
        await end(daemon)
        await assert_cut(content)
        async with daemon.unix.post("/v1/chat/completions", json=CHAT) as answer:
            assert answer.status == 200
        async with asyncio.timeout(HUNG):
            assert (await kept.readline()) == b"event: request\n"


async def test_a_stream_ends_when_its_key_expires(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    key = await make_key(daemon, scopes=["admin"], expires="3s")
    async with stream(daemon, "/engines/requests", key) as content:
        await assert_cut(content)
    assert (await call(daemon, "GET", "/keys", key))[0] == 401


async def test_a_stream_without_a_key_ends_with_the_first_key(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    async with stream(daemon, "/engines/requests") as content:
        await make_key(daemon)
        await assert_cut(content)


async def test_a_key_that_changes_itself_is_answered(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    await make_key(daemon, name="other")
    status, made = await call(daemon, "POST", "/keys/kim/rotate", await make_key(daemon, scopes=["admin"]))
    assert status == 200
    assert await call(daemon, "DELETE", "/keys/kim", made["text"]) == (200, {"revoked": "kim"})


async def test_a_request_ends_with_its_key_before_its_answer_has_begun(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    await make_key(daemon, name="other")
    headers = {"X-API-Key": await make_key(daemon, scopes=["models"]), "Content-Type": "application/x-tar"}
    admitted = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        admitted.set()
        await asyncio.Event().wait()
        yield b""

    async def load() -> None:
        async with daemon.tcp.post("/models/load", data=body(), headers=headers, expect100=True):
            pass

    loading = asyncio.create_task(load())
    async with asyncio.timeout(HUNG):
        await admitted.wait()
        await revoke(daemon)
        with pytest.raises(aiohttp.ClientError):
            await loading


@pytest.mark.parametrize("end", [revoke, rotate])
async def test_a_question_is_not_asked_after_the_end_of_its_key(
    start_daemon: StartDaemon, end: Callable[[Daemon], Awaitable[None]]
) -> None:
    """Its head came before, the rest of its body after."""
    daemon = await start_daemon(models={"smol": 0})
    await make_key(daemon, name="other")
    key, body = await make_key(daemon), json.dumps(CHAT)
    head = f"Host: localhost:{daemon.port}\r\nX-API-Key: {key}\r\nExpect: 100-continue\r\nContent-Length: {len(body)}"
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
    writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode())
    async with asyncio.timeout(HUNG):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await end(daemon)
        writer.write(body.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
    writer.close()
    assert daemon.backend.runs == 0


@pytest.mark.parametrize(("end", "status"), [(revoke, 401), (rotate, 200)])
async def test_a_request_that_waits_for_its_model_ends_with_its_key(
    start_daemon: StartDaemon, tmp_path: Path, end: Callable[[Daemon], Awaitable[None]], status: int
) -> None:
    """Another text of the key changes nothing. The load, which another request waits for as well, goes on."""
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--gate", str(tmp_path / "gate"))
    other, key = await make_key(daemon, name="other"), await make_key(daemon)
    asked = [asyncio.create_task(ask(daemon, each)) for each in (other, key)]
    async with asyncio.timeout(HUNG):
        await two_wait(daemon)
        await end(daemon)
        if status == 401:
            assert await asked[1] == 401
        (tmp_path / "gate").touch()
        assert [await each for each in asked] == [200, status]
    assert daemon.backend.runs == 1


async def test_a_request_without_a_key_that_waits_ends_with_the_first_key(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--gate", str(tmp_path / "gate"))
    async with asyncio.timeout(HUNG):
        asked = asyncio.create_task(ask(daemon, ""))
        local = asyncio.create_task(daemon.unix.post("/v1/chat/completions", json=CHAT))
        await two_wait(daemon)
        await make_key(daemon)
        assert await asked == 401
        (tmp_path / "gate").touch()
        assert (await local).status == 200


async def ask(daemon: Daemon, key: str) -> int:
    headers = {"X-API-Key": key} if key else {}
    async with daemon.tcp.post("/v1/chat/completions", json=CHAT, headers=headers) as answer:
        await answer.read()
        return answer.status


async def two_wait(daemon: Daemon) -> None:
    """Returns once two requests wait for a runner."""
    while True:
        async with daemon.unix.get("/engines/now") as answer:
            if sum((await answer.json())["waiting"].values()) == 2:
                return
