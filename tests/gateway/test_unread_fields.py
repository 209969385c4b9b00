"""Fields that a client sent and nothing reads: the answer names them, or the request is refused."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.engineapi import ApiShape
from modelrunner.errors import BadRequest
from modelrunner.gateway.engine_request import MEMBERS
from modelrunner.gateway.headers import own_headers
from modelrunner.gateway.request.unknown_fields import unread
from tests.gateway.fakes import FAKE_API, OK, Call, Received
from tests.gateway.harness import CHAT, Proxy, proxy, request

READ = frozenset({"messages", "prompt", "max_tokens", "temperature", "top_k", "tools"})
ENDPOINTS = dict.fromkeys(("/v1/chat/completions", "/v1/messages", "/v1/embeddings"), READ)
TEXT = b'{"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}'
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%b"


async def answer(call: Call) -> None:
    events = b"data: %b\n\ndata: [DONE]\n\n" % TEXT
    await call.send(STREAM % (len(events), events) if b'"stream":true' in call.request.body else OK)


async def asked(served: Proxy, path: str, **fields: Any) -> tuple[int, str | None, Any, list[Received]]:
    """Status, the names, the answer and what the engine got."""
    served.runner.api = FAKE_API.reading(ENDPOINTS)
    found = await served.ask(request(path, {"model": "m", **fields}))
    named = found.headers.get("x-modelrunner-ignored")
    return found.status, named, found.json(), served.engine.received


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, None),
        ({"temperature": 0, "keep_alive": "5m"}, None),
        ({"user": "kim", "metadata": {"a": 1}}, "user, metadata"),
        ({"user": None, "tools": [], "store": False, "n": 1, "response_format": {"type": "text"}}, None),
        ({"logprobs": False, "service_tier": "auto", "tool_choice": "auto", "stop": []}, None),
        ({"store": True, "service_tier": "flex", "seed": 0}, "store, service_tier, seed"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"x\r\nX-Evil: 1": 1, "é" * 100: 1}, f"x??X-Evil??1, {'?' * 64}"),
    ],
)
async def test_what_is_ignored_is_named(folder: Path, kind: str, fields: dict[str, Any], named: str | None) -> None:
    async with proxy(folder, kind, answer) as served:
        status, found, _, received = await asked(served, CHAT, messages=MESSAGES, **fields)
        assert (status, found, len(received)) == (200, named, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"logprobs": True},
        {"stop": ["x"]},
        {"response_format": {"type": "json_object"}},
        {"guided_json": {"type": "object"}},
        {"tool_choice": "required"},
        {"modalities": ["text", "audio"]},
        {"max_completion_tokens": 0},
        {"n": True},
    ],
)
async def test_what_changes_the_meaning_is_refused(folder: Path, kind: str, fields: dict[str, Any]) -> None:
    async with proxy(folder, kind, answer) as served:
        status, _, body, received = await asked(served, CHAT, messages=MESSAGES, **fields)
        assert (status, body["error"]["param"], received) == (400, next(iter(fields)), [])


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/api/chat"])
async def test_an_unread_number_that_is_no_double_is_the_clients_mistake(folder: Path, kind: str, path: str) -> None:
    async with proxy(folder, kind, answer) as served:
        served.runner.api = FAKE_API.reading(ENDPOINTS)
        messages = '[{"role": "user", "content": "hi"}]'
        body = f'{{"model": "m", "max_tokens": 1, "input": "hi", "messages": {messages}, "new": [1e400]}}'
        found = await served.ask(request(path, body.encode()))
        assert (found.status, served.engine.received) == (400, [])


async def test_a_field_means_something_at_its_own_endpoint(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, answer) as served:
        assert (await asked(served, "/v1/embeddings", n=2, max_completion_tokens=5))[1] == "n, max_completion_tokens"
        assert (await asked(served, "/v1/embeddings", dimensions=5, adapter="sql"))[0] == 400


async def test_an_engine_that_does_not_tell_reads_everything(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, answer) as served:
        status, named, _, _ = await asked(served, "/v1/completions", prompt="x", n=2, anything=1)
        assert (status, named) == (200, None)


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/api/chat", {"messages": MESSAGES, "stream": False, "shift": True, "max_tokens": 5}, "shift, max_tokens"),
        (
            "/api/chat",
            {"messages": MESSAGES, "stream": False, "options": {"num_ctx": 5, "top_k": 1}},
            "options.num_ctx",
        ),
        ("/api/chat", {"messages": MESSAGES, "stream": False, "options": {"mirostat": 2}}, "options.mirostat"),
        (
            "/v1/responses",
            {"input": "hi", "prompt_cache_key": "a", "truncation": "auto"},
            "truncation, prompt_cache_key",
        ),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, "service_tier": "auto", "new": [1]}, "new"),
    ],
)
async def test_every_family_names_them_in_one_line(
    folder: Path, kind: str, path: str, fields: dict[str, Any], named: str
) -> None:
    async with proxy(folder, kind, answer) as served:
        status, found, _, _ = await asked(served, path, **fields)
        assert (status, found) == (200, named)


async def test_a_message_is_translated_for_a_schema_that_the_engines_own_messages_do_not_read(
    folder: Path, kind: str
) -> None:
    async with proxy(folder, kind, answer) as served:
        config = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
        fields: Any = {"messages": MESSAGES, "max_tokens": 1}
        assert (await asked(served, "/v1/messages", **fields, output_config=config))[:2] == (200, None)
        assert (await asked(served, "/v1/messages", **fields))[:2] == (200, None)
        structured, plain = served.engine.received
        assert (structured.path, plain.path) == (CHAT, "/v1/messages")
        assert msgspec.json.decode(structured.body)["response_format"]["json_schema"]["schema"] == {"type": "object"}


async def test_a_family_refuses_in_its_own_shape(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, answer) as served:
        fields: Any = {"messages": MESSAGES, "max_tokens": 1, "stop_sequences": ["x"]}
        status, _, body, _ = await asked(served, "/v1/messages", **fields)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
)
NAMES = st.text(max_size=8) | st.sampled_from(["n", "stop", "output_config", "user"])


@given(st.dictionaries(NAMES, JSON, max_size=6), st.sets(NAMES))
def test_every_body_is_judged_and_every_name_is_safe_in_a_header(body: dict[str, Any], read: set[str]) -> None:
    members = MEMBERS.decode(msgspec.json.encode(body))
    assert unread(members, ApiShape.CHAT, body.keys()) == ()
    try:
        found = unread(members, ApiShape.CHAT, read)
    except BadRequest as refused:
        unknown = refused.param
    else:
        unknown = None
        for _, named in own_headers("", found):
            assert all(re.fullmatch(rb"[A-Za-z0-9_.?-]{0,64}", name) for name in named.split(b", "))
        assert len(found) <= len(body.keys() - read)
    assert unknown is None or unknown in body.keys() - read


TOOLS = [{"type": "function", "function": {"name": "f"}}]


async def in_run(served: Proxy, path: str, **fields: Any) -> tuple[int, str | None, Any]:
    """Status, the names of what was ignored and the answer, of an engine that calls no tools in this run and has
    embeddings of 384 numbers."""
    served.runner.api = replace(FAKE_API, no_tools="its template knows none", embedding_length=384)
    found = await served.ask(request(path, {"model": "m", **fields}))
    return found.status, found.headers.get("x-modelrunner-ignored"), found.json()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tools"),
        ({"tools": TOOLS, "tool_choice": "none"}, None),
        ({"tools": []}, None),
    ],
)
async def test_tools_that_no_engine_calls_are_named(folder: Path, fields: dict[str, Any], named: str | None) -> None:
    async with proxy(folder, "fast", answer) as served:
        assert (await in_run(served, CHAT, messages=MESSAGES, **fields))[:2] == (200, named)


@pytest.mark.parametrize(
    ("path", "choice"),
    [
        (CHAT, "required"),
        (CHAT, {"type": "function", "function": {"name": "f"}}),
        (CHAT, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": TOOLS}}),
        ("/v1/messages", {"type": "any"}),
        ("/v1/responses", {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}),
    ],
)
async def test_a_call_that_is_required_needs_an_engine_that_calls(folder: Path, path: str, choice: object) -> None:
    tools = {CHAT: TOOLS, "/v1/messages": [{"name": "f", "input_schema": {}}]}.get(
        path, [{"type": "function", "name": "f", "parameters": {}}]
    )
    said = {"input": "hi"} if path == "/v1/responses" else {"messages": MESSAGES, "max_tokens": 9}
    async with proxy(folder, "fast", answer) as served:
        status, _, told = await in_run(served, path, tools=tools, tool_choice=choice, **said)
        assert (status, served.engine.received) == (400, [])
        assert "its template knows none" in told["error"]["message"]


async def test_embeddings_are_not_shortened_where_the_engine_cannot(folder: Path) -> None:
    async with proxy(folder, "fast", answer) as served:
        status, _, told = await in_run(served, "/v1/embeddings", input="a", dimensions=64)
        assert (status, told["error"]["param"]) == (400, "dimensions")
        assert "take all 384" in told["error"]["message"]
        assert (await in_run(served, "/v1/embeddings", input="a", dimensions=384))[0] == 200
