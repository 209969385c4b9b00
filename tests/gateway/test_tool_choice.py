"""A `tool_choice` that names a tool, for engines that take words alone and for those that take names."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.gateway.harness import CHAT, Proxy, proxy, request
from tests.gateway.test_unread_fields import MESSAGES, answer

PATHS = frozenset({CHAT, "/v1/messages"})
MESSAGE = "/v1/messages"


def functions(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]


def named(name: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


async def asked(served: Proxy, path: str, **fields: Any) -> tuple[int, Any, list[Any]]:
    """The status, the answer and what the engine got."""
    found = await served.ask(request(path, {"model": "m", "messages": MESSAGES, "max_tokens": 1, **fields}))
    return found.status, found.json(), [msgspec.json.decode(one.body) for one in served.engine.received]


@pytest.mark.parametrize(
    ("choice", "word", "offered"),
    [
        (named("b"), "required", ["b"]),
        (allowed("auto", "a", "c"), "auto", ["a", "c"]),
        (allowed("required", "c"), "required", ["c"]),
        ("required", "required", ["a", "b", "c"]),
        ("auto", "auto", ["a", "b", "c"]),
    ],
)
async def test_the_engine_is_offered_what_the_choice_names(
    folder: Path, kind: str, choice: object, word: str, offered: list[str]
) -> None:
    async with proxy(folder, kind, answer) as served:
        served.runner.change(PATHS, chooses_by_word=True)
        tools = functions("a", "b", "c")
        status, _, [body] = await asked(served, CHAT, tools=tools, tool_choice=choice, seed=18446744073709551615)
        assert (status, body["tool_choice"]) == (200, word)
        assert body["tools"] == functions(*offered)
        assert (body["messages"], body["seed"]) == (MESSAGES, 18446744073709551615)


async def test_a_message_names_its_tool(folder: Path, kind: str) -> None:
    """By Anthropic's own words: `any` is a call of whichever."""
    tools = [{"name": name, "input_schema": {"type": "object"}} for name in ("a", "b")]
    choice: dict[str, Any] = {"type": "tool", "name": "b", "disable_parallel_tool_use": True}
    async with proxy(folder, kind, answer) as served:
        served.runner.change(PATHS, chooses_by_word=True)
        await asked(served, MESSAGE, tools=tools, tool_choice=choice)
        _, _, [first, second] = await asked(served, MESSAGE, tools=tools, tool_choice={"type": "any"})
        assert first["tool_choice"] == {"type": "any", "disable_parallel_tool_use": True}
        assert (first["tools"], second["tools"]) == (tools[1:], tools)
        assert second["tool_choice"] == {"type": "any"}


async def test_a_response_names_its_tool(folder: Path, kind: str) -> None:
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("a", "b")]
    async with proxy(folder, kind, answer) as served:
        served.runner.change(PATHS, chooses_by_word=True)
        choice = {"type": "function", "name": "b"}
        found = await served.ask(
            request("/v1/responses", {"model": "m", "input": "hi", "tools": tools, "tool_choice": choice})
        )
        [body] = [msgspec.json.decode(one.body) for one in served.engine.received]
        assert (found.status, body["tool_choice"], body["tools"]) == (200, "required", functions("b"))
        assert found.json()["tools"] == tools


async def test_an_engine_that_takes_names_gets_them(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, answer) as served:
        tools = functions("a", "b")
        _, _, [body] = await asked(served, CHAT, tools=tools, tool_choice=named("b"))
        assert (body["tool_choice"], body["tools"]) == (named("b"), tools)


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_no_engine_reads_a_list_of_tools(folder: Path, kind: str, mode: str) -> None:
    """It is offered these tools alone, in a chat and for a response; a text with the same words changes nothing."""
    flat = [{"type": "function", **tool["function"]} for tool in functions("a", "b", "c")]
    listed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in "bc"]}
    response = {"model": "m", "input": "hi", "tools": flat, "tool_choice": listed}
    said = [{"role": "user", "content": "what are allowed_tools?"}]
    async with proxy(folder, kind, answer) as served:
        await asked(served, CHAT, tools=functions("a", "b", "c"), tool_choice=allowed(mode, "c", "b"))
        await served.ask(request("/v1/responses", response))
        _, _, [chat, told, plain] = await asked(
            served, CHAT, messages=said, tools=functions("a"), tool_choice=named("a")
        )
    for body in (chat, told):
        assert (body["tool_choice"], body["tools"]) == (mode, functions("b", "c"))
    assert (plain["messages"], plain["tool_choice"]) == (said, named("a"))


@pytest.mark.parametrize("wrong", [allowed("auto", "none"), allowed("perhaps", "a"), {"type": "allowed_tools"}])
async def test_a_list_of_none_of_the_tools_is_refused(folder: Path, kind: str, wrong: dict[str, Any]) -> None:
    async with proxy(folder, kind, answer) as served:
        status, body, received = await asked(served, CHAT, tools=functions("a"), tool_choice=wrong)
        assert (status, body["error"]["param"], received) == (400, "tool_choice", [])


@pytest.mark.parametrize(
    "choice",
    [named("none"), named(7), allowed("auto", "none"), allowed("perhaps", "a"), {"type": "custom"}, {"function": "a"}],
)
async def test_what_no_word_stands_for_is_refused(folder: Path, kind: str, choice: dict[str, Any]) -> None:
    async with proxy(folder, kind, answer) as served:
        served.runner.change(PATHS, chooses_by_word=True)
        status, body, received = await asked(served, CHAT, tools=functions("a"), tool_choice=choice)
        assert (status, body["error"]["param"], received) == (400, "tool_choice", [])
