"""API keys through HTTP: who gets in where."""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import ollama
import pytest
import yarl

from modelrunner.keys.ring import Scope
from tests.api.conftest import Daemon, StartDaemon
from tests.waiting import HUNG

CHAT = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
FAMILIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": {**CHAT, "max_tokens": 4},
    "/api/chat": {**CHAT, "stream": False},
}


async def make_key(daemon: Daemon, **wanted: Any) -> str:
    async with daemon.unix.post("/keys", json={"name": "kim"} | wanted) as answer:
        assert answer.status == 201, await answer.text()
        return str((await answer.json())["text"])


async def call(daemon: Daemon, method: str, path: str, key: str = "", body: Any = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with daemon.tcp.request(method, path, json=body, headers=headers) as answer:
        return answer.status, await answer.json(content_type=None)


async def test_without_keys_nothing_changes(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    assert (await call(daemon, "POST", "/v1/chat/completions", "sk-any", CHAT))[0] == 200


async def test_with_a_key_everybody_needs_one_on_tcp(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    assert (await call(daemon, "POST", "/v1/chat/completions", body=CHAT))[0] == 200
    key = await make_key(daemon)
    for path, body in FAMILIES.items():
        for wrong in ("", "mr-wrong", key[:-1], key + "x"):
            status, told = await call(daemon, "POST", path, wrong, body)
            assert status == 401, (path, told)
            assert key not in str(told)
        assert (await call(daemon, "POST", path, key, body))[0] == 200
    async with daemon.tcp.post("/v1/messages", json=FAMILIES["/v1/messages"], headers={"x-api-key": key}) as answer:
        assert answer.status == 200
    async with daemon.unix.post("/v1/chat/completions", json=CHAT) as answer:
        assert answer.status == 200
    async with daemon.tcp.post("/v1/chat/completions", json=CHAT) as refused:
        assert refused.headers["WWW-Authenticate"] == "Bearer"


async def test_a_revoked_key_is_refused_on_an_open_connection(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    await make_key(daemon, name="other")
    key = await make_key(daemon)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        url = f"http://127.0.0.1:{daemon.port}/v1/chat/completions"
        statuses = []
        for step in range(2):
            async with session.post(url, json=CHAT, headers={"X-API-Key": key}) as answer:
                statuses.append(answer.status)
            if step == 0:
                async with daemon.unix.delete("/keys/kim") as done:
                    assert done.status == 200
    assert statuses == [200, 401]


SHAPES: dict[str, Callable[[Any], str]] = {
    "/v1/chat/completions": lambda told: str(told["error"]["type"]),
    "/v1/messages": lambda told: f"{told['type']} {told['error']['type']}",
    "/api/chat": lambda told: str(type(told["error"]).__name__),
    "/v2/rerank": lambda told: str(type(told["message"]).__name__),
}


async def test_what_the_head_decides_is_answered_before_a_body_in_the_shape_of_the_family(
    start_daemon: StartDaemon,
) -> None:
    daemon = await start_daemon()
    keys = {"wrong": "mr-wrong", "expired": await make_key(daemon, name="old", expires="0s")}
    keys["other"] = await make_key(daemon, name="other", scopes=["models"])
    found = {}
    for path in SHAPES:
        for name, key in keys.items():
            reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
            head = f"POST {path} HTTP/1.1\r\nHost: localhost:{daemon.port}\r\nX-API-Key: {key}\r\n"
            writer.write(f"{head}Content-Length: 1000\r\n\r\n".encode())  # and none of it
            async with asyncio.timeout(HUNG):
                told, _, body = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            found[path, name] = f"{told.split()[1].decode()} {SHAPES[path](json.loads(body))}"
    assert {path: [found[path, name] for name in keys] for path in SHAPES} == {
        "/v1/chat/completions": ["401 authentication_error"] * 2 + ["403 permission_error"],
        "/v1/messages": ["401 error authentication_error"] * 2 + ["403 error permission_error"],
        "/api/chat": ["401 str"] * 2 + ["403 str"],
        "/v2/rerank": ["401 str"] * 2 + ["403 str"],
    }


async def test_a_key_of_some_models(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"team/smol": 0, "other": 1})
    key = await make_key(daemon, models=["team/*"])
    assert (await call(daemon, "POST", "/v1/chat/completions", key, {**CHAT, "model": "team/smol"}))[0] == 200
    for _ in range(2):  # cold, and then with its target known
        status, told = await call(daemon, "POST", "/v1/chat/completions", key, {**CHAT, "model": "other"})
        assert (status, told["error"]["code"]) == (403, "forbidden")
    async with daemon.unix.get("/engines/ps") as answer:
        assert [runner["model_name"] for runner in await answer.json()] == ["team/smol"]


async def test_limits_are_exact_and_told(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    key, free = await make_key(daemon, requests_per_minute=2), await make_key(daemon, name="free")
    asked = [call(daemon, "POST", "/v1/chat/completions", key, CHAT) for _ in range(30)]
    free_asked = [call(daemon, "POST", "/v1/chat/completions", free, CHAT) for _ in range(10)]
    statuses = [status for status, _ in await asyncio.gather(*asked, *free_asked)]
    assert sorted(statuses[:30]) == [200] * 2 + [429] * 28
    assert statuses[30:] == [200] * 10
    async with daemon.tcp.post("/v1/chat/completions", json=CHAT, headers={"X-API-Key": key}) as refused:
        assert refused.status == 429
        assert 1 <= int(refused.headers["Retry-After"]) <= 30
        assert (await refused.json())["error"]["code"] == "rate_limited"


async def test_tokens_are_counted_by_the_engine(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, telemetry=False)
    key = await make_key(daemon, tokens_per_minute=12)
    statuses = [(await call(daemon, "POST", "/v1/chat/completions", key, CHAT))[0] for _ in range(3)]
    assert statuses == [200, 200, 429]  # 3 of the prompt and 8 of the answer each


SEVERAL: dict[str, tuple[str, dict[str, Any], int]] = {
    "copies": ("/v1/chat/completions", {**CHAT, "n": 4}, 3),
    "prompts": ("/v1/completions", {"model": "smol", "prompt": ["a", "b", "c"]}, 9),
    "copies of prompts": ("/v1/completions", {"model": "smol", "prompt": ["a", "b"], "n": 2}, 6),
}


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(("path", "body", "prompts"), SEVERAL.values(), ids=SEVERAL)
async def test_every_choice_and_every_prompt_counts(
    start_daemon: StartDaemon, streamed: bool, path: str, body: dict[str, Any], prompts: int
) -> None:
    """For an engine that counts each choice by itself, as llama.cpp does."""
    daemon = await start_daemon(models={"smol": 0})
    wanted = {"stream": True, "stream_options": {"include_usage": True}}
    endpoint = replace(daemon.backend.endpoints[path], as_stream=wanted)
    daemon.backend.endpoints = {**daemon.backend.endpoints, path: endpoint}
    choices = body.get("n", 1) * len(body.get("prompt", "x"))
    key = await make_key(daemon, tokens_per_minute=12)  # one choice has 11: those of all are a debt for minutes
    headers = {"X-API-Key": key}
    async with daemon.tcp.post(path, json={**body, **(wanted if streamed else {})}, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        text = await answer.text()
    lines = text.split("data: ") if streamed else [text]
    told = [found["usage"] for line in lines if line.startswith("{") and (found := json.loads(line)).get("usage")]
    assert [(used["prompt_tokens"], used["completion_tokens"]) for used in told] == [(prompts, 8 * choices)]
    async with daemon.unix.get("/usage?by=key") as found:
        [usage] = await found.json()
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompts, 8 * choices)
    assert (await call(daemon, "POST", path, key, body))[0] == 429


async def test_a_stream_that_its_client_left_costs_its_prompt(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--rate=200", "--tokens=100000")
    key = await make_key(daemon, tokens_per_minute=1000)
    body = {**CHAT, "stream": True, "messages": [{"role": "user", "content": "word " * 1000}]}
    async with daemon.unix.get("/engines/requests", headers={"Accept": "text/event-stream"}) as feed:
        async with daemon.tcp.post("/v1/chat/completions", json=body, headers={"X-API-Key": key}) as answer:
            await answer.content.readline()
            answer.close()
        assert await feed.content.readline() == b"event: request\n"
    assert (await call(daemon, "POST", "/v1/chat/completions", key, CHAT))[0] == 429
    async with daemon.unix.get("/usage?by=key") as told:
        [usage] = await told.json()
    assert usage["prompt_tokens"] == len(json.dumps(body)) // 4


async def test_requests_under_way_count_with_their_prompts(start_daemon: StartDaemon) -> None:
    """However many come at once: those that are let in have prompts of as many tokens as the limit, and one more."""
    daemon = await start_daemon(models={"smol": 0})
    key = await make_key(daemon, tokens_per_minute=20)
    asked = [call(daemon, "POST", "/v1/chat/completions", key, CHAT) for _ in range(40)]
    found = await asyncio.gather(*asked)
    size = len(json.dumps(CHAT)) // 4
    assert sorted(status for status, _ in found) == [200] * -(-20 // size) + [429] * (40 - -(-20 // size))
    roomy = await make_key(daemon, name="roomy", tokens_per_minute=1000)
    for _ in range(12):  # what they had reserved is free again: only 11 tokens each are spent
        assert [(await call(daemon, "POST", "/v1/chat/completions", roomy, CHAT))[0] for _ in range(5)] == [200] * 5


async def test_what_one_request_of_a_key_may_take(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    key = await make_key(daemon, max_tokens=3, max_seconds=600)
    for path, body in FAMILIES.items():
        status, told = await call(daemon, "POST", path, key, body)
        assert (status, "1 2 3 4" in str(told)) == (200, False), told
    _, told = await call(daemon, "POST", "/v1/chat/completions", key, CHAT)
    assert told["usage"]["completion_tokens"] == 3
    async with daemon.unix.get("/keys") as answer:
        [listed] = await answer.json()
    assert (listed["max_tokens"], listed["max_seconds"]) == (3, 600)
    slow = await make_key(daemon, name="slow", max_seconds=0.2)
    daemon.backend.knobs = ("--rate=5", "--tokens=100000")
    async with daemon.unix.post("/engines/unload", json={"all": True}) as answer:
        assert answer.status == 200
    status, told = await call(daemon, "POST", "/v1/chat/completions", slow, CHAT)
    assert (status, told["error"]["code"]) == (504, "request_too_long")


async def test_what_one_request_of_a_model_may_take(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    assert (await call(daemon, "POST", "/v1/chat/completions", body=CHAT))[1]["usage"]["completion_tokens"] == 8
    runners = await call(daemon, "GET", "/engines/ps")
    async with daemon.unix.post("/engines/_configure", json={"model": "smol", "max-tokens": 2}) as answer:
        assert answer.status == 202, await answer.text()
    assert (await call(daemon, "POST", "/v1/chat/completions", body=CHAT))[1]["usage"]["completion_tokens"] == 2
    assert (await call(daemon, "GET", "/engines/ps"))[1][0]["pid"] == runners[1][0]["pid"]
    for wrong in ({"max-tokens": 0}, {"max-seconds": 0}, {"max-seconds": "x"}):
        async with daemon.unix.post("/engines/_configure", json={"model": "smol", **wrong}) as answer:
            assert answer.status == 400


async def test_what_one_request_of_a_daemon_may_take(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """The smallest limit of daemon, model and key holds, and a reload changes that of the daemon."""
    file = tmp_path / "config.toml"
    file.write_text("max_seconds = 0.2")
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--rate=5", "--tokens=100000")
    patient = await make_key(daemon, max_seconds=600)
    async with daemon.unix.post("/engines/_configure", json={"model": "smol", "max-seconds": 600}) as answer:
        assert answer.status == 202, await answer.text()
    for path, body in FAMILIES.items():
        status, told = await call(daemon, "POST", path, patient, body)
        assert (status, "0.2 s" in str(told)) == (504, True), told
    status, told = await call(daemon, "POST", "/v1/chat/completions", patient, CHAT)
    assert (status, told["error"]["code"]) == (504, "request_too_long")
    file.write_text("max_seconds = 500")
    async with daemon.unix.post("/engines/reload") as answer:
        assert answer.status == 200
    hasty = await make_key(daemon, name="hasty", max_seconds=0.3)
    status, told = await call(daemon, "POST", "/v1/chat/completions", hasty, CHAT)
    assert (status, "0.3 s" in str(told)) == (504, True), told
    async with daemon.unix.post("/engines/_configure", json={"model": "smol", "max-seconds": 0.1}) as answer:
        assert answer.status == 202, await answer.text()
    status, told = await call(daemon, "POST", "/v1/chat/completions", hasty, CHAT)
    assert (status, "0.1 s" in str(told)) == (504, True), told


async def test_limits_of_an_address(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """They hold for the clients of TCP, with a key or without, and a reload forgets nothing."""
    file = tmp_path / "config.toml"
    file.write_text("address_requests_per_minute = 2")
    daemon = await start_daemon(models={"smol": 0})
    asked = [call(daemon, "POST", "/v1/chat/completions", "", CHAT) for _ in range(20)]
    statuses = [status for status, _ in await asyncio.gather(*asked)]
    assert sorted(statuses) == [200] * 2 + [429] * 18
    _, told = await call(daemon, "POST", "/v1/chat/completions", "", CHAT)
    assert told["error"]["message"] == "the address 127.0.0.1 may send 2 requests a minute"
    for text in ("address_requests_per_minute = 2\nkeep_alive = '9m'", "address_requests_per_minute = 1"):
        file.write_text(text)
        async with daemon.unix.post("/engines/reload") as answer:
            assert [change["effect"] for change in (await answer.json())["changes"]] == ["holds at once"] * (
                2 if "= 1" in text else 1
            )
        assert (await call(daemon, "POST", "/v1/chat/completions", "", CHAT))[0] == 429
    async with daemon.unix.post("/v1/chat/completions", json=CHAT) as answer:
        assert answer.status == 200
    key = await make_key(daemon)
    assert (await call(daemon, "POST", "/v1/chat/completions", key, CHAT))[0] == 429
    assert (await call(daemon, "GET", "/v1/models", key))[0] == 429


async def test_usage_by_key(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0})
    key = await make_key(daemon, scopes=["inference", "admin"])
    await call(daemon, "POST", "/v1/chat/completions", key, CHAT)
    _, usage = await call(daemon, "GET", "/usage?by=key", key)
    assert [(each["name"], each["requests"]) for each in usage] == [("kim", 1)]


@pytest.mark.parametrize("scope", list(Scope))
async def test_each_scope_opens_its_routes(start_daemon: StartDaemon, scope: Scope) -> None:
    daemon = await start_daemon(models={"smol": 0})
    key = await make_key(daemon, scopes=[scope])
    expected = {
        Scope.INFERENCE: [("GET", "/v1/models"), ("GET", "/models"), ("GET", "/api/tags"), ("GET", "/version")],
        Scope.MODELS: [("POST", "/models/smol/tag?repo=x"), ("DELETE", "/models/nope"), ("GET", "/engines/df")],
        Scope.ADMIN: [("GET", "/engines/ps"), ("GET", "/keys"), ("GET", "/logs?lines=0"), ("POST", "/nowhere")],
    }
    for needed, routes in expected.items():
        for method, path in routes:
            headers = {"X-API-Key": key}
            async with daemon.tcp.request(method, path, headers=headers) as answer:
                assert (answer.status == 403) == (needed is not scope), (method, path, answer.status)
    for path in ("/health", "/ready"):
        assert (await call(daemon, "GET", path))[0] == 200


@pytest.mark.parametrize("command", [["run", "smol", "hi"], ["run", "smol", "hi", "--json"], ["list"], ["fit", "smol"]])
async def test_the_command_line_asks_with_a_key_of_the_scope_inference(
    start_daemon: StartDaemon, tmp_path: Path, command: list[str]
) -> None:
    daemon = await start_daemon(models={"smol": 0})
    there = {"MODELRUNNER_HOST": f"http://127.0.0.1:{daemon.port}", "MODELRUNNER_API_KEY": await make_key(daemon)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "modelrunner", *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **there},
    )
    out, err = await process.communicate()
    assert (process.returncode, err.decode()) == (0, "")
    assert out


async def test_the_client_of_ollama_sends_the_key_of_its_environment(
    start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = await start_daemon(models={"smol": 0})
    monkeypatch.setenv("OLLAMA_API_KEY", await make_key(daemon))
    async with ollama.AsyncClient(f"http://127.0.0.1:{daemon.port}") as client:
        assert (await client.chat("smol", [{"role": "user", "content": "hi"}])).message.content


async def test_a_preflight_needs_no_key(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"smol": 0}, origins=("http://page.example",))
    await make_key(daemon)
    headers = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    async with daemon.tcp.options("/v1/chat/completions", headers=headers) as answer:
        assert answer.status in (200, 204)


async def test_the_last_key_of_an_open_daemon_stays(start_daemon: StartDaemon) -> None:
    first = await start_daemon()
    await make_key(first)
    async with first.unix.post("/shutdown"):
        pass
    await first.task
    second = await start_daemon(listen="0.0.0.0:0")
    for query in ("", "?open=true"):
        async with second.unix.delete(f"/keys/kim{query}") as answer:
            assert answer.status == 409


@pytest.mark.parametrize("expires", [None, "0s"])
async def test_the_last_key_of_a_daemon_on_loopback_opens_it_only_if_asked_to(
    start_daemon: StartDaemon, expires: str | None
) -> None:
    daemon = await start_daemon(models={"smol": 0})
    key = await make_key(daemon, expires=expires)
    async with daemon.unix.delete("/keys/kim") as answer:
        assert answer.status == 409
        assert "may do everything" in (await answer.json())["error"]["message"]
    for text in ("", "mr-wrong"):
        assert (await call(daemon, "GET", "/v1/models", text))[0] == 401
        assert (await call(daemon, "POST", "/keys", text, {"name": "other", "scopes": ["admin"]}))[0] == 401
    assert (await call(daemon, "GET", "/v1/models", key))[0] == (401 if expires else 200)
    async with daemon.unix.delete("/keys/kim?open=true") as answer:
        assert answer.status == 200
    assert (await call(daemon, "POST", "/v1/chat/completions", body=CHAT))[0] == 200


async def test_without_tcp_the_last_key_opens_nothing(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(listen="")
    await make_key(daemon)
    async with daemon.unix.delete("/keys/kim") as answer:
        assert answer.status == 200


async def test_an_encoded_slash_opens_nothing(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    key = await make_key(daemon, scopes=["models"])
    url = yarl.URL(f"http://127.0.0.1:{daemon.port}/engines/requests/v1%2Fmodels%2Fx/cancel", encoded=True)
    async with aiohttp.request("POST", url, headers={"X-API-Key": key}) as answer:
        assert answer.status == 403


@pytest.mark.parametrize("useless", [{"scopes": []}, {"models": [""]}])
async def test_a_key_of_no_use_is_not_made(start_daemon: StartDaemon, useless: dict[str, Any]) -> None:
    daemon = await start_daemon()
    async with daemon.unix.post("/keys", json={"name": "kim", **useless}) as answer:
        assert answer.status == 400
        [field] = useless
        assert (await answer.json())["error"]["param"] == field
    async with daemon.unix.get("/keys") as answer:
        assert await answer.json() == []


async def test_an_expiry_beyond_the_calendar(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    async with daemon.unix.post("/keys", json={"name": "kim", "expires": "999999w"}) as answer:
        assert answer.status == 400
    async with daemon.unix.get("/keys") as answer:
        assert await answer.json() == []
