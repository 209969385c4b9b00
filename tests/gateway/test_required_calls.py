"""A required call of a tool, of an engine that would let prose stand before it: what it is asked, and what each family
gets of its JSON."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.gateway.fakes import Script
from tests.gateway.harness import CHAT, Answer, Proxy, proxy, request
from tests.gateway.test_ollama import STOP, USAGE, answering, delta

HELLO = [{"role": "user", "content": "hello"}]
TWO = '[{"name": "add", "arguments": {"a": "}, {"}}, {"name":"say","arguments":{}}]'
CUT = '[{"name": "add", "arguments": {"a": 1}}, {"name": "say", "arguments": {"text": "nor'
LENGTH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}


def function(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


def writing(text: str, last: dict[str, Any] = STOP) -> Script:
    """An engine that thinks, and writes a text in pieces."""
    pieces = [delta(content=text[start : start + 7]) for start in range(0, len(text), 7)]
    return answering(delta(role="assistant", content=None), delta(reasoning_content="Hm"), *pieces, last, USAGE)


def letting_prose(served: Proxy) -> Proxy:
    served.runner.change([CHAT], prose_before_calls=True, chooses_by_word=True, as_stream={"stream": True})
    return served


async def ask(served: Proxy, path: str, tools: list[dict[str, Any]], choice: object, **more: Any) -> Answer:
    said = {"input": "hello"} if path == "/v1/responses" else {"messages": HELLO}
    return await served.ask(request(path, {"model": "m", **said, "tools": tools, "tool_choice": choice} | more))


def got(served: Proxy) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(served.engine.received[-1].body)
    return found


async def test_the_engine_is_asked_for_the_json_of_a_call(folder: Path, kind: str) -> None:
    place: dict[str, Any] = {"$defs": {"Place": {"type": "string"}}, "properties": {"at": {"$ref": "#/$defs/Place"}}}
    place["properties"]["to"] = {"$ref": "#/properties/at"}
    tools = [function("add"), function("go", **place)]
    async with proxy(folder, kind, writing(TWO)) as served:
        assert (await ask(letting_prose(served), CHAT, tools, "required")).status == 200
        asked = got(served)
        assert (asked["tools"], asked["tool_choice"], asked["messages"]) == (tools, "none", HELLO)
        schema = asked["response_format"]["json_schema"]["schema"]
        assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
        add, go = (one["properties"] for one in schema["items"]["anyOf"])
        assert add == {"name": {"const": "add"}, "arguments": {"type": "object"}}
        to = "#/items/anyOf/1/properties/arguments/properties/at"
        assert go["arguments"]["properties"] == {"at": {"$ref": "#/$defs/1-Place"}, "to": {"$ref": to}}
        assert schema["$defs"] == {"1-Place": {"type": "string"}}
        named = {"type": "function", "function": {"name": "go"}}
        await ask(served, CHAT, tools, named, parallel_tool_calls=True)
        schema = got(served)["response_format"]["json_schema"]["schema"]
        assert [one["properties"]["name"] for one in schema["items"]["anyOf"]] == [{"const": "go"}]
        assert "maxItems" not in schema
        for choice, more in (("auto", {}), ("none", {}), ("required", {"grammar": 'root ::= "a"'})):
            await ask(served, CHAT, tools, choice, **more)
            assert ("response_format" in got(served), got(served)["tool_choice"]) == (False, choice)


@pytest.mark.parametrize(
    "wrong",
    [
        ["x"],
        [{}],
        [{"type": "function", "function": {"name": 5}}],
        [function("a") | {"function": []}],
        "tools",
        {"a": 1},
    ],
)
async def test_tools_that_are_none_are_the_engines_to_refuse(folder: Path, kind: str, wrong: Any) -> None:
    async with proxy(folder, kind, writing(TWO)) as served:
        assert (await ask(letting_prose(served), CHAT, wrong, "required")).status == 200
        assert (got(served)["tools"], got(served)["tool_choice"]) == (wrong, "required")


async def test_a_chat_gets_calls(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, writing(TWO)) as served:
        answer = await ask(letting_prose(served), CHAT, [function("add"), function("say")], "required")
        [choice] = answer.json()["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert choice["message"]["reasoning_content"] == "Hm"
        functions = [call["function"] for call in choice["message"]["tool_calls"]]
        assert functions == [{"name": "add", "arguments": '{"a": "}, {"}'}, {"name": "say", "arguments": "{}"}]
        assert answer.json()["usage"]["completion_tokens"] == 3
        streamed = await ask(served, CHAT, [function("add")], "required", stream=True)
        data = [block.removeprefix(b"data: ") for block in streamed.body.split(b"\n\n") if block]
        assert (streamed.complete, data[-1]) == (True, b"[DONE]")
        chunks = [choice for one in data[:-1] for choice in msgspec.json.decode(one)["choices"]]
        assert not any(choice["delta"].get("content") for choice in chunks)
        [calls] = [found for choice in chunks if (found := choice["delta"].get("tool_calls"))]
        assert [call["function"] for call in calls] == functions
        assert [call["index"] for call in calls] == [0, 1]
        assert len({call["id"] for call in calls}) == 2
        assert chunks[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_and_a_response_get_calls(folder: Path, kind: str, stream: bool) -> None:
    tool = {"name": "add", "input_schema": {"type": "object"}}
    async with proxy(folder, kind, writing(TWO)) as served:
        letting_prose(served)
        message = await ask(served, "/v1/messages", [tool], {"type": "any"}, max_tokens=99, stream=stream)
        assert (message.status, b"tool_use" in message.body, b"}, {" in message.body) == (200, True, True)
        assert served.engine.received[-1].head.startswith(b"POST /v1/chat/completions ")
        offered = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
        response = await ask(served, "/v1/responses", offered, "required", stream=stream)
        assert (response.status, b'"function_call"' in response.body) == (200, True)
        assert b"text_delta" not in message.body
        assert b"output_text" not in response.body
        if not stream:
            assert [block["type"] for block in message.json()["content"]] == ["thinking", "tool_use", "tool_use"]
            assert message.json()["stop_reason"] == "tool_use"
            assert [item["type"] for item in response.json()["output"]] == ["reasoning", *["function_call"] * 2]


@pytest.mark.parametrize(
    ("text", "last", "told"),
    [
        (CUT, LENGTH, ("length", None, ['{"a": 1}', '{"text": "nor'])),
        ('[{"na', LENGTH, ("length", "", [])),
        ("", LENGTH, ("length", "", [])),
        ("Once upon a time", STOP, ("stop", "Once upon a time", [])),
    ],
)
async def test_what_is_no_whole_call(folder: Path, text: str, last: dict[str, Any], told: object) -> None:
    """A call that the limit cut is one; an engine that holds no schema has said something."""
    async with proxy(folder, "fast", writing(text, last)) as served:
        [choice] = (await ask(letting_prose(served), CHAT, [function("add")], "required")).json()["choices"]
        calls = choice["message"].get("tool_calls", [])
        arguments = [call["function"]["arguments"] for call in calls]
        assert (choice["finish_reason"], choice["message"]["content"], arguments) == told


async def test_a_call_of_a_hundred_thousand_brackets_is_one_that_was_cut(folder: Path, kind: str) -> None:
    text = '[{"name": "add", "arguments": ' + "[" * 100_000
    async with proxy(folder, kind, answering(delta(content=text), STOP, USAGE)) as served:
        answer = await ask(letting_prose(served), CHAT, [function("add")], "required")
    assert answer.status == 200
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": "[" * 100_000}
