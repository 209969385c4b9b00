"""The official client's Responses API against the daemon, with the fake engine."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from modelrunner.gateway.dialects import responses_background
from tests.api.conftest import Daemon, StartDaemon
from tests.waiting import HUNG

Made = tuple[Daemon, openai.AsyncOpenAI]
TOOL: Any = {"type": "function", "name": "sum", "parameters": {"type": "object"}, "strict": False}

TEXT: Any = {"type": "input_text", "text": "look"}


@pytest.fixture
async def client(start_daemon: StartDaemon, tmp_path: Path) -> AsyncIterator[Made]:
    daemon = await start_daemon(models={"smol": 0})
    daemon.backend.knobs = ("--tokens", "3", "--record", str(tmp_path / "record"))
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{daemon.port}/v1", api_key="x", max_retries=0) as made:
        yield daemon, made


def asked(daemon: Daemon) -> list[dict[str, Any]]:
    """The bodies of the chats that the engine got."""
    lines = (daemon.settings.data_dir.parent / "record").read_bytes().splitlines()
    found = [msgspec.json.decode(line) for line in lines]
    return [msgspec.json.decode(one["body"]) for one in found if one.get("path") == "/v1/chat/completions"]


async def test_a_response(client: Made) -> None:
    daemon, made = client
    response = await made.responses.create(
        model="smol", input="hello", instructions="be kind", max_output_tokens=3, metadata={"a": "b"}
    )
    assert (response.status, response.output_text) == ("completed", "w0 w1 w2 ")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (3, 3, 6)
    assert (response.instructions, response.metadata) == ("be kind", {"a": "b"})
    [body] = asked(daemon)
    assert body["messages"] == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert body["max_tokens"] == 3


async def test_a_stream_has_typed_events(client: Made) -> None:
    _, made = client
    stream = await made.responses.create(model="smol", input="hello", stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *["response.output_text.delta"] * 3,
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        "response.completed",
    ]
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "w0 w1 w2 "
    async with made.responses.stream(model="smol", input="hello") as helper:
        assert "".join([one.delta async for one in helper if one.type == "response.output_text.delta"]) == "w0 w1 w2 "


async def test_a_conversation_replays_both_sides(client: Made) -> None:
    daemon, made = client
    first = await made.responses.create(model="smol", input="one", instructions="only here")
    second = await made.responses.create(model="smol", input="two", previous_response_id=first.id)
    await made.responses.create(model="smol", input="three", previous_response_id=second.id)
    said = {"role": "assistant", "content": "w0 w1 w2 "}
    users = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    assert asked(daemon)[-1]["messages"] == [users[0], said, users[1], said, users[2]]
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        await made.responses.create(model="smol", input="x", previous_response_id="resp_none")
    unkept = await made.responses.create(model="smol", input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        await made.responses.retrieve(unkept.id)


async def test_stored_responses_are_read_and_removed(client: Made) -> None:
    _, made = client
    created = await made.responses.create(model="smol", input="hello")
    assert await made.responses.retrieve(created.id) == created
    [item] = (await made.responses.input_items.list(created.id)).data
    assert item.type == "message"
    assert item.content[0].text == "hello"  # type: ignore[union-attr]
    await made.responses.delete(created.id)
    for gone in (made.responses.retrieve(created.id), made.responses.delete(created.id)):
        with pytest.raises(openai.NotFoundError):
            await gone


async def test_a_response_in_the_background(client: Made) -> None:
    _, made = client
    queued = await made.responses.create(model="smol", input="hello", background=True)
    assert (queued.status, queued.output) == ("queued", [])
    found = queued
    async with asyncio.timeout(HUNG):
        while found.status == "queued":
            found = await made.responses.retrieve(queued.id)
    assert (found.status, found.output_text) == ("completed", "w0 w1 w2 ")
    assert (await made.responses.cancel(queued.id)).status == "completed"
    missing = await made.responses.create(model="nope", input="hello", background=True)
    async with asyncio.timeout(HUNG):
        while (found := await made.responses.retrieve(missing.id)).status == "queued":
            pass
    assert found.status == "failed"
    assert found.error is not None
    assert "not here" in found.error.message


async def test_a_response_in_the_background_is_cancelled(client: Made) -> None:
    daemon, made = client
    daemon.backend.knobs = ("--tokens", "100000", "--rate", "100")
    queued = await made.responses.create(model="smol", input="hello", background=True)
    with pytest.raises(openai.ConflictError):
        await made.responses.create(model="smol", input="x", previous_response_id=queued.id)
    assert (await made.responses.cancel(queued.id)).status == "cancelled"
    assert (await made.responses.retrieve(queued.id)).status == "cancelled"
    other = await made.responses.create(model="smol", input="hello", background=True)
    await made.responses.delete(other.id)
    in_use = True
    async with asyncio.timeout(HUNG):
        while in_use:
            async with daemon.tcp.get("/engines/ps") as answer:
                in_use = any(runner["in_use"] for runner in await answer.json())


async def test_a_stream_in_the_background_goes_on_without_its_client(client: Made, tmp_path: Path) -> None:
    daemon, made = client
    gate = tmp_path / "gate"
    daemon.backend.knobs = ("--tokens", "3", "--token-gate", str(gate))
    stream = await made.responses.create(model="smol", input="hello", background=True, stream=True)
    seen: list[Any] = []
    async for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert [event.type for event in seen[:2]] == ["response.created", "response.in_progress"]
    assert seen[0].response.status == "queued"
    id = seen[0].response.id
    assert (await made.responses.retrieve(id)).status == "queued"
    rest = await made.responses.retrieve(id, stream=True, starting_after=seen[-1].sequence_number)
    gate.touch()
    seen += [event async for event in rest]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert [event.delta for event in seen if event.type == "response.output_text.delta"] == ["w0 ", "w1 ", "w2 "]
    assert (seen[-1].type, seen[-1].response.output_text) == ("response.completed", "w0 w1 w2 ")
    assert (await made.responses.retrieve(id)).output_text == "w0 w1 w2 "
    [last] = [event async for event in await made.responses.retrieve(id, stream=True, starting_after=4)]
    assert (last.type, last.sequence_number, last.response.id) == ("response.completed", 5, id)  # type: ignore[union-attr]


async def test_a_stream_in_the_background_that_fails_says_so(client: Made) -> None:
    daemon, made = client
    stream = await made.responses.create(model="nope", input="hello", background=True, stream=True)
    first, last = [event async for event in stream]
    assert (first.type, last.type) == ("response.created", "response.failed")
    assert "not here" in last.response.error.message  # type: ignore[union-attr]
    assert (await made.responses.retrieve(first.response.id)).status == "failed"  # type: ignore[union-attr]
    daemon.backend.knobs = ("--tokens", "100000", "--rate", "100")
    stream = await made.responses.create(model="smol", input="hello", background=True, stream=True)
    seen = [await anext(stream)]
    assert (await made.responses.cancel(seen[0].response.id)).status == "cancelled"  # type: ignore[union-attr]
    seen += [event async for event in stream]
    assert (seen[-1].type, seen[-1].response.status) == ("response.failed", "cancelled")  # type: ignore[union-attr]


async def test_events_in_the_background_are_bounded(client: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_background, "_MOST_EVENTS", 4000)
    daemon, made = client
    daemon.backend.knobs = ("--tokens", "100000", "--rate", "200")
    stream = await made.responses.create(model="smol", input="hello", background=True, stream=True)
    id = (await anext(stream)).response.id  # type: ignore[union-attr]
    await stream.close()  # on a busy machine, who follows may be too late, too

    async def follow_from_the_beginning() -> None:
        while True:
            await (await made.responses.retrieve(id, stream=True, starting_after=3)).close()

    with pytest.raises(openai.NotFoundError, match="not kept any more"):
        await asyncio.wait_for(follow_from_the_beginning(), HUNG)
    await made.responses.delete(id)


async def test_a_plain_response_in_the_background_cannot_be_followed(client: Made, tmp_path: Path) -> None:
    daemon, made = client
    gate = tmp_path / "gate"
    daemon.backend.knobs = ("--tokens", "3", "--token-gate", str(gate))
    queued = await made.responses.create(model="smol", input="hello", background=True)
    with pytest.raises(openai.BadRequestError, match="not begun with `stream`"):
        await made.responses.retrieve(queued.id, stream=True)
    gate.touch()


async def test_tools_formats_and_items(client: Made) -> None:
    daemon, made = client
    items: Any = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": "x"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "sum", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    schema: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}
    raw = await made.responses.with_raw_response.create(
        model="smol", input=items, tools=[TOOL], tool_choice="auto", text=schema, truncation="auto"
    )
    assert "truncation" in raw.headers["x-modelrunner-ignored"]
    [body] = asked(daemon)
    system, user, call, output = body["messages"]
    assert system == {"role": "system", "content": "be brief"}
    assert user["content"][1] == {"type": "image_url", "image_url": {"url": "x"}}
    assert call["tool_calls"][0]["function"] == {"name": "sum", "arguments": "{}"}
    assert output == {"role": "tool", "tool_call_id": "c1", "content": "2"}
    assert body["tools"] == [
        {"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}, "strict": False}}
    ]
    assert body["response_format"]["json_schema"]["name"] == "n"


PATCH: Any = {
    "type": "custom",
    "name": "patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE"},
}
AGENTS: Any = {"type": "namespace", "name": "agents", "description": "Others.", "tools": [{**TOOL, "name": "spawn"}]}
CALLED: Any = [["patch", {"input": "*** Begin"}], ["agents__spawn", {"x": 1}], ["sum", {"a": 2}]]


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_with_free_text_and_in_namespaces(client: Made, stream: bool) -> None:
    """As a coding agent has them, beside tools of OpenAI's service."""
    daemon, made = client
    daemon.backend.knobs = (*daemon.backend.knobs, "--round", msgspec.json.encode(CALLED).decode())
    asks: Any = {"model": "smol", "tools": [TOOL, PATCH, AGENTS, {"type": "web_search"}]}
    if stream:
        events = [event async for event in await made.responses.create(input="go", stream=True, **asks)]
        answer: Any = events[-1].response
        told: Any = [event for event in events if "custom_tool_call_input" in event.type]
        assert [event.type for event in told] == [f"response.custom_tool_call_input.{end}" for end in ("delta", "done")]
        assert (told[0].delta, told[1].input, told[0].item_id) == ("*** Begin", "*** Begin", answer.output[1].id)
        begun: Any = [event.item for event in events if event.type == "response.output_item.added"]
        assert (begun[1].type, begun[1].input, begun[2].arguments) == ("custom_tool_call", "", "")
    else:
        raw = await made.responses.with_raw_response.create(input="go", **asks)
        assert raw.headers["x-modelrunner-ignored"] == "tools.web_search"
        answer = raw.parse()
    _, patch, spawn, plain = answer.output
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "*** Begin")
    assert (spawn.type, spawn.namespace, spawn.name, spawn.arguments) == (
        "function_call",
        "agents",
        "spawn",
        '{"x": 1}',
    )
    assert (plain.type, plain.namespace, plain.name) == ("function_call", None, "sum")
    outputs: Any = [
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "done"},
        {"type": "function_call_output", "call_id": spawn.call_id, "output": "spawned"},
    ]
    await made.responses.create(input=outputs, previous_response_id=answer.id, **asks)
    first, second = asked(daemon)
    offered = {tool["function"]["name"]: tool["function"] for tool in first["tools"]}
    assert list(offered) == ["sum", "patch", "agents__spawn"]
    assert offered["patch"]["description"] == "Edits files.\nThe input follows this lark grammar:\nstart: LINE"
    assert offered["patch"]["parameters"]["required"] == ["input"]
    said, *results = second["messages"][-3:]
    functions = [call["function"] for call in said["tool_calls"]]
    assert [function["name"] for function in functions] == ["patch", "agents__spawn", "sum"]
    assert msgspec.json.decode(functions[0]["arguments"]) == {"input": "*** Begin"}
    assert [result["content"] for result in results] == ["done", "spawned"]


async def test_choices_among_tools(client: Made) -> None:
    daemon, made = client
    allowed: Any = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "custom", "name": "patch"}, {"type": "web_search"}],
    }
    choices: list[Any] = [{"type": "custom", "name": "patch"}, allowed, "none"]
    for choice in choices:
        await made.responses.create(model="smol", input="go", tools=[TOOL, PATCH], tool_choice=choice)
    named = {"type": "function", "function": {"name": "patch"}}
    bodies = asked(daemon)
    assert [body["tool_choice"] for body in bodies] == [named, "auto", "none"]
    offered = [[tool["function"]["name"] for tool in body["tools"]] for body in bodies]
    assert offered == [["sum", "patch"], ["patch"], ["sum", "patch"]]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "file_search"}]}, "tools"),
        ({"tools": [{"type": ["web_search"]}]}, "tools"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "namespace", "name": "b"}]}]}, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True, "store": False}, "store"),
        ({"text": {"format": {"type": "poem"}}}, "text.format"),
        ({"input": [{"type": "computer"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input"),
        ({"input": 7}, "input"),
    ],
)
async def test_what_is_not_offered_is_refused(client: Made, body: dict[str, Any], param: str) -> None:
    daemon, _ = client
    async with daemon.tcp.post("/v1/responses", json={"model": "smol", "input": "x"} | body) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, param)
    assert daemon.backend.runs == 0


async def test_items_are_sent_back_by_reference(client: Made) -> None:
    """As Vercel's AI SDK does from the second turn on."""
    daemon, made = client
    first = await made.responses.create(model="smol", input="one")
    items: Any = [
        {"role": "user", "content": "one"},
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "two"},
    ]
    second = await made.responses.create(model="smol", input=items)
    said = {"role": "assistant", "content": "w0 w1 w2 "}
    users = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    assert asked(daemon)[-1]["messages"] == [users[0], said, users[1]]
    await made.responses.create(model="smol", input="three", previous_response_id=second.id)
    assert asked(daemon)[-1]["messages"] == [users[0], said, users[1], said, users[2]]
    unkept = await made.responses.create(model="smol", input="x", store=False)
    for id in (unkept.output[0].id, f"msg_{'0' * 49}", "msg_1", None):
        wrong: Any = [{"type": "item_reference", "id": id}]
        with pytest.raises(openai.NotFoundError, match="is not stored here") as refused:
            await made.responses.create(model="smol", input=wrong)
        assert refused.value.param == "input"


async def test_items_of_tools_that_are_not_here_are_left_out_and_named(client: Made) -> None:
    daemon, made = client
    items: Any = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "local_shell_call_output", "id": "x", "output": "y"},
        {"type": "mcp_list_tools", "id": "m"},
        {"type": None, "role": "user", "content": "hello"},
    ]
    raw = await made.responses.with_raw_response.create(model="smol", input=items)
    named = raw.headers["x-modelrunner-ignored"]
    assert named == "input.web_search_call, input.local_shell_call_output, input.mcp_list_tools"
    assert asked(daemon)[-1]["messages"] == [{"role": "user", "content": "hello"}]


async def test_a_call_that_was_cut_is_incomplete_and_its_conversation_goes_on(client: Made) -> None:
    daemon, made = client
    cut: Any = [
        {"type": "function_call", "call_id": "c1", "name": "sum", "arguments": '{"a": 1, "b'},
        {"type": "function_call_output", "call_id": "c1", "output": "no JSON"},
    ]
    await made.responses.create(model="smol", input=cut)
    [call] = asked(daemon)[-1]["messages"][0]["tool_calls"]
    assert msgspec.json.decode(call["function"]["arguments"]) == {"unfinished": '{"a": 1, "b'}


async def test_a_stream_that_breaks_off(client: Made) -> None:
    daemon, made = client
    daemon.backend.knobs = ("--die", "1")
    with pytest.raises(openai.APIError, match="the fake engine threw up"):
        [event async for event in await made.responses.create(model="smol", input="hello", stream=True)]


async def test_unknown_models_are_typed_errors(client: Made) -> None:
    _, made = client
    with pytest.raises(openai.NotFoundError, match="not here"):
        await made.responses.create(model="nope", input="hello")


@pytest.mark.parametrize(
    "wrong",
    [
        {"tools": 1},
        {"input": [{"role": ["user"], "content": "hi"}]},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
        {"input": [{"role": "user", "content": [{"type": ["input_text"], "text": "hi"}]}]},
    ],
)
@pytest.mark.parametrize("size", [0, 600_000])
async def test_fields_of_a_wrong_type_get_an_answer(client: Made, wrong: dict[str, Any], size: int) -> None:
    daemon, _ = client
    for _ in range(2):  # on one connection, which stays
        asked = {"model": "smol", "input": "hi", "instructions": "x" * size} | wrong
        async with daemon.tcp.post("/v1/responses", json=asked) as answer:
            assert answer.status < 500
    async with daemon.tcp.post("/v1/responses", json={"model": "smol", "input": "hi"}) as answer:
        assert answer.status == 200
