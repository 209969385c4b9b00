"""Requests of the control plane: the limits of keys and addresses hold for them, and each is told once."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from modelrunner.gateway.request.pipeline import IS_OPEN
from tests.api.conftest import Daemon, StartDaemon
from tests.api.test_keys import CHAT, call, make_key
from tests.api.test_telemetry import metrics, total
from tests.gateway.fakes import until
from tests.waiting import HUNG

EXECUTE = {"name": "x__y", "arguments": {}}


async def test_the_limits_of_a_key_hold_for_what_asks_no_model(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    key = await make_key(daemon, requests_per_minute=2)
    asked = [
        *(("GET", "/v1/models", None), ("POST", "/v1/tools/execute", EXECUTE)),
        *(("GET", "/v1/models/nothing", None), ("GET", "/v1/batches", None)),
    ]
    statuses = [(await call(daemon, method, path, key, body))[0] for method, path, body in asked]
    assert [status == 429 for status in statuses] == [False, False, True, True]
    for path, shape in (("/v1/models", dict), ("/api/tags", str)):
        async with daemon.tcp.get(path, headers={"X-API-Key": key}) as refused:
            assert refused.status == 429
            assert 1 <= int(refused.headers["Retry-After"]) <= 30
            assert type((await refused.json())["error"]) is shape
    assert (await call(daemon, "POST", "/v1/chat/completions", key, CHAT))[0] == 429


async def test_what_is_free(start_daemon: StartDaemon) -> None:
    """Open paths, scrapes, preflights, and what a key refuses."""
    daemon = await start_daemon(origins=("http://page.example",), address_requests_per_minute=1)
    async with daemon.tcp.get("/metrics") as answer:
        assert answer.status == 200
    key = await make_key(daemon)
    for path in ("/v1/responses/resp_1", "/v1/streams/1", "/v1/batches/batch_1", "/engines/v1/batches/batch_1"):
        assert (await call(daemon, "GET", path, key))[0] == 404
    for path in ("/", "/health", "/ready", "/openapi.json", "/docs", "/ui"):
        assert IS_OPEN(path)
        async with daemon.tcp.get(path) as answer:
            assert answer.status in (200, 503), path
    headers = {"Origin": "http://page.example", "Access-Control-Request-Method": "GET"}
    async with daemon.tcp.options("/v1/models", headers=headers) as answer:
        assert answer.status == 204
    assert [(await call(daemon, "GET", "/keys", each))[0] for each in ("", "mr-wrong", key)] == [401, 401, 403]
    assert [(await call(daemon, "GET", "/v1/models", key))[0] for _ in range(2)] == [200, 429]


async def test_the_limits_of_an_address(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(address_requests_per_minute=2)
    assert [(await call(daemon, "GET", "/v1/models"))[0] for _ in range(3)] == [200, 200, 429]
    assert (await call(daemon, "POST", "/v1/files"))[0] == 429
    async with daemon.unix.get("/v1/models") as answer:
        assert answer.status == 200


async def test_what_is_followed_takes_nobodys_place(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Under way are requests to models alone, for the control plane too."""
    daemon = await start_daemon(models={"smol": 0}, address_concurrency=1)
    key = await make_key(daemon, concurrency=1, scopes=["inference", "admin"])
    gate = tmp_path / "gate"
    daemon.backend.knobs = ("--gate", str(gate))
    async with daemon.tcp.get("/engines/events?since=0", headers={"X-API-Key": key}) as events:
        assert events.status == 200
        asking = asyncio.create_task(call(daemon, "POST", "/v1/chat/completions", key, CHAT))
        await events.content.readuntil(b"event: load")
        assert [(await call(daemon, "GET", "/v1/models", key))[0] for _ in range(2)] == [200, 200]
        assert (await call(daemon, "POST", "/v1/chat/completions", key, CHAT))[0] == 429
        gate.touch()
        assert (await asking)[0] == 200
        events.close()


async def test_tokens_are_no_matter_of_what_asks_no_model(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    key = await make_key(daemon, tokens_per_minute=5)
    assert [(await call(daemon, "POST", "/v1/chat/completions", key, CHAT))[0] for _ in range(2)] == [200, 429]
    assert (await call(daemon, "GET", "/v1/models", key))[0] == 200


def told_of(daemon: Daemon, *ids: str) -> list[dict[str, Any]]:
    """The lines of the access log about these requests."""
    path = daemon.settings.data_dir / "logs" / "access.log"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["request_id"] in ids]


@pytest.fixture
async def daemon(start_daemon: StartDaemon) -> Daemon:
    return await start_daemon(models={"smol": 0}, access_log="json")


async def test_each_is_told(daemon: Daemon) -> None:
    key = await make_key(daemon, requests_per_minute=3)
    of_key = {"X-API-Key": key}
    asked: list[tuple[str, str, dict[str, str]]] = [
        ("GET", "/keys", of_key),
        ("GET", "/v1/models", of_key),
        ("GET", "/v1/models/nothing%2Fhere", of_key),
        ("POST", "/v1/files", of_key),
        ("GET", "/v1/models", of_key),
        ("GET", "/keys", {}),
        ("GET", "/made/up/1", of_key),
        ("GET", "/health", {}),
    ]
    ids = [f"r{number}" for number in range(len(asked))]
    for id, (method, path, head) in zip(ids, asked, strict=True):
        async with daemon.tcp.request(method, path, headers={"X-Request-ID": id, **head}) as answer:
            await answer.read()
    for path in ("/keys/x", "/made/up/2"):
        ids.append(f"u{path[1:3]}")
        async with daemon.unix.delete(path, headers={"X-Request-ID": ids[-1]}) as answer:
            await answer.read()
    await until(lambda: len(told_of(daemon, *ids)) >= len(ids))
    found = told_of(daemon, *ids)
    assert [(one["route"], one["status"], one["error"], one["key"]) for one in found] == [
        ("GET /keys", 403, "forbidden", "kim"),
        ("GET /v1/models", 200, "", "kim"),
        ("GET /v1/models/{ref}", 404, "model_not_found", "kim"),
        ("POST /v1/files", 400, "bad_request", "kim"),
        ("GET /v1/models", 429, "rate_limited", "kim"),
        ("/keys", 401, "unauthorized", ""),
        ("GET unknown", 403, "forbidden", "kim"),
        ("GET /health", 200, "", ""),
        ("DELETE /keys/{name}", 404, "key_not_found", ""),
        ("DELETE unknown", 404, "route_not_found", ""),
    ]
    assert {one["family"] for one in found} == {"control"}
    assert [one["peer"] for one in found] == ["127.0.0.1"] * 8 + [""] * 2
    assert all(one["duration"] > 0 for one in found if one["status"] != 401)


async def test_records_of_models_stay_their_own(daemon: Daemon) -> None:
    """Metrics count both; the last requests, the usage and the times are those of models."""
    async with daemon.unix.post("/v1/chat/completions", json=CHAT) as answer:
        await answer.read()
    async with daemon.unix.get("/v1/models") as answer:
        await answer.read()
    found = await metrics(daemon)
    assert total(found, "modelrunner_requests_total", family="control", model="unknown", status="200") >= 1
    assert not any(dict(labels).get("family") == "control" for name, labels in found if name.startswith("gen_ai"))
    async with daemon.unix.get("/engines/requests") as answer:
        assert [one["route"] for one in await answer.json()] == ["/v1/chat/completions"]


async def test_who_left_and_a_body_that_is_refused_are_told_once(daemon: Daemon) -> None:
    async with daemon.unix.get("/engines/events", headers={"X-Request-ID": "left"}) as events:
        events.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
    head = f"POST /v1/files HTTP/1.1\r\nHost: localhost:{daemon.port}\r\nX-Request-ID: broken\r\n"
    writer.write(f"{head}Content-Type: multipart/form-data; boundary=x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    await writer.drain()
    async with daemon.unix.get("/version") as answer:  # the handler waits for the body
        await answer.read()
    writer.write(b"nonsense\r\n")
    async with asyncio.timeout(HUNG):
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()
    await until(lambda: len(told_of(daemon, "left", "broken")) >= 2)
    async with daemon.unix.get("/metrics", headers={"X-Request-ID": "later"}) as answer:
        await answer.read()
    await until(lambda: bool(told_of(daemon, "later")))
    found = told_of(daemon, "left", "broken")
    assert sorted((one["request_id"], one["status"], one["error"]) for one in found) == [
        ("broken", 400, "bad_request"),
        ("left", 499, ""),
    ]
