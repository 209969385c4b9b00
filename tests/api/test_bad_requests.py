"""Every family answers what is wrong with a request in its own shape of an error, with the status that docs/api.md
gives, and the engine sees nothing of it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modelrunner.store import Store
from tests.api.conftest import StartDaemon
from tests.store.samples import add_model

MESSAGES = [{"role": "user", "content": "hi"}]


def openai(body: Any) -> tuple[str, str | None]:
    assert set(body) == {"error", "request_id"}
    assert {"message", "type", "param", "code"} <= set(body["error"])
    return body["error"]["message"], body["error"]["param"]


def anthropic(body: Any) -> tuple[str, str | None]:
    assert (set(body), body["type"]) == ({"type", "error", "request_id"}, "error")
    assert set(body["error"]) == {"type", "message"}
    return body["error"]["message"], None


def ollama(body: Any) -> tuple[str, str | None]:
    assert set(body) == {"error"}
    return body["error"], None


def cohere(body: Any) -> tuple[str, str | None]:
    assert set(body) == {"id", "message"}
    return body["message"], None


Shape = Callable[[Any], tuple[str, str | None]]
# The path, a good body without its model, the shape of an error, and whether models of texts alone can do it, None if
# every model can.
CALLS: dict[str, tuple[dict[str, Any], Shape, bool | None]] = {
    "/v1/chat/completions": ({"messages": MESSAGES}, openai, True),
    "/v1/completions": ({"prompt": "hi"}, openai, True),
    "/v1/embeddings": ({"input": "hi"}, openai, None),
    "/v1/rerank": ({"query": "hi", "documents": ["a"]}, openai, False),
    "/v1/responses": ({"input": "hi"}, openai, True),
    "/v1/tokenize": ({"content": "hi"}, openai, True),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 5}, anthropic, True),
    "/anthropic/v1/messages/count_tokens": ({"messages": MESSAGES}, anthropic, True),
    "/v2/rerank": ({"query": "hi", "documents": ["a"]}, cohere, False),
    "/api/chat": ({"messages": MESSAGES}, ollama, True),
    "/api/generate": ({"prompt": "hi"}, ollama, True),
    "/api/embed": ({"input": "hi"}, ollama, None),
    "/api/embeddings": ({"prompt": "hi"}, ollama, None),
}
FAULTS: dict[str, tuple[Callable[[dict[str, Any]], bytes], int, str | None, str]] = {
    "malformed JSON": (lambda good: b'{"model": "smol"', 400, None, "JSON"),
    "no object": (lambda good: b"[]", 400, None, "object"),
    "an empty body": (lambda good: b"", 400, None, "JSON"),
    "no model": (lambda good: json.dumps(good).encode(), 400, "model", "model"),
    "a model that is no text": (lambda good: json.dumps(good | {"model": 7}).encode(), 400, "model", "model"),
    "a switch that is no switch": (
        lambda good: json.dumps(good | {"model": "smol", "stream": "yes"}).encode(), 400, "stream", "stream"),
    "a model that is not here": (lambda good: json.dumps(good | {"model": "nope"}).encode(), 404, "model", "not here"),
    "too large": (lambda good: json.dumps(good | {"model": "smol", "x": "x" * 70_000}).encode(), 413, None, "bytes"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("path", CALLS)
async def test_a_fault_is_told_in_the_familys_shape(start_daemon: StartDaemon, path: str, fault: str) -> None:
    daemon = await start_daemon(models={"smol": 0}, body_limit="64KiB")
    good, shape, _ = CALLS[path]
    made, status, param, said = FAULTS[fault]
    async with daemon.tcp.post(path, data=made(good)) as answer:
        message, named = shape(await answer.json())
        assert (answer.status, answer.content_type) == (status, "application/json")
        assert said in message
        assert named == (param if shape is openai else None)
        assert answer.headers["X-Request-ID"]
    assert daemon.backend.runs == 0


@pytest.mark.parametrize("path", [path for path, (_, _, chats) in CALLS.items() if chats is not None])
async def test_a_model_that_cannot_is_told_with_what_it_can(
    start_daemon: StartDaemon, tmp_path: Path, path: str
) -> None:
    good, shape, chats = CALLS[path]
    (tmp_path / "data_dir").mkdir()
    model = add_model(Store(tmp_path / "data_dir"), "words", 1, architecture="bert" if chats else "llama")
    assert model
    daemon = await start_daemon()
    async with daemon.tcp.post(path, json=good | {"model": "words"}) as answer:
        message, named = shape(await answer.json())
        assert answer.status == 400
        assert ("it offers embedding" if chats else "it offers completion") in message
        assert named == ("model" if shape is openai else None)
    assert daemon.backend.runs == 0
