"""Models in another quantization, which a tool of their engine makes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import ollama
import pytest

from modelrunner.store import Store
from tests.api.conftest import Daemon, StartDaemon
from tests.api.test_making import CARRIED, make
from tests.waiting import HUNG

JSON = {"Accept": "application/json"}


async def quantize(daemon: Daemon, model: str = "mario", **body: Any) -> list[dict[str, Any]]:
    wanted = {"target": "small", "type": "Q4_0", **body}
    async with daemon.tcp.post(f"/models/{model}/quantize", json=wanted, headers=JSON) as answer:
        return [json.loads(line) async for line in answer.content]


def left(daemon: Daemon) -> list[Path]:
    return [path for path in Store(daemon.settings.data_dir).partial.rglob("*") if path.is_file()]


@pytest.fixture
async def daemon(start_daemon: StartDaemon) -> Daemon:
    daemon = await start_daemon(models={"smol": 0})
    await make(daemon, **CARRIED)
    return daemon


async def test_the_new_model_has_what_its_base_has_and_says_where_it_is_from(daemon: Daemon) -> None:
    lines = await quantize(daemon, type="q4_0")
    assert (lines[-1]["type"], lines[-1]["model"]) == ("success", "small")
    assert any(line.get("phase") == "quantizing" and line.get("total") == 2 for line in lines)
    async with daemon.tcp.get("/models/mario") as answer:
        base = await answer.json()
    async with daemon.tcp.get("/models/small") as answer:
        made = await answer.json()
    assert made["id"] != base["id"]
    source = {"name": "small", "from": "mario quantized to Q4_0", "version": f"Q4_0 of {base['id']}"}
    assert made["origins"] == [source]
    async with daemon.tcp.get("/models/small/show") as answer:
        shown = await answer.json()
    assert (shown["system"], shown["license"]) == ("You are Mario.", CARRIED["license"])
    assert left(daemon) == []
    assert "Using cached model" in [line["message"] for line in await quantize(daemon)]
    async with daemon.tcp.get("/updates?model=small") as answer:
        assert [update["newer"] for update in await answer.json()] == [False]


async def test_cancelled_it_leaves_nothing(daemon: Daemon) -> None:
    body = {"target": "small", "type": "Q2_K"}
    async with daemon.tcp.post("/models/mario/quantize", json=body, headers=JSON) as answer, asyncio.timeout(HUNG):
        while json.loads(await answer.content.readline()).get("total") != 2:
            pass
        assert left(daemon)
        async with daemon.unix.delete("/pulls/small") as cancelled:
            assert cancelled.status == 200
        last = json.loads((await answer.content.read()).splitlines()[-1])
    assert last["error"]["code"] == "request_cancelled"
    assert left(daemon) == []
    async with daemon.tcp.get("/models/small") as answer:
        assert answer.status == 404


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ({"type": "Q9_9"}, "bad_request", "no type here"),
        ({"type": "../x"}, "bad_request", "not a type of quantization"),
        ({"type": "Q3_K_S"}, "engine_exited", "makes no sense"),
        ({"target": "a b"}, "invalid_reference", "not a model reference"),
        ({"model": "nothing"}, "model_not_found", "nothing"),
    ],
)
async def test_what_cannot_be_done_is_said_and_leaves_nothing(
    daemon: Daemon, body: dict[str, Any], code: str, told: str
) -> None:
    error = (await quantize(daemon, **body))[-1]["error"]
    assert error["code"] == code
    assert told in error["message"]
    assert left(daemon) == []


async def test_there_has_to_be_room(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, models_quota="9KB")
    assert (await quantize(daemon, "smol"))[-1]["error"]["code"] == "insufficient_disk"


async def test_by_ollamas_client(daemon: Daemon) -> None:
    async with ollama.AsyncClient(f"http://127.0.0.1:{daemon.port}") as client:
        made = await client.create("small", from_="mario", quantize="q4_0", system="You are Luigi.")
        assert made.status == "success"
        assert (await client.show("small")).license == CARRIED["license"][0]
        with pytest.raises(ollama.ResponseError, match="no type here") as refused:
            await client.create("x", from_="mario", quantize="q9_9")
        assert refused.value.status_code == 400
    async with daemon.tcp.get("/models/small/show") as answer:
        assert (await answer.json())["system"] == "You are Luigi."
    async with daemon.tcp.get("/models/small") as answer:
        assert (await answer.json())["origins"][0]["from"] == "mario quantized to Q4_0"
    assert left(daemon) == []
