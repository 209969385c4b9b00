"""Requests, runners and the daemon's end together, with a fake engine's real processes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.api.conftest import Daemon, StartDaemon
from tests.waiting import HUNG

CHAT = "/v1/chat/completions"


def ask(model: str = "smol", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], **more}


async def chat(client: aiohttp.ClientSession, path: str = CHAT, **more: Any) -> int:
    async with client.post(path, json=ask(**more)) as answer:
        await answer.read()
        return answer.status


async def runners(daemon: Daemon) -> list[dict[str, Any]]:
    async with daemon.unix.get("/engines/ps") as answer:
        found: list[dict[str, Any]] = await answer.json()
    return found


async def stop(daemon: Daemon) -> None:
    async with daemon.unix.post("/shutdown") as answer:
        assert answer.status == 202


class Stream:
    """A streamed answer whose first event has come; the rest comes slowly, for minutes."""

    def __init__(self, daemon: Daemon) -> None:
        daemon.backend.knobs = ("--rate=20",)
        self._request = daemon.unix.post(CHAT, json=ask(stream=True, max_tokens=10_000))

    async def __aenter__(self) -> aiohttp.ClientResponse:
        answer = await self._request.__aenter__()
        assert answer.status == 200
        await answer.content.readline()
        return answer

    async def __aexit__(self, *error: Any) -> None:
        await self._request.__aexit__(*error)


@pytest.mark.parametrize("path", [CHAT, f"/engines{CHAT}", f"/engines/fake{CHAT}"])
async def test_every_path_and_listener_leads_to_one_runner(start_daemon: StartDaemon, path: str) -> None:
    daemon = await start_daemon(models={"smol": 0})
    assert await chat(daemon.unix, path) == 200
    assert await chat(daemon.tcp, path) == 200
    (runner,) = await runners(daemon)
    assert (runner["backend_name"], runner["state"], runner["model_name"]) == ("fake", "ready", "smol")
    assert await chat(daemon.unix, f"/runners/{runner['id']}{CHAT}") == 200
    assert await chat(daemon.unix, "/runners/00000000" + CHAT) == 404
    assert daemon.backend.runs == 1
    async with daemon.unix.get("/logs", params={"runner": runner["id"]}) as answer:
        assert "ready" in await answer.text()


@pytest.mark.parametrize(("path", "status"), [("/engines/nope" + CHAT, 404), (CHAT, 404)])
async def test_what_is_unknown_starts_nothing(start_daemon: StartDaemon, path: str, status: int) -> None:
    daemon = await start_daemon()
    assert await chat(daemon.tcp, path) == status
    assert daemon.backend.runs == 0


async def test_unloading_says_what_it_did(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    await chat(daemon.unix)
    async with daemon.unix.post("/engines/unload", json={"models": ["smol"]}) as answer:
        assert await answer.json() == {"unloaded_runners": 1, "unloaded": ["smol"], "kept": []}
    assert await runners(daemon) == []


async def test_a_model_in_use_is_not_removed_unless_forced(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, drain_limit=0.2)
    async with Stream(daemon) as answer:
        async with daemon.unix.delete("/models/smol") as refused:
            assert refused.status == 409
        async with daemon.unix.delete("/models/smol?force=true") as done:
            assert [*(await done.json())[0]] == ["Untagged"]
        assert b"event: error" in await answer.content.read()
    assert await runners(daemon) == []
    assert await chat(daemon.unix) == 404


async def test_a_resident_model_is_removed(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    await chat(daemon.unix)
    async with daemon.unix.delete("/models/smol") as done:
        assert done.status == 200
    assert await runners(daemon) == []


async def test_the_end_waits_for_answers_and_refuses_what_is_new(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"smol": 0}, drain_limit=HUNG)
    daemon.backend.knobs = (f"--token-gate={tmp_path / 'gate'}",)
    async with daemon.unix.post(CHAT, json=ask(stream=True, max_tokens=30)) as answer:
        await answer.content.readline()
        await stop(daemon)
        assert await chat(daemon.tcp) == 503
        async with daemon.tcp.get("/health") as health:
            assert (await health.json())["status"] == "shutting_down"
        async with daemon.tcp.get("/ready") as unready:
            assert unready.status == 503
        async with daemon.tcp.post("/models/smol/tag?repo=other") as refused:
            assert refused.status == 503
            assert int(refused.headers["Retry-After"]) > 0
        (tmp_path / "gate").touch()
        assert b"[DONE]" in await answer.content.read()
    await daemon.task
    assert list((tmp_path / "r").iterdir()) == []


async def test_asked_twice_the_end_does_not_wait(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, drain_limit=100 * HUNG)
    async with Stream(daemon) as answer:
        await stop(daemon)
        await stop(daemon)
        assert b"event: error" in await answer.content.read()
        async with asyncio.timeout(HUNG):
            await daemon.task


async def test_a_connection_may_mix_inference_and_the_rest(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    body = json.dumps(ask()).encode()
    head = f"Host: localhost:{daemon.port}\r\n".encode()
    post = b"POST /v1/chat/completions HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
    get = b"GET /v1/models HTTP/1.1\r\n%b\r\n" % head
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
    for request in (post, get, post, get):
        writer.write(request)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 OK")
        length = next(line for line in answer.split(b"\r\n") if line.lower().startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
    writer.close()
    await writer.wait_closed()
