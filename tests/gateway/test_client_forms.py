"""Forms of JSON that published clients send, and what an engine gets of them; mistakes, and the field that the answer
names."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.gateway.fakes import SSE, Call, chunk, event
from tests.gateway.harness import CHAT, proxy, request

TOOL = {"type": "function", "function": {"name": "save", "parameters": {"type": "object"}}}
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"


async def asked(folder: Path, path: str, **fields: Any) -> dict[str, Any]:
    """Returns what the engine gets."""
    async with proxy(folder, "fast") as served:
        answer = await served.ask(request(path, {"model": "m"} | fields))
        assert answer.status == 200, answer.body
        found: dict[str, Any] = msgspec.json.decode(served.engine.received[-1].body)
        return found


async def refused(folder: Path, path: str, **fields: Any) -> tuple[int, str | None]:
    """Returns the status and the field that the error names. No engine is asked."""
    async with proxy(folder, "fast") as served:
        answer = await served.ask(request(path, {"model": "m"} | fields))
        assert not served.engine.received
        return answer.status, answer.error["param"]


@pytest.mark.parametrize(
    ("path", "sent", "got"),
    [
        (EMBEDDINGS, {"input": "a", "encoding_format": None, "dimensions": None}, {"input": "a"}),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": None}, {"query": "a", "documents": ["b"]}),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "hi", "name": None}], "stop": None, "tools": None, "n": None},
            {"messages": [{"role": "user", "content": "hi"}]},
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a null", "cache_control": None}]}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a null"}]}]},
        ),
    ],
)
async def test_null_is_an_absent_field(folder: Path, path: str, sent: dict[str, Any], got: dict[str, Any]) -> None:
    assert await asked(folder, path, **sent) == {"model": "m"} | got


async def test_null_is_a_value_where_the_client_says_what_it_means(folder: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "save", "arguments": '{"a":null}'}}
    schema = {"type": "object", "properties": {"a": {"enum": [None], "default": None}}}
    sent: dict[str, Any] = {
        "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": [{"type": "function", "function": {"name": "save", "parameters": schema, "strict": None}}],
    }
    got = await asked(folder, CHAT, **sent)
    assert got["messages"] == sent["messages"]
    assert got["tools"] == [{"type": "function", "function": {"name": "save", "parameters": schema}}]


@pytest.mark.parametrize(
    ("arguments", "got"),
    [('{"a": 1}', '{"a": 1}'), ("", "{}"), ('{"text": "north', '{"unfinished":"{\\"text\\": \\"north"}')],
)
async def test_a_call_that_was_cut_does_not_end_its_conversation(folder: Path, arguments: str, got: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "save", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    found = await asked(folder, CHAT, messages=messages)
    assert found["messages"][0]["tool_calls"][0]["function"]["arguments"] == got


@pytest.mark.parametrize("number", [b"3.0", b"3", b"0.3e1"])
@pytest.mark.parametrize("path", ["/api/chat", "/v1/responses", CHAT])
async def test_a_whole_number_may_have_a_point(folder: Path, path: str, number: bytes) -> None:
    name = {"/api/chat": b"options", "/v1/responses": b"max_output_tokens"}.get(path, b"max_tokens")
    value = b'{"num_predict":%b}' % number if name == b"options" else number
    words = b'"input":"a"' if name == b"max_output_tokens" else b'"messages":[{"role":"user","content":"a"}]'
    body = b'{"model":"m","stream":false,%b,"%b":%b}' % (words, name, value)

    async def script(call: Call) -> None:
        assert msgspec.json.decode(call.request.body)["max_tokens"] == 3
        last = msgspec.json.encode({"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}).decode()
        await call.send(SSE + event(last) + event("[DONE]") + b"0\r\n\r\n")

    async with proxy(folder, "fast", script) as served:
        assert (await served.ask(request(path, body))).status == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"max_tokens": 3.5}, "max_tokens"),
        (CHAT, {"max_tokens": "3"}, "max_tokens"),
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"temperature": -1}, "temperature"),
        (CHAT, {"stop": 5}, "stop"),
        (CHAT, {"response_format": "json"}, "response_format"),
        (CHAT, {"logit_bias": {"a": "b"}}, "logit_bias"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tool_choice": "required", "tools": []}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": None}, "tool_choice"),
        ("/v1/responses", {"tool_choice": "required", "input": "x"}, "tool_choice"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "x"}, "encoding_format"),
        ("/v1/detokenize", {"tokens": [-1]}, "tokens"),
        ("/v1/detokenize", {"tokens": ["a"]}, "tokens"),
    ],
)
async def test_a_mistake_is_refused_with_its_field(folder: Path, path: str, fields: dict[str, Any], param: str) -> None:
    assert await refused(folder, path, **fields) == (400, param)


@pytest.mark.parametrize("choice", ["auto", "none", None])
async def test_a_choice_that_requires_nothing_needs_no_tools(folder: Path, choice: str | None) -> None:
    await asked(folder, CHAT, messages=[], tool_choice=choice)


async def test_each_line_of_ollamas_streams_is_a_chunk_of_http(folder: Path) -> None:
    """Clients read a piece of the body, and parse it as one line."""

    async def script(call: Call) -> None:
        texts = [{"choices": [{"delta": {"content": text}}]} for text in "abc"]
        whole = [*texts, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]
        events = b"".join(event(msgspec.json.encode(one).decode()) for one in whole)
        await call.send(SSE + events + event("[DONE]") + b"0\r\n\r\n")  # in one piece

    async with proxy(folder, "fast", script) as served:
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        client = await served.connect()
        await client.send(request("/api/chat", body, Connection="close"))
        raw = (await client.closed()).partition(b"\r\n\r\n")[2]
    chunks = []
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        chunks.append(raw[: int(size, 16)])
        raw = raw[int(size, 16) + 2 :]
    assert [chunk.count(b"\n") for chunk in chunks] == [1, 1, 1, 1, 0]


async def test_an_empty_answer_is_a_text(folder: Path) -> None:
    async def script(call: Call) -> None:
        said = [{"role": "assistant", "content": None}, {}]
        ends = [None, "stop"]
        events = [
            {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": end}]}
            for delta, end in zip(said, ends, strict=True)
        ]
        whole = b"".join(event(msgspec.json.encode(one).decode()) for one in events)
        await call.send(SSE + whole + event("[DONE]") + b"0\r\n\r\n")

    async with proxy(folder, "fast", script) as served:
        served.runner.change((CHAT,), as_stream={"stream": True})
        answer = await served.ask(request(CHAT, {"model": "m", "messages": []}))
        assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": ""}


async def engine_gets(folder: Path, path: str, reads: set[str], **fields: Any) -> tuple[int, dict[str, Any]]:
    """Returns the status, and what an engine that reads these fields alone gets, without nulls."""
    async with proxy(folder, "fast") as served:
        served.runner.change((path,), reads=frozenset(reads))
        answer = await served.ask(request(path, {"model": "m"} | fields))
        got = msgspec.json.decode(served.engine.received[-1].body) if served.engine.received else {}
        return answer.status, {name: value for name, value in got.items() if value is not None and name != "model"}


@pytest.mark.parametrize(
    ("outputs", "got"),
    [
        ({"json": {"type": "object"}}, {"json_schema": {"type": "object"}}),
        ({"choice": ["yes", 'n"o']}, {"grammar": 'root ::= "yes" | "n\\"o"'}),
        ({"grammar": "root ::= [0-9]"}, {"grammar": "root ::= [0-9]"}),
        ({"json_object": True, "regex": None}, {"response_format": {"type": "json_object"}}),
        ({"regex": "a+"}, None),
    ],
)
async def test_structured_outputs_are_held_by_what_the_engine_has(
    folder: Path, outputs: dict[str, Any], got: dict[str, Any] | None
) -> None:
    reads = {"messages", "json_schema", "grammar", "response_format"}
    status, sent = await engine_gets(folder, CHAT, reads, messages=[], structured_outputs=outputs)
    assert (status, sent) == ((200, {"messages": [], **got}) if got is not None else (400, {}))


@pytest.mark.parametrize(
    ("name", "given", "got"),
    [
        ("guided_json", {"type": "object"}, {"json_schema": {"type": "object"}}),
        ("guided_json", '{"type": "object"}', {"json_schema": {"type": "object"}}),
        ("guided_choice", ["yes", "no"], {"grammar": 'root ::= "yes" | "no"'}),
        ("guided_grammar", "root ::= [0-9]", {"grammar": "root ::= [0-9]"}),
        ("guided_regex", "a+", None),
        ("guided_json", "{", None),
    ],
)
async def test_the_earlier_names_of_structured_outputs_hold(
    folder: Path, name: str, given: Any, got: dict[str, Any] | None
) -> None:
    reads = {"messages", "json_schema", "grammar"}
    status, sent = await engine_gets(folder, CHAT, reads, messages=[], **{name: given})
    assert (status, sent) == ((200, {"messages": [], **got}) if got is not None else (400, {}))


async def test_the_earlier_names_become_structured_outputs_where_these_are_read(folder: Path) -> None:
    reads = {"messages", "structured_outputs"}
    _, sent = await engine_gets(folder, CHAT, reads, messages=[], guided_regex="a+", structured_outputs={"x": 1})
    assert sent["structured_outputs"] == {"x": 1, "regex": "a+"}


async def test_the_schema_of_a_json_object_holds(folder: Path) -> None:
    wanted = {"type": "json_object", "value": {"type": "object"}}
    _, sent = await engine_gets(folder, CHAT, {"messages", "response_format"}, messages=[], response_format=wanted)
    assert sent["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
@pytest.mark.parametrize(("sent", "reads", "got"), [("prompt", "content", "content"), ("content", "prompt", "prompt")])
async def test_a_text_to_tokenize_has_the_name_that_the_engine_reads(
    folder: Path, path: str, sent: str, reads: str, got: str
) -> None:
    async with proxy(folder, "fast") as served:
        served.runner.change(("/tokenize",), reads=frozenset({reads}))
        answer = await served.ask(request(path, {"model": "m", sent: "a b"}))
        assert (answer.status, "x-modelrunner-ignored" in answer.headers) == (200, False)
        assert msgspec.json.decode(served.engine.received[-1].body)[got] == "a b"
        assert (await served.ask(request(path, {"model": "m"}))).error["param"] == "prompt"


async def test_no_alternatives_are_probabilities_of_the_answer(folder: Path) -> None:
    """llama.cpp takes `top_logprobs` 0 for no probabilities."""
    assert (await asked(folder, CHAT, messages=[], logprobs=True, top_logprobs=0))["top_logprobs"] == 1
    assert (await asked(folder, CHAT, messages=[], logprobs=False, top_logprobs=0))["top_logprobs"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_has_the_probabilities_that_it_includes(folder: Path, stream: bool) -> None:
    found = [{"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}]

    async def script(call: Call) -> None:
        choice = {"delta": {"content": "x"}, "logprobs": {"content": found}, "finish_reason": "stop"}
        await call.send(SSE + event(msgspec.json.encode({"choices": [choice]}).decode()) + b"0\r\n\r\n")

    async with proxy(folder, "fast", script) as served:
        body = {"model": "m", "input": "a", "stream": stream, "include": ["message.output_text.logprobs"]}
        answer = await served.ask(request("/v1/responses", body))
        sent = msgspec.json.decode(served.engine.received[-1].body)
        assert (sent["logprobs"], sent["top_logprobs"]) == (True, 1)
        assert "x-modelrunner-ignored" not in answer.headers
        if stream:
            events = [msgspec.json.decode(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: ")]
            assert [one["logprobs"] for one in events if one["type"] == "response.output_text.delta"] == [found]
            whole = events[-1]["response"]
        else:
            whole = answer.json()
        assert whole["output"][0]["content"][0]["logprobs"] == found
        assert whole["usage"]["input_tokens_details"]["cache_write_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [7, 1 << 20])
async def test_a_completion_has_its_probabilities_in_lists(folder: Path, stream: bool, size: int) -> None:
    """llama.cpp has them as in a chat."""

    async def script(call: Call) -> None:
        told = [
            {"token": text, "logprob": place - 1.5, "top_logprobs": [{"token": "o", "logprob": -9.5}]}
            for place, text in enumerate(("ab", "c"))
        ]
        chunks = [
            {
                "object": "text_completion",
                "choices": [{"index": 0, "text": one["token"], "logprobs": {"content": [one]}}],
            }
            for one in told
        ]
        last = {"object": "text_completion", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
        whole = b"".join(b"data: %b\n\n" % msgspec.json.encode(one) for one in (*chunks, last)) + b"data: [DONE]\n\n"
        await call.send(SSE)
        for start in range(0, len(whole), size):
            piece = whole[start : start + size]
            await call.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        await call.send(b"0\r\n\r\n")

    lists = {
        "tokens": ["ab", "c"],
        "token_logprobs": [-1.5, -0.5],
        "top_logprobs": [{"o": -9.5}, {"o": -9.5}],
        "text_offset": [0, 2],
    }
    async with proxy(folder, "fast", script) as served:
        served.runner.change(("/v1/completions",), as_stream={"stream": True})
        body = {"model": "m", "prompt": "x", "logprobs": 1, "stream": stream}
        answer = await served.ask(request("/v1/completions", body))
        assert (answer.status, answer.complete) == (200, True)
        if not stream:
            assert answer.json()["choices"][0]["logprobs"] == lists
            return
        assert answer.body.endswith(b"data: [DONE]\n\n")
        events = [msgspec.json.decode(event[6:]) for event in answer.body.split(b"\n\n")[:-2]]
        found = [event["choices"][0].get("logprobs") for event in events]
        assert found[-1] is None
        assert {name: [one for part in found[:-1] for one in part[name]] for name in lists} == lists


MESSAGE = "/v1/messages"
CALL = {"type": "tool_use", "id": "c", "name": "save"}
MESSAGE_EVENTS: list[dict[str, Any]] = [
    {"type": "message_start", "message": {"id": "chatcmpl-7", "type": "message", "content": [], "stop_reason": None}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a\r\n\r\nb"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": CALL},
    {"type": "content_block_stop", "index": 1},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": "END"}, "usage": {}},
    {"type": "message_stop"},
]


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("size", [1, 7, 4096])
async def test_a_message_that_passes_is_as_anthropic_has_it(folder: Path, ends: str, size: int) -> None:
    """Its ID, the stop sequence that ended it, and the empty input of a call, as llama.cpp does not write them."""
    texts = [f"event: {one['type']}{ends}data: {msgspec.json.encode(one).decode()}" for one in MESSAGE_EVENTS]
    whole = "".join(text + 2 * ends for text in texts).encode()

    async def script(call: Call) -> None:
        pieces = [chunk(whole[at : at + size]) for at in range(0, len(whole), size)]
        await call.send(SSE + b"".join(pieces) + b"0\r\n\r\n")

    async with proxy(folder, "fast", script) as served:
        served.runner.change((MESSAGE,), as_stream={"stream": True})
        body = {"model": "m", "max_tokens": 9, "messages": []}
        streamed = await served.ask(request(MESSAGE, body | {"stream": True}))
        plain = (await served.ask(request(MESSAGE, body))).json()
    found = [msgspec.json.decode(event.partition(b"\ndata: ")[2]) for event in streamed.body.split(b"\n\n")[:-1]]
    start, end = found[0]["message"], found[6]["delta"]
    assert (start["id"], end["stop_reason"], end["stop_sequence"]) == ("msg_7", "stop_sequence", "END")
    assert found[4]["content_block"] == plain["content"][1] == CALL | {"input": {}}
    assert [found[at] for at in (1, 2, 3, 5, 7)] == [MESSAGE_EVENTS[at] for at in (1, 2, 3, 5, 7)]
    assert (plain["id"], plain["stop_reason"], plain["stop_sequence"]) == ("msg_7", "stop_sequence", "END")
