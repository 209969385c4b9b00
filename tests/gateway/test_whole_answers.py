"""Calls whose answers are never streams, asked by clients that want one."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.gateway.fakes import SSE, Call, event, until
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
