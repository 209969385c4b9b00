"""A key of some models neither sees nor changes another one: no route that names a model forgets to ask."""

import io
import json
from typing import Any

import aiohttp
import pytest
import yarl

from modelrunner.keys.ring import Scope
from modelrunner.types import RequiredMemory
from tests.api.conftest import Daemon, StartDaemon
from tests.api.test_keys import CHAT, call, make_key
from tests.api.test_openapi import NAMES, SAMPLES, document_of
from tests.api.test_scopes import every_route, routes

NAMES_NO_MODEL = """
    GET /anthropic/v1/models
    GET /api/ps
    GET /api/tags
    GET /api/version
    HEAD /api/blobs/{digest}
    POST /api/blobs/{digest}
    GET /engines/df
    GET /engines/requests/{id}
    GET /engines/v1/audio/voices
    GET /engines/v1/batches
    POST /engines/v1/batches
    GET /engines/v1/batches/{id}
    POST /engines/v1/batches/{id}/cancel
    GET /engines/v1/files
    POST /engines/v1/files
    DELETE /engines/v1/files/{id}
    GET /engines/v1/files/{id}
    GET /engines/v1/files/{id}/content
    GET /engines/v1/models
    POST /engines/v1/images/edits
    POST /engines/v1/images/generations
    POST /engines/v1/images/variations
    POST /engines/v1/moderations
    GET /engines/v1/realtime
    DELETE /engines/v1/responses/{id}
    GET /engines/v1/responses/{id}
    POST /engines/v1/responses/compact
    POST /engines/v1/responses/input_tokens
    POST /engines/v1/responses/{id}/cancel
    GET /engines/v1/responses/{id}/input_items
    GET /engines/{backend}/v1/models
    GET /models
    GET /models/import
    POST /models/prune
    GET /models/search
    GET /pulls
    GET /v1/audio/voices
    GET /v1/batches
    POST /v1/batches
    GET /v1/batches/{id}
    POST /v1/batches/{id}/cancel
    GET /v1/files
    POST /v1/files
    DELETE /v1/files/{id}
    GET /v1/files/{id}
    GET /v1/files/{id}/content
    GET /v1/models
    POST /v1/images/edits
    POST /v1/images/generations
    POST /v1/images/variations
    POST /v1/moderations
    GET /v1/realtime
    DELETE /v1/responses/{id}
    GET /v1/responses/{id}
    POST /v1/responses/compact
    POST /v1/responses/input_tokens
    POST /v1/responses/{id}/cancel
    GET /v1/responses/{id}/input_items
    DELETE /v1/streams/{id}
    GET /v1/tools
    GET /version
"""
OTHER_NAMES = {"POST /models/import model", "POST /models/import name", "POST /v1/tools/execute name"} | {
    "GET /v1/streams/{id} from"
}
"""Those of models of other programs, which only the Unix socket shows, of tools, and of a place."""
MODELS = {"ref", "runner", "model", "models", "from", "source", "target", "destination", "name", "repo"}
"""What the places in paths, queries and bodies are called where models are named."""


def places_of(operation: dict[str, Any], schemas: dict[str, Any]) -> tuple[set[str], dict[str, Any]]:
    """Where the operation may name a model, and the fields of its body."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {"schema": {}})
    fields = schemas.get(content["schema"].get("$ref", "").rpartition("/")[2], {}).get("properties", {})
    return MODELS & ({parameter["name"] for parameter in operation["parameters"]} | fields.keys()), fields


async def ask(
    daemon: Daemon, key: str, route: str, operation: dict[str, Any], fields: dict[str, Any], named: dict[str, str]
) -> tuple[int, str]:
    """Asks the route about the models `named`, by place."""
    method, pattern = route.split()
    path = pattern.replace("{ref}", named.get("ref", "").replace("/", "%2F")).replace("{backend}", "fake")
    path = path.replace("{runner}", named.get("runner", ""))
    queries = [parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "query"]
    query = {name: named[name] for name in queries if name in named}
    samples = SAMPLES | {"type": "Q4_K_M"} | named | ({"models": [named["models"]]} if "models" in named else {})
    headers = {"X-API-Key": key, "Content-Type": next(iter(operation.get("requestBody", {}).get("content", {})), "")}
    if path.endswith("/responses"):
        del samples["prompt"]
    body = json.dumps({name: samples[name] for name in fields if name in samples}) if fields else ""
    url = yarl.URL(f"http://127.0.0.1:{daemon.port}{NAMES.sub('none', path)}", encoded=True).update_query(query)
    async with aiohttp.request(method, url, data=body.encode(), headers=headers) as answer:
        return answer.status, await answer.text()


async def test_a_key_of_some_models_reaches_no_other(start_daemon: StartDaemon, subtests: pytest.Subtests) -> None:
    """In every place of every route that may name a model, while the others name one that the key may use."""
    daemon = await start_daemon(models={"secret/other": 0, "team/mine": 1})
    async with daemon.unix.post("/v1/chat/completions", json=CHAT | {"model": "secret/other"}) as answer:
        assert answer.status == 200  # it is loaded now
    async with daemon.unix.get("/engines/ps") as answer:
        [runner] = await answer.json()
    key = await make_key(daemon, scopes=["inference", "models"], models=["team/*"])
    document = await document_of(daemon)
    schemas, nameless = document["components"]["schemas"], set()
    for route, scope in every_route():
        if scope is Scope.ADMIN:
            continue
        method, path = route.split()
        operation = document["paths"][path][method.lower()]
        places, fields = places_of(operation, schemas)
        if not places:
            nameless.add(route)
        for place in sorted(places) or [""]:
            if f"{route} {place}" in OTHER_NAMES:
                continue
            with subtests.test(route, place=place):
                allowed = places - ({"model"} if place == "name" and path.startswith("/api/") else set())
                named = dict.fromkeys(allowed, "team/mine") | ({place: "secret/other"} if place else {})
                if "runner" in places:
                    named |= {"runner": runner["id"], "model": "secret/other"}
                status, told = await ask(daemon, key, route, operation, fields, named)
                if place:
                    assert (status, "may not use" in told) == (403, True), told
                else:
                    assert "secret/other" not in told
    assert nameless == set(routes(NAMES_NO_MODEL))


async def test_what_would_make_room_is_not_named(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"secret/other": 0, "team/mine": 1, "team/old": 2}, memory_budget=100)
    daemon.backend.memory = RequiredMemory(60)
    key = await team_key(daemon)
    for loaded, seen in (("secret/other", []), ("team/old", ["team/old"])):
        async with daemon.unix.post("/v1/chat/completions", json=CHAT | {"model": loaded}) as answer:
            assert answer.status == 200
        status, told = await call(daemon, "GET", "/models/team%2Fmine/fit", key)
        assert (status, told["fits"], told["would_evict"]) == (200, "after_eviction", seen)
        assert "secret" not in told["reason"]


async def names_of(daemon: Daemon) -> list[str]:
    async with daemon.unix.get("/v1/models") as answer:
        return sorted(model["id"] for model in (await answer.json())["data"])


async def team_key(daemon: Daemon) -> str:
    return await make_key(daemon, scopes=["inference", "models"], models=["team/*"])


async def test_a_key_of_some_models_does_with_these_what_it_may(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"secret/other": 0, "team/mine": 1})
    key = await team_key(daemon)
    for path in ("/models/team%2Fmine", "/models/team%2Fmine/show", "/models/team%2Fmine/fit", "/models/mine"):
        assert (await call(daemon, "GET", path, key))[0] == 200, path
    _, listed = await call(daemon, "GET", "/models", key)
    assert [model["tags"] for model in listed] == [["team/mine"]]
    _, listed = await call(daemon, "GET", "/api/tags", key)
    assert [model["name"] for model in listed["models"]] == ["team/mine:latest"]
    _, used = await call(daemon, "GET", "/engines/df", key)
    assert [model["tags"] for model in used["models"]] == [["team/mine"]]
    assert (await call(daemon, "POST", "/models/team%2Fmine/tag?repo=team/too", key))[0] == 201
    assert (await call(daemon, "POST", "/api/copy", key, {"source": "team/too", "destination": "team/third"}))[0] == 200
    for name in ("team/mine", "team/too"):
        assert (await call(daemon, "DELETE", "/api/delete", key, {"model": name}))[0] == 200
    assert await names_of(daemon) == ["secret/other", "team/third"]


async def test_a_key_of_some_models_takes_no_other_name_away(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"team/mine": 0})
    async with daemon.unix.post("/models/team%2Fmine/tag?repo=secret/mine") as answer:
        assert answer.status == 201
    async with daemon.unix.get("/models/team%2Fmine") as answer:
        id = (await answer.json())["id"]
    key = await team_key(daemon)
    for reference in ("secret%2Fmine", id):
        assert (await call(daemon, "DELETE", f"/models/{reference}?force=true", key))[0] == 403
    assert await names_of(daemon) == ["secret/mine", "team/mine"]
    assert (await call(daemon, "DELETE", "/models/team%2Fmine", key))[0] == 200


async def test_what_names_no_model_is_not_for_a_key_of_some(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon(models={"secret/other": 0})
    async with daemon.unix.get("/models/secret%2Fother/export") as answer:
        archive = await answer.read()
    async with daemon.unix.get("/models/secret%2Fother") as answer:
        id = (await answer.json())["id"]
    key = await team_key(daemon)
    headers = {"X-API-Key": key, "Content-Type": "application/x-tar"}
    for query, expected in (("", 403), ("?name=secret/new", 403), ("?name=team/loaded", 200)):
        async with daemon.tcp.post(f"/models/load{query}", data=io.BytesIO(archive), headers=headers) as answer:
            assert answer.status == expected, await answer.text()
    assert (await call(daemon, "POST", "/models/prune?unused=1d", key))[0] == 403
    made = {"model": "team/made", "from": id, "adapters": {"a.gguf": f"sha256:{0:064}"}}
    assert (await call(daemon, "POST", "/api/create", key, made))[0] == 403


async def test_a_digest_gives_no_file_of_another_model(start_daemon: StartDaemon) -> None:
    """Whoever has the file may send it. Then it is stored once all the same."""
    daemon = await start_daemon(models={"secret/other": 0, "team/mine": 1})
    key = await team_key(daemon)
    blobs = {path.name: path.read_bytes() for path in (daemon.settings.data_dir / "blobs" / "sha256").iterdir()}
    files = {f"sha256:{name}": data for name, data in blobs.items() if data.startswith(b"GGUF")}
    here = {digest: (await call(daemon, "HEAD", f"/api/blobs/{digest}", key))[0] for digest in files}
    assert sorted(here.values()) == [200, 404]
    for digest, status in here.items():
        made = {"model": "team/made", "files": {"m.gguf": digest}, "stream": False}
        assert (await call(daemon, "POST", "/api/create", key, made))[0] == status
        headers = {"X-API-Key": key}
        async with daemon.tcp.post(f"/api/blobs/{digest}", data=b"x", headers=headers) as answer:
            assert answer.status == (200 if status == 200 else 400)
        if status == 404:
            made = {"model": "team/adapted", "from": "team/mine", "adapters": {"a.gguf": digest}, "stream": False}
            assert (await call(daemon, "POST", "/api/create", key, made))[0] == 404
            async with daemon.tcp.post(f"/api/blobs/{digest}", data=files[digest], headers=headers) as answer:
                assert answer.status == 201
            made = {"model": "team/made", "files": {"m.gguf": digest}, "stream": False}
            assert (await call(daemon, "POST", "/api/create", key, made))[0] == 200
    assert {path.name for path in (daemon.settings.data_dir / "blobs" / "sha256").iterdir()} >= blobs.keys()


async def test_inference_tells_a_key_of_some_models_nothing_of_others(start_daemon: StartDaemon) -> None:
    """Neither whether they are here, nor what they offer."""
    daemon = await start_daemon(models={"secret/other": 0, "team/mine": 1})
    key = await team_key(daemon)
    ask = {"input": "x", "messages": CHAT["messages"]}
    for path in ("/v1/chat/completions", "/v1/embeddings", "/v1/rerank", "/engines/none/v1/chat/completions"):
        told = []
        for name in ("secret/other", "secret/absent"):
            _, answer = await call(daemon, "POST", path, key, ask | {"model": name, "query": "x", "documents": ["y"]})
            told.append(answer["error"]["message"])
        assert told[0] == told[1], path
        assert "may not use this model" in told[0], path
        assert "secret" not in told[0], path
    assert (await call(daemon, "POST", "/v1/chat/completions", key, ask | {"model": "team/absent"}))[0] == 404


async def test_a_key_that_makes_keys_has_every_model(start_daemon: StartDaemon) -> None:
    daemon = await start_daemon()
    wanted = {"name": "kim", "scopes": ["inference", "admin"], "models": ["team/*"]}
    async with daemon.unix.post("/keys", json=wanted) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "models")
