"""What one request may take: its tokens are limited on the way to the engine, and its time ends it."""

import json
from pathlib import Path
from typing import Any

import pytest

from modelrunner.engineapi import ApiShape
from modelrunner.errors import BadRequest, RequestCancelled
from modelrunner.gateway.engine_request import EngineRequest
from modelrunner.gateway.request.model_defaults import limit_tokens
from modelrunner.types import NO_LIMITS, RequestLimits
from tests.gateway.fakes import SSE, Call, chunk, event
from tests.gateway.harness import CHAT, proxy, request


def limited(shape: ApiShape, body: bytes) -> bytes:
    """What the engine gets of a request that may generate ten tokens."""
    request = EngineRequest("/", body)
    limit_tokens(request, shape, 10)
    return request.encoded()


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({}, {"max_tokens": 10}),
        ({"max_tokens": 4}, {"max_tokens": 4}),
        ({"max_tokens": 400}, {"max_tokens": 10}),
        ({"max_tokens": None}, {"max_tokens": 10}),
        ({"max_tokens": "400"}, {"max_tokens": 10}),
        ({"max_tokens": True}, {"max_tokens": 10}),
        ({"max_tokens": 4e9}, {"max_tokens": 10}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}),
        ({"max_completion_tokens": 500}, {"max_tokens": 10, "max_completion_tokens": 10}),
        ({"n_predict": -1, "max_tokens": 7}, {"n_predict": 10, "max_tokens": 7}),
        ({"n": 3}, {"max_tokens": 3}),
        ({"n": 2, "n_cmpl": 5, "max_tokens": 9}, {"max_tokens": 2}),
        ({"prompt": "abc"}, {"max_tokens": 10}),
        ({"prompt": [1, 2, 3]}, {"max_tokens": 10}),
        ({"prompt": ["a", "b"], "n": 2}, {"max_tokens": 2}),
        ({"prompt": []}, {"max_tokens": 10}),
    ],
)
def test_all_answers_together_have_at_most_the_limit(given: dict[str, Any], limits: dict[str, int]) -> None:
    made = json.loads(limited(ApiShape.COMPLETION, json.dumps({"model": "m", **given}).encode()))
    assert made == {"model": "m", **given, **limits}


def test_the_last_of_two_counts_and_an_escaped_name_is_the_name() -> None:
    body = b'{"model": "m", "max_tokens": 3, "max_tokens": 900, "n\\u005fpredict": 900}'
    assert json.loads(limited(ApiShape.CHAT, body)) == {"model": "m", "max_tokens": 10, "n_predict": 10}


@pytest.mark.parametrize("given", [{"n": 11}, {"n": 2.0}, {"n": "2"}, {"prompt": ["a"] * 11}])
def test_more_answers_than_tokens_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        limited(ApiShape.COMPLETION, json.dumps({"model": "m", **given}).encode())


def test_what_generates_nothing_is_left_alone() -> None:
    body = b'{"model": "m", "input": "a"}'
    assert limited(ApiShape.EMBEDDINGS, body) is body


def test_the_smaller_limit_of_each_holds() -> None:
    key, model = RequestLimits(5.0, None), RequestLimits(9.0, 100)
    assert key.least(model) == model.least(key) == RequestLimits(5.0, 100)
    assert key.least(NO_LIMITS) is NO_LIMITS.least(key) is key
    assert RequestLimits.of(None, None) is NO_LIMITS


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": []}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/messages", {"messages": [], "max_tokens": 900}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 900}),
        ("/api/generate", {"prompt": "a", "options": {"num_predict": 900}}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_each_family_asks_its_engine_for_no_more(folder: Path, path: str, body: dict[str, Any]) -> None:
    async with proxy(folder, "fast") as served:
        served.scheduler.limits = RequestLimits(tokens=10)
        await served.ask(request(path, {"model": "m", **body}))
        assert json.loads(served.engine.received[0].body)["max_tokens"] == 10


async def silent(call: Call) -> None:
    await call.left()


async def talking(call: Call) -> None:
    await call.send(SSE + event('{"choices":[]}'))
    await call.left()


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat"])
async def test_a_request_that_takes_too_long_is_refused_and_its_engine_stops(folder: Path, path: str) -> None:
    async with proxy(folder, "fast", silent) as served:
        served.scheduler.limits = RequestLimits(seconds=0.01)
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": False}
        body |= {"max_tokens": 5} if path == "/v1/messages" else {}
        answer = await served.ask(request(path, body))
        assert answer.status == 504
        assert answer.headers["x-should-retry"] == "false"
        assert b"0.01 s" in answer.body
        if path == CHAT:
            assert answer.error["code"] == "request_too_long"
        await served.engine.until(lambda engine: engine.open == 0)


async def test_a_stream_that_takes_too_long_ends_with_an_error(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, talking) as served:
        served.scheduler.limits = RequestLimits(seconds=1)  # a busy machine must send its head before
        answer = await served.ask(request(stream=True))
        assert answer.status == 200
        assert b"event: error" in answer.body
        assert b"request_too_long" in answer.body
        assert answer.complete
        await served.engine.until(lambda engine: engine.open == 0)


@pytest.mark.parametrize("sent", [chunk(b"data: ha"), b"40\r\ndata: ha", event("ha")[:-2], event("ha")])
async def test_an_error_event_stands_between_events_only(folder: Path, kind: str, sent: bytes) -> None:
    """Elsewhere it would be a part of the engine's event, or break the framing of its chunk."""

    async def script(call: Call) -> None:
        await call.send(SSE + sent)
        await call.left()

    async with proxy(folder, kind, script) as served:
        client = await served.connect()
        await client.send(request(stream=True))
        answer = await client.head()
        while b"ha" not in answer.body:
            await client.more(answer)
        [exchange] = served.pipeline.running
        exchange.stop(RequestCancelled("cancelled"))
        while await client.more(answer):
            pass
        assert (b"event: error" in answer.body) == answer.complete == (sent == event("ha"))
        assert answer.body.startswith(b"data: ha\n\nevent: error\n" if sent == event("ha") else b"data: ha")


async def test_an_answer_in_time_is_whole(folder: Path) -> None:
    async with proxy(folder, "fast") as served:
        served.scheduler.limits = RequestLimits(seconds=3600)
        client = await served.connect()
        assert [(await client.ask()).complete for _ in range(2)] == [True, True]


async def test_the_wait_for_a_runner_does_not_count(folder: Path) -> None:
    async with proxy(folder, "fast") as served:
        served.scheduler.limits = RequestLimits(seconds=0.001)
        served.scheduler.is_warm = False
        client = await served.connect()
        await client.send(request(X_Progress="events", stream=True))
        answer = await client.head()
        while await client.more(answer) and b"progress" not in answer.body:
            pass
        assert b"request_too_long" not in answer.body
        served.scheduler.limits = NO_LIMITS
        served.scheduler.gate.set()
        while await client.more(answer):
            pass
        assert answer.complete
