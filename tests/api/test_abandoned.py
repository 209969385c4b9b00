"""Requests whose clients leave while the engine works on, whatever it was asked: what the daemon says of the runner,
and what it does with it."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from modelrunner.store import Store
from tests.api.conftest import Daemon, StartDaemon
from tests.store.samples import add_model
from tests.waiting import HUNG

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
KINDS = [
    pytest.param(CHAT, {"messages": MESSAGES, "stream": True}, id="stream"),
    pytest.param(CHAT, {"messages": MESSAGES}, id="chat"),
    pytest.param("/v1/completions", {"prompt": "x"}, id="completion"),
    pytest.param("/v1/messages", {"messages": MESSAGES}, id="messages"),
    pytest.param("/v1/messages/count_tokens", {"messages": MESSAGES}, id="count_tokens"),
    pytest.param("/v1/embeddings", {"input": "x"}, id="embeddings"),
    pytest.param("/v1/rerank", {"query": "x", "documents": ["x"]}, id="rerank"),
    pytest.param("/v1/tokenize", {"prompt": "x"}, id="tokenize"),
]


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The engine works on each request until this file exists."""
    return tmp_path / "gate"


@pytest.fixture
async def daemon(start_daemon: StartDaemon, gate: Path, tmp_path: Path) -> Daemon:
    """Its engine has one sequence, so its runner gives out one lease."""
    data = tmp_path / "data_dir"
    data.mkdir()
    ranks = {"bert.pooling_type": 4}
    add_model(Store(data), "ranker", 1, architecture="bert", metadata=ranks)
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--hold", str(gate), "--record", str(tmp_path / "record"))
    return daemon


def model_for(path: str) -> str:
    return "ranker" if path == "/v1/rerank" else "smol"


async def send(daemon: Daemon, path: str, body: dict[str, Any]) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_unix_connection(str(daemon.settings.runtime_dir / "modelrunner.sock"))
    data = json.dumps({"model": model_for(path), **body}).encode()
    writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(data), data))
    return writer


async def send_and_leave(daemon: Daemon, folder: Path, count: int, path: str = CHAT, **body: Any) -> None:
    """Clients that leave once the engine has their requests."""
    record = folder / "record"
    writers = [await send(daemon, path, body or {"messages": MESSAGES}) for _ in range(count)]
    await until(lambda: _holds(record.exists() and record.read_text().count('"POST"') >= count))
    for writer in writers:
        writer.close()
        await writer.wait_closed()


async def _holds(value: bool) -> bool:
    return value


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(HUNG):
        while not await condition():  # noqa: ASYNC110  what is watched has no event
            await asyncio.sleep(0.005)


async def get(daemon: Daemon, path: str) -> Any:
    async with daemon.unix.get(path) as answer:
        return await answer.json()


async def runner(daemon: Daemon) -> dict[str, Any]:
    (found,) = await get(daemon, "/engines/ps")
    return dict(found)


@pytest.mark.parametrize(("path", "body"), KINDS)
async def test_the_runner_is_in_use_until_the_engine_is_done(
    daemon: Daemon, gate: Path, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    await send_and_leave(daemon, tmp_path, 1, path, **body)
    mode = {"/v1/embeddings": "embedding", "/v1/rerank": "reranking"}.get(path, "completion")
    model = model_for(path)
    why = f"/engines/why?model={model}&mode={mode}"
    await until(lambda: _says(daemon, why, "clients have left"))
    found = await runner(daemon)
    assert (found["leases"], found["in_use"]) == (1, True)
    assert (await get(daemon, why))["waiting_for"] == "slot"
    gate.touch()
    await until(lambda: _has_leases(daemon, 0))
    assert (await get(daemon, why))["reason"] == f"{model} is loaded and answers at once"


async def _says(daemon: Daemon, path: str, words: str) -> bool:
    return words in str((await get(daemon, path))["reason"])


async def _has_leases(daemon: Daemon, count: int) -> bool:
    return bool((await runner(daemon))["leases"] == count)


async def test_the_next_request_queues_until_a_place_is_free(daemon: Daemon, gate: Path, tmp_path: Path) -> None:
    await send_and_leave(daemon, tmp_path, 1)
    await until(lambda: _says(daemon, "/engines/why?model=smol", "clients have left"))
    second = asyncio.create_task(post(daemon))
    await until(lambda: _queues(daemon, 1))
    assert (await runner(daemon))["leases"] == 1
    gate.touch()
    assert await second == 200


async def post(daemon: Daemon) -> int:
    async with daemon.unix.post(CHAT, json={"model": "smol", "messages": MESSAGES}) as answer:
        await answer.read()
        return answer.status


async def _queues(daemon: Daemon, count: int) -> bool:
    return bool((await runner(daemon))["queued"] == count)


async def test_nobody_waits_for_them_when_the_model_is_unloaded(daemon: Daemon, tmp_path: Path) -> None:
    """Unloading waits for requests, for as long as `drain_limit`, and reports a runner that is still there."""
    await send_and_leave(daemon, tmp_path, 1)
    await until(lambda: _says(daemon, "/engines/why?model=smol", "clients have left"))
    async with daemon.unix.post("/engines/unload", json={"models": ["smol"]}) as answer:
        told = await answer.json()
    assert told["unloaded_runners"] == 1, told
    assert await get(daemon, "/engines/ps") == []


async def test_an_engine_that_hangs_with_them_is_replaced(
    start_daemon: StartDaemon, gate: Path, tmp_path: Path
) -> None:
    daemon = await start_daemon(models={"smol": 0}, wedge_limit=0.5)
    daemon.backend.knobs = ("--hold", str(gate), "--record", str(tmp_path / "record"))
    await send_and_leave(daemon, tmp_path, 1)
    await until(lambda: _says(daemon, "/engines/why?model=smol", "clients have left"))
    daemon.backend.knobs = ()
    os.kill((await runner(daemon))["pid"], signal.SIGSTOP)
    async with asyncio.timeout(HUNG):
        assert await post(daemon) == 200
    assert daemon.backend.runs == 2
