"""Progress, line by line, to clients that read, read slowly, or leave."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from modelrunner.api.streaming import Work, stream_progress
from modelrunner.errors import ModelNotFound, NotFound, SourceFailed
from modelrunner.progress import FileProgress, ProgressReport, WorkProgress
from modelrunner.wire import Progress
from tests.api.conftest import StartDaemon
from tests.gateway.harness import proxy
from tests.waiting import HUNG

Get = Callable[[Work], Awaitable[aiohttp.ClientResponse]]


@pytest.fixture
async def get(tmp_path: Path) -> AsyncIterator[Get]:
    """Asks for the work that it is given, as a program does."""
    works: list[Work] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream_progress(request, works.pop(), mode="pull")

    async with (
        proxy(tmp_path, "unix", routes=[web.get("/work", handler)]) as served,
        aiohttp.ClientSession(
            headers={"Accept": "application/json"}, connector=aiohttp.UnixConnector(str(served.path))
        ) as client,
    ):

        async def ask(work: Work) -> aiohttp.ClientResponse:
            works.append(work)
            return await client.get("http://localhost/work")

        yield ask


async def test_what_a_slow_reader_missed_is_not_kept(get: Get) -> None:
    layer, other = "sha256:one", "sha256:two"

    async def work(report: ProgressReport) -> Progress:
        for done in range(1, 10_001):
            report(WorkProgress("Downloading", "", 20_000, done, FileProgress(layer, 10_000, done)))
        report(WorkProgress("Downloading", "", 20_000, 10_001, FileProgress(other, 10_000, 1)))
        await asyncio.sleep(0)
        return Progress("success", "done")

    async with await get(work) as answer:
        lines = [json.loads(line) for line in (await answer.read()).splitlines()]
    assert [line["message"] for line in lines][-1] == "done"
    newest = {line["layer"]["id"]: line["layer"]["current"] for line in lines[:-1]}
    assert newest == {layer: 10_000, other: 1}
    assert len(lines) < 10


async def test_an_error_before_the_first_line_is_an_ordinary_one(get: Get) -> None:
    async def work(report: ProgressReport) -> Progress:
        raise ModelNotFound("no such model")

    async with await get(work) as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["code"] == "model_not_found"


async def test_an_error_after_it_is_the_last_line(get: Get) -> None:
    gate = asyncio.Event()

    async def work(report: ProgressReport) -> Progress:
        report(WorkProgress("Downloading"))
        await gate.wait()
        raise SourceFailed("the registry hung up")

    async with await get(work) as answer:
        assert answer.status == 200
        assert json.loads(await answer.content.readline())["type"] == "progress"
        gate.set()
        last = json.loads(await answer.content.readline())
    assert (last["type"], last["message"]) == ("error", "the registry hung up")
    assert last["error"] == {
        "message": "the registry hung up",
        "type": "server_error",
        "param": None,
        "code": "source_failed",
    }


async def test_the_work_ends_with_its_client(get: Get) -> None:
    ended = asyncio.Event()

    async def work(report: ProgressReport) -> Progress:
        report(WorkProgress("Downloading"))
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    answer = await get(work)
    answer.close()
    async with asyncio.timeout(HUNG):
        await ended.wait()


@pytest.mark.parametrize("started", [False, True])
async def test_a_bug_of_ours_tells_nothing_and_never_looks_like_success(
    get: Get, started: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gate = asyncio.Event()

    async def work(report: ProgressReport) -> Progress:
        if started:
            report(WorkProgress("Downloading"))
            await gate.wait()
        raise KeyError("secret of ours")

    async with await get(work) as answer:
        gate.set()
        if started:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        else:
            text = await answer.text()
            assert answer.status == 500
            assert "secret" not in text
            assert json.loads(text)["request_id"] in caplog.text
    assert "secret of ours" in caplog.text


async def test_a_refusal_never_stands_inside_an_answer_that_has_begun(tmp_path: Path) -> None:
    """It would be read as a part of the body: the connection is cut instead."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"the beginning")
        raise {"ours": NotFound("gone"), "aiohttp's": web.HTTPNotFound()}[request.match_info["whose"]]

    async with proxy(tmp_path, "unix", routes=[web.get("/begun/{whose}", handle)]) as served:
        for whose in ("ours", "aiohttp's"):
            reader, writer = await asyncio.open_unix_connection(str(served.path))
            writer.write(f"GET /begun/{whose} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            async with asyncio.timeout(HUNG):
                answer = await reader.read()
            writer.close()
            await writer.wait_closed()
            assert answer.count(b"HTTP/1.1 ") == 1
            assert answer.endswith(b"the beginning\r\n")


@pytest.mark.parametrize("path", ["/engines/events?since=0", "/engines/requests", "/engines/now", "/logs?follow=true"])
async def test_a_look_at_the_head_of_a_feed_ends(start_daemon: StartDaemon, path: str) -> None:
    daemon = await start_daemon()
    reader, writer = await asyncio.open_unix_connection(str(daemon.settings.runtime_dir / "modelrunner.sock"))
    fields = "Host: x\r\nAccept: text/event-stream\r\n"
    writer.write(f"HEAD {path} HTTP/1.1\r\n{fields}\r\nGET / HTTP/1.1\r\n{fields}Connection: close\r\n\r\n".encode())
    async with asyncio.timeout(HUNG):
        first, second, body = (await reader.read()).split(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert (second[:13], body) == (b"HTTP/1.1 200 ", b"modelrunner is running\n")
    writer.close()
