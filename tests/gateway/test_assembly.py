"""Answers that an engine streams and that the client gets in one piece."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.errors import BadRequest, EngineProtocolError, ModelRunnerError
from modelrunner.gateway.dialects import assembly
from modelrunner.gateway.dialects.anthropic_answer import AnthropicAnswer
from modelrunner.gateway.dialects.assembly import Assembly
from modelrunner.gateway.dialects.openai_answer import OpenAIAnswer
from modelrunner.gateway.engine_errors import EngineRefused
from tests.gateway.fakes import SSE, Call, chunk
from tests.gateway.harness import CHAT, Proxy, proxy, request

STREAM = {"stream": True, "stream_options": {"include_usage": True}}
ENDPOINTS: dict[str, dict[str, Any]] = {CHAT: STREAM, "/v1/completions": STREAM, "/v1/messages": {"stream": True}}
END = b"0\r\n\r\n"


def events(*found: Any) -> bytes:
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(one) for one in found)


def part(index: int = 0, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return {"id": "x", "object": "chat.completion.chunk", "created": 7, "model": "m", "choices": [choice]}


def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": more.pop("name")} if "name" in more else {})
    return {"index": index, "function": function, **more}


def logprob(text: str) -> dict[str, Any]:
    return {"content": [{"token": text, "logprob": -0.1705, "top_logprobs": []}]}


CHAT_EVENTS = events(
    part(role="assistant", content=None) | {"prompt_progress": {"total": 9, "processed": 4}},
    part(role="assistant", content=None),
    part(reasoning_content="Let me "),
    part(reasoning_content="see: \u00e4"),
    part(1, role="assistant", content="other"),
    part(content="Gr\u00fc\u00dfe\n\n"),
    part(content="data: [DONE]"),
    part(tool_calls=[call(1, '{"b":', name="second", id="c2", type="function")]),
    part(tool_calls=[call(0, "", name="first", id="c1", type="function")]),
    part(tool_calls=[call(1, " 2}"), call(0, "{}")]),
    {**part(1, content="!"), "choices": [{**part(1, content="!")["choices"][0], "logprobs": logprob("o")}]},
    {**part(1, content="?"), "choices": [{**part(1, content="?")["choices"][0], "logprobs": logprob("?")}]},
    part(1, "stop"),
    part(1) | {"choices": [], "usage": {"total_tokens": 99}, "timings": {"predicted_n": 99}},
    part(0, "tool_calls"),
    part() | {"choices": [], "usage": {"total_tokens": 5}, "timings": {"predicted_n": 3}, "system_fingerprint": "b1"},
)
CHAT_ANSWER = {
    "id": "x",
    "object": "chat.completion",
    "created": 7,
    "model": "m",
    "system_fingerprint": "b1",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": "Gr\u00fc\u00dfe\n\ndata: [DONE]",
                "reasoning_content": "Let me see: \u00e4",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "first", "arguments": "{}"}},
                    {"id": "c2", "type": "function", "function": {"name": "second", "arguments": '{"b": 2}'}},
                ],
            },
        },
        {
            "index": 1,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "other!?"},
            "logprobs": {"content": logprob("o")["content"] + logprob("?")["content"]},
        },
    ],
    "usage": {"total_tokens": 5},
    "timings": {"predicted_n": 3},
}
TEXT_EVENTS = events(
    {"id": "y", "object": "text_completion", "choices": [{"index": 0, "text": "", "logprobs": None}]},
    {"id": "y", "object": "text_completion", "choices": [{"index": 0, "text": "a", "logprobs": None}]},
    {"choices": [{"index": 0, "text": "b", "logprobs": None, "finish_reason": "length"}], "usage": {"total_tokens": 2}},
)
TEXT_ANSWER = {
    "id": "y",
    "object": "text_completion",
    "choices": [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length"}],
    "usage": {"total_tokens": 2},
}
MESSAGE_EVENTS = events(
    {"type": "message_start", "message": {"id": "z", "content": [], "usage": {"input_tokens": 4, "output_tokens": 0}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": ""}},
    {"type": "content_block_stop", "index": 0},
    {"type": "ping"},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "He"}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "llo"}},
    {"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use", "name": "f", "input": {}}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a":'}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": " 1}"}},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 3}},
    {"type": "message_stop"},
)
MESSAGE_ANSWER = {
    "id": "z",
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Hello"},
        {"type": "tool_use", "name": "f", "input": {"a": 1}},
    ],
    "usage": {"input_tokens": 4, "output_tokens": 3},
    "stop_reason": "tool_use",
}
KINDS: list[tuple[str, type[Assembly], bytes, dict[str, Any]]] = [
    (CHAT, OpenAIAnswer, CHAT_EVENTS, CHAT_ANSWER),
    ("/v1/completions", OpenAIAnswer, TEXT_EVENTS, TEXT_ANSWER),
    ("/v1/messages", AnthropicAnswer, MESSAGE_EVENTS, MESSAGE_ANSWER),
]


@given(st.sampled_from(KINDS), st.lists(st.integers(0, len(CHAT_EVENTS))), st.booleans())
def test_any_cut_of_the_stream_gives_the_same_answer(kind: Any, cuts: list[int], crlf: bool) -> None:
    _, make, data, expected = kind
    data += b"data: [DONE]\n\n"
    if crlf:
        data = data.replace(b"\n", b"\r\n")
    made = make()
    places = [0, *sorted(cuts), len(data)]
    for start, end in itertools.pairwise(places):
        assert made.piece(data[start:end]) == b""
    assert msgspec.json.decode(made.end()) == expected


@given(st.sampled_from(KINDS), st.data())
def test_a_stream_that_ends_too_early_is_no_answer(kind: Any, data: st.DataObject) -> None:
    _, make, stream, _ = kind
    last = stream.rindex(b'"message_stop"' if make is AnthropicAnswer else b'"finish_reason":"')
    made = make()
    made.piece(stream[: data.draw(st.integers(0, last))])
    with pytest.raises(EngineProtocolError):
        made.end()


@given(st.sampled_from(KINDS), st.lists(st.binary(max_size=40), max_size=8))
def test_bytes_of_any_kind_are_an_answer_or_a_fault_of_the_engine(kind: Any, pieces: list[bytes]) -> None:
    made = kind[1]()
    try:
        for piece in pieces:
            made.piece(b"data: " + piece + b"\n")
        made.end()
    except (ModelRunnerError, EngineRefused):
        pass


@pytest.mark.parametrize("lines", [True, False])
def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch, lines: bool) -> None:
    monkeypatch.setattr(assembly, "LIMIT", 1000)
    made = OpenAIAnswer()
    made.piece(events(part(content="x")))
    data = events(*[part(content="x" * 20)] * 100) if lines else b"x" * 2000
    with pytest.raises(EngineProtocolError, match="ask for it as a stream"):
        made.piece(data)


def ask(path: str = CHAT, **more: Any) -> bytes:
    return request(path, {"model": "m", "messages": [], **more})


async def served_with(served: Proxy, **more: Any) -> Any:
    for endpoint, fields in ENDPOINTS.items():
        served.runner.change([endpoint], as_stream=fields)
    return await served.ask(ask(**more))


@pytest.mark.parametrize(("path", "data", "expected"), [(path, data, answer) for path, _, data, answer in KINDS])
async def test_a_plain_answer_is_put_together(
    folder: Path, kind: str, path: str, data: bytes, expected: dict[str, Any]
) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + chunk(data[:50]) + chunk(data[50:]) + END)

    async with proxy(folder, kind, script) as served:
        answer = await served_with(served, path=path, stream=False, extra=1)
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        assert int(answer.headers["content-length"]) == len(answer.body)
        assert answer.json() == expected
        [received] = served.engine.received
        body = msgspec.json.decode(received.body)
        assert body == {"model": "m", "messages": [], "extra": 1} | ENDPOINTS[path]


async def test_what_is_streamed_already_and_what_cannot_be_passes_through(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        for path, fields in ENDPOINTS.items():
            served.runner.change([path], as_stream=fields)
        for data, body in ((ask(stream=True), b'data: {"ok":true}\n\n'), (ask("/v1/tokenize"), b'{"ok":true}')):
            assert (await served.ask(data)).body == body
            assert data.endswith(served.engine.received[-1].body)


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ({"code": 400, "message": "too many tokens"}, 400),
        ({"code": 503, "message": "loading"}, 503),
        ({"code": 500, "message": "the context is full"}, 502),
        ({"message": "without a code"}, 502),
        ({"code": 500, "message": "input is too large to process"}, 400),  # the backend knows better
        ("only text", 502),
    ],
)
async def test_an_error_in_the_stream_has_its_status(folder: Path, kind: str, told: Any, status: int) -> None:
    async def script(call: Call) -> None:
        await call.send(
            SSE + chunk(events(part(content="He"), {"error": told}, part(content="y", finish="stop"))) + END
        )

    async with proxy(folder, kind, script) as served:
        answer = await served_with(served)
        assert (answer.status, answer.complete) == (status, True)
        if isinstance(told, dict):
            assert answer.error["message"] == told["message"]


@pytest.mark.parametrize("rest", [b"", END, chunk(b"data: {broken\n\n") + END, chunk(b'data: {"choices":7}\n\n') + END])
async def test_an_answer_that_breaks_off_is_an_error(folder: Path, kind: str, rest: bytes) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + chunk(events(part(content="He"))) + rest)
        call.close()

    async with proxy(folder, kind, script) as served:
        answer = await served_with(served)
        assert (answer.status, answer.complete) == (502, True)
        assert answer.error["code"]


async def test_a_refusal_before_the_stream_is_as_without_one(folder: Path, kind: str) -> None:
    body = msgspec.json.encode({"error": {"code": 400, "message": "no such template"}})

    async def script(call: Call) -> None:
        await call.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async with proxy(folder, kind, script) as served:
        answer = await served_with(served)
        assert (answer.status, answer.error["message"]) == (400, "no such template")


async def test_the_backend_is_asked_about_an_error_in_the_stream() -> None:
    async def asked(status: int, message: str, fields: Any) -> ModelRunnerError:
        return BadRequest(f"{status} {message} {fields['n_ctx']}")

    made = OpenAIAnswer()
    made.piece(events({"error": {"code": 500, "message": "full", "n_ctx": 8}}))
    with pytest.raises(EngineRefused) as caught:
        made.end()
    assert (await caught.value.refusal.error(asked)).message == "500 full 8"
