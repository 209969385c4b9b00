"""Anthropic's messages for an engine that has chats alone: what they become for it, and its answers for the client."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from modelrunner.engineapi import EngineApi
from tests.gateway.fakes import SSE, Call, Script, event
from tests.gateway.harness import CHAT, Answer, Proxy, proxy, request
from tests.gateway.test_ollama import STOP, USAGE, answering, asked, delta

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = {"role": "user", "content": "hello"}
PNG = "iVBORw0KGgoAAAANSUhEUg=="


def ask(path: str = MESSAGES, **more: Any) -> bytes:
    return request(path, {"model": "m", "max_tokens": 9, "messages": [HELLO]} | more)


def only_chats(served: Proxy) -> Proxy:
    served.runner.api = EngineApi()
    return served


def events(answer: Answer) -> list[dict[str, Any]]:
    assert answer.complete
    found = [block.partition(b"\n") for block in answer.body.split(b"\n\n") if block]
    told = [msgspec.json.decode(data.removeprefix(b"data: ")) for _, _, data in found]
    assert [line.removeprefix(b"event: ").decode() for line, _, _ in found] == [one["type"] for one in told]
    return told


def call_part(**fields: Any) -> dict[str, Any]:
    return delta(tool_calls=[{"index": 0, **fields}])


SAID = (
    delta(role="assistant"),
    delta(reasoning_content="Hm"),
    delta(content="Hel"),
    delta(content="lo €"),
    STOP,
    USAGE,
)
CALLED = (
    call_part(id="call_1", function={"name": "add", "arguments": ""}),
    call_part(function={"arguments": '{"a":'}),
    call_part(function={"arguments": "1}"}),
    {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
    USAGE,
)


@pytest.mark.parametrize("size", [1, 9, 1 << 20])
async def test_a_stream(folder: Path, kind: str, size: int) -> None:
    async with proxy(folder, kind, answering(*SAID, size=size)) as served:
        answer = await only_chats(served).ask(ask(stream=True))
        assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")
        found = events(answer)
        assert [one["type"] for one in found] == [
            *("message_start", "content_block_start", "content_block_delta", "content_block_delta"),
            *("content_block_stop", "content_block_start", "content_block_delta", "content_block_delta"),
            *("content_block_stop", "message_delta", "message_stop"),
        ]
        assert found[0]["message"]["content"] == []
        assert found[2]["delta"] == {"type": "thinking_delta", "thinking": "Hm"}
        assert [one["delta"]["text"] for one in found[6:8]] == ["Hel", "lo €"]
        assert [one["index"] for one in found[1:9]] == [0, 0, 0, 0, 1, 1, 1, 1]
        assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert (found[-2]["usage"]["input_tokens"], found[-2]["usage"]["output_tokens"]) == (5, 3)
        assert served.engine.received[-1].path == CHAT
        assert asked(served)["messages"] == [HELLO]
        assert (asked(served)["max_tokens"], asked(served)["stream"]) == (9, True)


async def test_one_piece(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, answering(*SAID)) as served:
        found = (await only_chats(served).ask(ask())).json()
        assert found["content"] == [
            {"type": "thinking", "thinking": "Hm", "signature": ""},
            {"type": "text", "text": "Hello €"},
        ]
        assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "m")
        assert (found["stop_reason"], found["usage"]["output_tokens"]) == ("end_turn", 3)


async def test_tools(folder: Path, kind: str) -> None:
    tool = {"name": "add", "description": "adds", "input_schema": {"type": "object"}, "cache_control": {"type": "x"}}
    choice = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    async with proxy(folder, kind, answering(*CALLED)) as served:
        whole = (await only_chats(served).ask(ask(tools=[tool], tool_choice=choice))).json()
        assert whole["content"] == [{"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}}]
        assert whole["stop_reason"] == "tool_use"
        function = {"name": "add", "description": "adds", "parameters": {"type": "object"}}
        assert asked(served)["tools"] == [{"type": "function", "function": function}]
        assert asked(served)["tool_choice"] == {"type": "function", "function": {"name": "add"}}
        assert asked(served)["parallel_tool_calls"] is False
        _, start, piece, *_ = events(await served.ask(ask(tools=[tool], stream=True)))
        assert start["content_block"] == {"type": "tool_use", "id": "call_1", "name": "add", "input": {}}
        assert msgspec.json.decode(piece["delta"]["partial_json"]) == {"a": 1}


async def test_a_conversation_with_everything(folder: Path, kind: str) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}, image]}
    said = [
        {"type": "thinking", "thinking": "add", "signature": "s"},
        {"type": "text", "text": "I add."},
        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
    ]
    look = {"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}
    turns = [{"role": "user", "content": [look, image]}, {"role": "assistant", "content": said}]
    turns.append({"role": "user", "content": [result, {"type": "text", "text": "and now?"}]})
    body: Any = {
        "system": [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}],
        "stop_sequences": ["END"],
        "top_k": 4,
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "metadata": {"user_id": "u"},
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
    }
    ended = {"choices": [{"delta": {}, "finish_reason": "stop", "stop_reason": "END"}]}
    async with proxy(folder, kind, answering(delta(content="a"), ended, USAGE)) as served:
        answer = await only_chats(served).ask(ask(messages=turns, **body))
        assert (answer.json()["stop_reason"], answer.json()["stop_sequence"]) == ("stop_sequence", "END")
        assert answer.headers["x-modelrunner-ignored"] == "thinking.budget_tokens"
        url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
        function = {"name": "add", "arguments": '{"a":1}'}
        assert asked(served)["messages"] == [
            {"role": "system", "content": "be\n\nkind"},
            {"role": "user", "content": [{"type": "text", "text": "look"}, url]},
            {
                "role": "assistant",
                "content": "I add.",
                "reasoning_content": "add",
                "tool_calls": [{"id": "t1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "3"},
            {"role": "user", "content": [url, {"type": "text", "text": "and now?"}]},
        ]
        found = asked(served)
        assert (found["stop"], found["top_k"], found["user"]) == (["END"], 4, "u")
        assert found["chat_template_kwargs"] == {"enable_thinking": True}
        assert found["response_format"]["json_schema"]["schema"] == {"type": "object"}


async def test_tokens_are_counted_by_an_answer_of_one(folder: Path, kind: str) -> None:
    cut = {"choices": [{"delta": {}, "finish_reason": "length"}]}
    async with proxy(folder, kind, answering(delta(content="a"), cut, USAGE)) as served:
        assert (await only_chats(served).ask(ask(COUNT))).json() == {"input_tokens": 5}
        assert asked(served)["max_tokens"] == 1
    async with proxy(folder, kind, answering(delta(content="a"), cut)) as served:
        answer = await only_chats(served).ask(ask(COUNT))
        assert answer.status == 502
        assert "does not report the tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"messages": "hello"},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "text"}]}]},
        {"system": [{"type": "image"}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tool_choice": {"type": "maybe"}},
        {"mcp_servers": [{"type": "url"}]},
        {"output_config": {"format": {"type": "xml"}}},
        {"max_tokens": "many"},
    ],
)
async def test_what_cannot_be_translated(folder: Path, more: dict[str, Any]) -> None:
    async with proxy(folder, "fast") as served:
        answer = await only_chats(served).ask(ask(**more))
        assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert not served.engine.received


def broken_off(last: bytes) -> Script:
    """Good events, and a faulty one or the end of the connection, in one write."""

    async def script(call: Call) -> None:
        good = b"".join(event(msgspec.json.encode(one).decode()) for one in SAID[:4])
        await call.send(SSE + good + last)
        call.close()

    return script


@pytest.mark.parametrize("path", [MESSAGES, "/api/chat", "/v1/responses"])
@pytest.mark.parametrize("last", [event('{"error":{"message":"out of luck"}}'), event("{"), b""])
async def test_what_came_before_an_engine_breaks_off_arrives(folder: Path, kind: str, path: str, last: bytes) -> None:
    async with proxy(folder, kind, broken_off(last)) as served:
        body = {"model": "m", "stream": True, "messages": [HELLO], "input": "hello"}
        answer = await only_chats(served).ask(request(path, body))
        assert answer.complete
        assert b"Hel" in answer.body
        assert "lo €".encode() in answer.body
        assert b"error" in answer.body.rpartition("lo €".encode())[2]


async def test_an_error_of_the_engine_before_the_answer(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, answering(SAID[0], {"error": {"code": 400, "message": "too long"}})) as served:
        answer = await only_chats(served).ask(ask())
        assert (answer.status, answer.json()["error"]["message"]) == (400, "too long")


NOTE = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "the note"}}
SEARCH = {"type": "search_result", "source": "x", "title": "y", "content": [{"type": "text", "text": "z"}]}


@pytest.mark.parametrize("inside", [False, True])
async def test_content_that_an_engines_messages_would_drop_reaches_its_chats(
    folder: Path, kind: str, inside: bool
) -> None:
    """Also within the result of a tool. The engine serves messages, and reads no documents in them."""
    called = {"type": "tool_use", "id": "t1", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [NOTE]}
    turns = [HELLO, {"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
    messages = turns if inside else [{"role": "user", "content": [NOTE, {"type": "text", "text": "Sum it up."}]}]
    async with proxy(folder, kind, answering(*SAID)) as served:
        answer = await served.ask(ask(messages=messages))
        assert answer.status == 200, answer.body
        assert served.engine.received[-1].path == CHAT
        last = asked(served)["messages"][-1]
        assert last["content"] == ("the note" if inside else "the note\nSum it up.")


@pytest.mark.parametrize("place", ["messages", "system", "result"])
async def test_content_that_nothing_reads_is_refused(folder: Path, kind: str, place: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [SEARCH]}
    given: dict[str, Any] = {
        "messages": {"messages": [{"role": "user", "content": [SEARCH]}]},
        "system": {"system": [SEARCH]},
        "result": {"messages": [{"role": "user", "content": [result]}]},
    }[place]
    async with proxy(folder, kind, answering(*SAID)) as served:
        answer = await served.ask(ask(**given))
        assert answer.status == 400
        told = answer.json()
        assert told["type"] == "error"
        assert "search_result" in told["error"]["message"]


async def test_what_an_engines_messages_read_passes_as_it_came(folder: Path, kind: str) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
    content = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}, image]
    body = ask(messages=[{"type": "message", "role": "user", "content": content}])
    async with proxy(folder, kind) as served:
        assert (await served.ask(body)).json() == {"ok": True}
        assert served.engine.received[-1].path == MESSAGES
        assert served.engine.received[-1].body == body.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(("kind_of", "thinks"), [("enabled", True), ("adaptive", True), ("disabled", False)])
async def test_thinking_reaches_the_template(folder: Path, kind_of: str, thinks: bool) -> None:
    """Engines themselves do not switch it off."""
    async with proxy(folder, "fast") as served:
        served.runner.change(
            (MESSAGES,), reads=frozenset({"messages", "max_tokens", "thinking", "chat_template_kwargs"})
        )
        assert (await served.ask(ask(thinking={"type": kind_of, "budget_tokens": 1024}))).status == 200
        assert asked(served)["chat_template_kwargs"] == {"enable_thinking": thinks}
        own = {"enable_thinking": "mine"}
        await served.ask(ask(thinking={"type": kind_of}, chat_template_kwargs=own))
        assert asked(served)["chat_template_kwargs"] == own


@pytest.mark.parametrize("more", [{}, {"output_config": {"effort": "low"}}])
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_tools_of_a_service_are_refused(folder: Path, path: str, more: dict[str, Any]) -> None:
    async with proxy(folder, "fast") as served:
        answer = await served.ask(ask(path, tools=[{"type": "web_search_20250305", "name": "web_search"}], **more))
        assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert not served.engine.received


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": "9"}, {"temperature": -1}, {"stop_sequences": "x"}, {"tools": [{"name": 5}]}, {"tools": 1}]
)
async def test_a_mistake_names_its_field(folder: Path, wrong: dict[str, Any]) -> None:
    async with proxy(folder, "fast") as served:
        answer = await served.ask(ask(**wrong))
        assert (answer.status, next(iter(wrong)) in answer.json()["error"]["message"]) == (400, True)
        assert not served.engine.received
