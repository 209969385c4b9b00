"""Calls whose answers are never streams, asked by clients that want one."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from modelrunner.engineapi import EngineApi
from tests.gateway.fakes import SSE, Call, chunk, event, until
from tests.gateway.harness import proxy, request

VECTORS = {"data": [{"index": 0, "embedding": [1.0]}], "usage": {"prompt_tokens": 1}}
COUNTED = (
    {"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 7}},
)


@pytest.mark.parametrize(
    ("path", "body", "found", "answer"),
    [
        ("/api/embed", {"input": "a"}, VECTORS, b'"embeddings":[[1.0]]'),
        ("/v1/embeddings", {"input": "a"}, VECTORS, b'"embedding":[1.0]'),
        (
            "/v2/rerank",
            {"query": "a", "documents": ["b"]},
            {"results": [{"index": 0, "relevance_score": 1}]},
            b'"relevance_score":1.0',
        ),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}, None, b'{"input_tokens":7}'),
    ],
)
async def test_an_answer_that_waited_has_one_head(
    folder: Path, kind: str, path: str, body: dict[str, Any], found: Any, answer: bytes
) -> None:
    """A stream that waits is kept open by what comes before it; another answer would come behind that."""

    async def script(call: Call) -> None:
        if found is not None:
            data = msgspec.json.encode(found)
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
            await call.send(head + data)
        else:
            events = b"".join(event(msgspec.json.encode(one).decode()) for one in COUNTED)
            await call.send(SSE + events + b"0\r\n\r\n")

    async with proxy(folder, kind, script) as served:
        served.scheduler.is_warm = False
        client = await served.connect()
        await client.send(request(path, {"model": "m", "stream": True, **body}, X_Progress="events"))
        await until(lambda: served.scheduler.waiting == 1)
        served.scheduler.gate.set()
        whole = await client.answer()
        assert (whole.status, whole.headers["content-type"], whole.complete) == (200, "application/json", True)
        assert answer in whole.body
        msgspec.json.decode(whole.body)
        served.scheduler.is_warm = True
        assert (await client.ask(request("/health", b"", method="GET"))).status == 200


USAGE = {"prompt_tokens": 7, "completion_tokens": 1}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAID = {"role": "assistant", "content": "hello", "tool_calls": [CALLED]}
WHOLE = {
    "object": "chat.completion",
    "choices": [{"index": 0, "message": SAID, "finish_reason": "stop"}],
    "usage": USAGE,
}
TEXT = {"object": "text_completion", "choices": [{"index": 0, "text": "hello", "finish_reason": "stop"}]}
DONE = b"data: [DONE]\n\n"
CHUNK = {
    "object": "chat.completion.chunk",
    "choices": [
        {"index": 0, "finish_reason": "stop", "delta": {**SAID, "tool_calls": [{"index": 0, **CALLED}]}},
    ],
    "usage": USAGE,
}
CHATTED = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "found", "events"),
    [
        ("/v1/chat/completions", CHATTED, WHOLE, [CHUNK]),
        ("/v1/chat/completions", CHATTED, {n: v for n, v in WHOLE.items() if n != "object"}, [CHUNK]),
        ("/v1/completions", {"prompt": "a"}, TEXT, [TEXT]),
        ("/v1/completions", {"prompt": "a"}, {"error": {"message": "no"}}, [{"error": {"message": "no"}}]),
        ("/api/chat", CHATTED, WHOLE, None),
        ("/v1/messages", CHATTED | {"max_tokens": 9}, WHOLE, None),
    ],
)
async def test_an_engine_that_makes_no_streams(
    folder: Path, kind: str, path: str, body: dict[str, Any], found: Any, events: Any, warm: bool, chunked: bool
) -> None:
    """The client gets one all the same, whether its head is out or not."""
    data = msgspec.json.encode(found)

    async def script(call: Call) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: Application/JSON; charset=utf-8\r\n"
        if chunked:
            half = len(data) // 2
            await call.send(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(data[:half]))
            await call.send(chunk(data[half:]) + b"0\r\n\r\n")
        else:
            await call.send(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)

    async with proxy(folder, kind, script) as served:
        if path == "/v1/messages":
            served.scheduler.runner.api = EngineApi()
        served.scheduler.is_warm = warm
        client = await served.connect()
        await client.send(request(path, {"model": "m", "stream": True, **body}, X_Progress="events"))
        if not warm:
            await until(lambda: served.scheduler.waiting == 1)
            served.scheduler.gate.set()
        answer = await client.answer()
        assert (answer.status, answer.complete) == (200, True)
        if events is None:
            assert b'"hello"' in answer.body
            assert b'"f"' in answer.body
            assert b"chat.completion" not in answer.body
            return
        assert answer.headers["content-type"] == "text/event-stream"
        told = [one for one in answer.body.split(b"\n\n") if one.startswith(b"data: ")]
        assert answer.body.endswith(DONE) is ("choices" in found)
        assert [msgspec.json.decode(one[6:]) for one in told if one != DONE.strip()] == events


@pytest.mark.parametrize(("path", "begins"), [("/v1/chat/completions", b"data: {"), ("/api/chat", b'{"')])
async def test_a_stream_that_the_engine_calls_json_comes_as_it_is_made(
    folder: Path, kind: str, path: str, begins: bytes
) -> None:
    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        for word in ("a", "b"):
            await call.send(
                event(msgspec.json.encode({"choices": [{"index": 0, "delta": {"content": word}}]}).decode())
            )
            await gate.wait()
        await call.send(event("[DONE]") + b"0\r\n\r\n")

    gate = asyncio.Event()
    async with proxy(folder, kind, script) as served:
        client = await served.connect()
        await client.send(request(path, {"model": "m", "stream": True, **CHATTED}))
        answer = await client.head()
        while b'"a"' not in answer.body:
            assert await client.more(answer)
        gate.set()
        while await client.more(answer):
            pass
        assert (answer.status, answer.complete) == (200, True)
        assert answer.body.startswith(begins)
        assert answer.body.count(b'"content"') >= 2
