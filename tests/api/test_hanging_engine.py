"""An engine that hangs while it serves: the daemon replaces it, and the requests hardly notice."""

import asyncio
import os
import signal
from typing import Any

import aiohttp

from tests.api.conftest import Daemon, StartDaemon
from tests.waiting import HUNG

CHAT = "/v1/chat/completions"
LIMIT = 0.5


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "smol", "messages": [{"role": "user", "content": "hello"}], **more}


async def chat(client: aiohttp.ClientSession) -> int:
    async with client.post(CHAT, json=ask()) as answer:
        await answer.read()
        return answer.status


async def pid(daemon: Daemon) -> int:
    async with daemon.unix.get("/engines/ps") as answer:
        (runner,) = await answer.json()
    return int(runner["pid"])


async def test_requests_without_a_byte_are_answered_by_the_next_engine(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, wedge_limit=LIMIT)
    assert await chat(daemon.unix) == 200
    os.kill(stopped := await pid(daemon), signal.SIGSTOP)
    async with asyncio.timeout(HUNG):
        assert await asyncio.gather(*(chat(client) for client in (daemon.unix, daemon.tcp, daemon.unix))) == [200] * 3
    assert await pid(daemon) != stopped
    assert daemon.backend.runs == 2


async def test_a_stream_gets_an_error_event_and_no_end(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, wedge_limit=LIMIT)
    daemon.backend.knobs = ("--hang=3",)  # not at a word from here: a slow engine may be gone before it comes
    async with daemon.unix.post(CHAT, json=ask(stream=True)) as answer, asyncio.timeout(HUNG):
        told = await answer.read()
    assert b"w2 " in told
    assert b"event: error" in told
    assert b"stopped answering" in told
    assert b"[DONE]" not in told
