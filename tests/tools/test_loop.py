"""The loop of tools on the server: a whole daemon, the fake engine, and real MCP servers."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.api.conftest import Daemon, StartDaemon, start_daemon
from tests.gateway.fakes import until
from tests.tools.test_tools import STDIO, http
from tests.waiting import HUNG

__all__ = ["http", "start_daemon"]
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "smol",
    "messages": [{"role": "user", "content": "What is 2 and 3?"}],
    "max_tokens": 3,
    "modelrunner_tools": "auto",
}
ADD = ["local__add", {"a": 2, "b": 3}]
MINE = {"type": "function", "function": {"name": "mine", "parameters": {"type": "object"}}}


class Served:
    def __init__(self, daemon: Daemon, folder: Path) -> None:
        self.daemon, self.record = daemon, folder / "record"
        self.record.touch()

    def calls(self, *rounds: list[Any], knobs: tuple[str, ...] = ()) -> None:
        """What the model calls, answer by answer."""
        told = [word for one in rounds for word in ("--round", json.dumps(one))]
        self.daemon.backend.knobs = ("--record", str(self.record), *told, *knobs)

    def questions(self) -> list[dict[str, Any]]:
        """The bodies that the engine got."""
        lines = [json.loads(line) for line in self.record.read_text().splitlines()]
        return [json.loads(line["body"]) for line in lines if line.get("path") == CHAT]

    async def ask(self, **more: Any) -> tuple[aiohttp.ClientResponse, Any]:
        async with asyncio.timeout(HUNG), self.daemon.tcp.post(CHAT, json=BODY | more) as answer:
            return answer, await answer.json()

    async def stream(self, **more: Any) -> tuple[str, list[tuple[str, Any]]]:
        """The stream, and each of its events: a name, "" for none, and the data."""
        async with asyncio.timeout(HUNG), self.daemon.tcp.post(CHAT, json=BODY | {"stream": True} | more) as answer:
            text = await answer.text()
        events = []
        for block in text.split("\n\n"):
            fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
            if "data" in fields and fields["data"] != "[DONE]":
                events.append((fields.get("event", ""), json.loads(fields["data"])))
        return text, events


@pytest.fixture
async def served(start_daemon: StartDaemon, tmp_path: Path) -> Served:
    return Served(await start_daemon(models={"smol": 0}, mcp={"local": STDIO}, tools_time=20.0), tmp_path)


def text_of(events: list[tuple[str, Any]]) -> str:
    chunks = [data for name, data in events if not name and data["choices"]]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


async def test_the_model_gets_the_result_and_the_client_the_answer(served: Served) -> None:
    served.calls([ADD])
    answer, told = await served.ask()
    assert answer.status == 200
    choice = told["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "w0 w1 w2 ")
    assert "tool_calls" not in choice["message"]
    [call] = told["modelrunner_tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("local__add", {"a": 2, "b": 3})
    assert (call["result"], call["is_error"]) == ("5", False)
    first, second = served.questions()
    assert "modelrunner_tools" not in first
    assert "local__add" in [tool["function"]["name"] for tool in first["tools"]]
    said, result = second["messages"][-2:]
    assert (said["role"], said["tool_calls"][0]["function"]["name"]) == ("assistant", "local__add")
    assert result == {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "5"}
    assert told["usage"]["completion_tokens"] == 6
    assert told["usage"]["total_tokens"] == 12


async def test_a_stream_has_each_call_as_an_event(served: Served) -> None:
    served.calls([ADD, ["local__environment", {"name": "COLOUR"}]])
    text, events = await served.stream(stream_options={"include_usage": True})
    assert text.endswith("data: [DONE]\n\n")
    assert text.count("[DONE]") == 1
    names = [name for name, _ in events if name]
    assert sorted(names) == ["modelrunner.tool_call"] * 2 + ["modelrunner.tool_result"] * 2
    results = {
        data["modelrunner_tool_result"]["name"]: data["modelrunner_tool_result"]
        for _, data in events[-9:]
        if "modelrunner_tool_result" in data
    }
    assert results["local__add"]["result"] == "5"
    assert results["local__environment"]["result"] == "blue"
    assert text_of(events) == "w0 w1 w2 w0 w1 w2 "
    assert len({data["id"] for _, data in events}) == 1
    assert all(data["object"] == "chat.completion.chunk" for _, data in events)  # what other clients take them for
    assert not any("tool_calls" in json.dumps(data["choices"]) for _, data in events)
    ends = [data["choices"][0]["finish_reason"] for _, data in events if data["choices"]]
    assert [end for end in ends if end] == ["stop"]
    assert events[-1][1]["usage"]["completion_tokens"] == 6
    again = await served.stream()
    assert not any(data.get("usage") for _, data in again[1])


async def test_http_servers(start_daemon: StartDaemon, http: str, tmp_path: Path) -> None:
    served = Served(await start_daemon(models={"smol": 0}, mcp={"web": {"url": http}}), tmp_path)
    served.calls([["web__add", {"a": 1, "b": 1}]])
    while (found := await served.ask())[0].status == 502:  # it is yet to listen
        assert found[1]["error"]["code"] == "tool_server_failed"
    assert [call["result"] for call in found[1]["modelrunner_tool_calls"]] == ["2"]


async def test_calls_of_the_clients_own_tools_go_to_the_client(served: Served) -> None:
    served.calls([ADD], [["mine", {"x": 1}]])
    _, told = await served.ask(tools=[MINE])
    [call] = told["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], told["choices"][0]["finish_reason"]) == ("mine", "tool_calls")
    assert len(told["modelrunner_tool_calls"]) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_of_calls_of_both_the_client_gets_its_own(served: Served, stream: bool) -> None:
    served.calls([ADD, ["mine", {"x": 1}]])
    if stream:
        _, events = await served.stream(tools=[MINE])
        parts = [
            part for _, data in events for choice in data["choices"] for part in choice["delta"].get("tool_calls", ())
        ]
        assert {part["index"] for part in parts} == {0}
        assert parts[0]["function"]["name"] == "mine"
        assert json.loads("".join(part["function"]["arguments"] for part in parts)) == {"x": 1}
        assert not any(name for name, _ in events)
    else:
        _, told = await served.ask(tools=[MINE])
        assert [call["function"]["name"] for call in told["choices"][0]["message"]["tool_calls"]] == ["mine"]
        assert told["modelrunner_tool_calls"] == []
    assert len(served.questions()) == 1


async def test_a_clients_tool_hides_one_of_the_same_name(served: Served) -> None:
    served.calls([ADD])
    same = {"type": "function", "function": {"name": "local__add"}}
    _, told = await served.ask(tools=[same])
    assert [call["function"]["name"] for call in told["choices"][0]["message"]["tool_calls"]] == ["local__add"]
    assert [tool["function"]["name"] for tool in served.questions()[0]["tools"]].count("local__add") == 1


FAILING: list[tuple[list[Any], str]] = [
    (["local__fail", {}], "fail"),
    (["local__add", {"a": "x"}], ""),
    (["local__nothing", {}], "nothing"),
    (["nobody__add", {}], "there is no tool 'nobody__add'"),
    (["unheard", {}], "there is no tool 'unheard'"),
    (["local__add", [1, 2]], "not a JSON object"),
]


async def test_what_fails_is_the_tools_result(served: Served) -> None:
    served.calls([call for call, _ in FAILING], [["local__die", {}]], [ADD])
    answer, told = await served.ask()
    assert answer.status == 200
    *made, died, after = told["modelrunner_tool_calls"]
    for one, (call, why) in zip(made, FAILING, strict=True):
        assert (one["name"], one["is_error"]) == (call[0], True)
        assert why in one["result"]
    assert (died["is_error"], after["result"]) == (True, "5")
    assert "the MCP server local" in died["result"]
    messages = served.questions()[1]["messages"]
    assert [message["content"] for message in messages[-len(made) :]] == [one["result"] for one in made]
    said = messages[-len(made) - 1]["tool_calls"]
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in said)


async def test_a_required_call_holds_once(served: Served) -> None:
    served.calls([ADD])
    await served.ask(tools=[MINE], tool_choice={"type": "function", "function": {"name": "local__add"}})
    first, second = served.questions()
    assert (first["tool_choice"], second["tool_choice"]) == ("required", "auto")
    assert [tool["function"]["name"] for tool in first["tools"]] == ["local__add"]  # llama.cpp knows no other way
    assert len(second["tools"]) > 2
    answer, told = await served.ask(tool_choice={"type": "function", "function": {"name": "local__none"}})
    assert (answer.status, told["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("stream", [False, True])
async def test_after_the_last_round_the_model_has_to_answer(
    start_daemon: StartDaemon, tmp_path: Path, stream: bool
) -> None:
    daemon = await start_daemon(models={"smol": 0}, mcp={"local": STDIO}, tools_rounds=2)
    served = Served(daemon, tmp_path)
    served.calls([ADD], [ADD], [ADD], [ADD])
    if stream:
        _, events = await served.stream()
        assert [name for name, _ in events if name] == ["modelrunner.tool_call", "modelrunner.tool_result"] * 2
    else:
        _, told = await served.ask()
        assert len(told["modelrunner_tool_calls"]) == 2
        assert told["choices"][0]["finish_reason"] == "stop"
    assert ["tools" in asked for asked in served.questions()] == [True, True, False]


async def test_a_model_that_calls_even_then_is_cut_short(start_daemon: StartDaemon, tmp_path: Path) -> None:
    served = Served(await start_daemon(models={"smol": 0}, mcp={"local": STDIO}, tools_rounds=1), tmp_path)
    served.calls([ADD], [ADD])
    _, told = await served.ask(tools=[MINE])  # the fake engine calls as long as there are tools
    assert told["choices"][0]["finish_reason"] == "length"
    assert "tool_calls" not in told["choices"][0]["message"]
    _, events = await served.stream(tools=[MINE])
    assert [data["choices"][0]["finish_reason"] for _, data in events if data["choices"]][-1] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_time_is_bounded(start_daemon: StartDaemon, tmp_path: Path, stream: bool) -> None:
    served = Served(await start_daemon(models={"smol": 0}, mcp={"local": STDIO}, tools_loop_time=2.0), tmp_path)
    served.calls([["local__sleep", {"seconds": 600}]])
    if stream:
        async with served.daemon.tcp.post(CHAT, json=BODY | {"stream": True}) as begun:
            text = ""
            with suppress(aiohttp.ClientPayloadError):  # if its head was out
                async for line in begun.content:
                    text += line.decode()
        assert "timed_out" in text
        assert "[DONE]" not in text
    else:
        answer, told = await served.ask()
        assert (answer.status, told["error"]["code"]) == (504, "timed_out")
        assert "tools_loop_time" in told["error"]["message"]


async def test_a_client_that_leaves_ends_the_call(served: Served) -> None:
    served.calls([["local__process", {}]], [["local__sleep", {"seconds": 600}]])
    async with served.daemon.tcp.post(CHAT, json=BODY | {"stream": True}) as answer:
        text = b""
        while b"local__sleep" not in text:
            text += await answer.content.readany()
        answer.close()
    status = await _now(served.daemon)
    await _until_idle(served.daemon)
    assert status["runners"][0]["leases"] == 0  # the model is free while a tool works
    assert len(served.questions()) == 2


async def test_a_client_that_leaves_ends_the_engines_work(served: Served, tmp_path: Path) -> None:
    served.calls(knobs=("--token-gate", str(tmp_path / "never")))
    async with served.daemon.tcp.post(CHAT, json=BODY | {"stream": True}) as answer:
        text = b""
        while b"w0" not in text:
            text += await answer.content.readany()
        answer.close()
    await until(lambda: '"left"' in served.record.read_text())
    await _until_idle(served.daemon)


async def test_a_loop_is_one_request_that_can_be_cancelled(served: Served) -> None:
    served.calls([["local__sleep", {"seconds": 600}]])
    asking = asyncio.create_task(served.ask())
    while not (running := (await _now(served.daemon))["requests"]) or not served.questions():
        assert not asking.done()
    async with served.daemon.unix.post(f"/engines/requests/{running[0]['request_id']}/cancel") as answer:
        assert answer.status == 200
    refused, told = await asking
    assert (refused.status, told["error"]["code"]) == (503, "request_cancelled")
    async with served.daemon.unix.get("/engines/requests") as answer:
        [one] = await answer.json()
    assert (one["status"], one["model_name"]) == (503, "smol")


async def test_the_engines_refusals_and_deaths(served: Served) -> None:
    served.calls(knobs=("--status", "400"))
    answer, told = await served.ask()
    assert (answer.status, told["error"]["message"]) == (400, "as you wished")
    async with served.daemon.unix.post("/engines/unload", json={"all": True}):
        pass
    served.calls([ADD], knobs=("--die", "1", "--only-for", '"role":"tool"'))
    answer, told = await served.ask()
    assert (answer.status, "ended by signal 9" in told["error"]["message"]) == (502, True)


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (CHAT, {"modelrunner_tools": "always"}, "modelrunner_tools"),
        (CHAT, {"modelrunner_tools": 1}, "modelrunner_tools"),
        (CHAT, {"modelrunner_tool": "auto"}, "modelrunner_tool"),
        (CHAT, {"n": 2}, "n"),
        (CHAT, {"messages": "hello"}, None),
        (CHAT, {"tools": {}}, None),
        ("/v1/completions", {"prompt": "x"}, "modelrunner_tools"),
        ("/v1/embeddings", {"input": "x"}, "modelrunner_tools"),
        ("/v1/responses", {"input": "x"}, "modelrunner_tools"),
    ],
)
async def test_what_is_refused(served: Served, path: str, more: dict[str, Any], param: str | None) -> None:
    async with served.daemon.tcp.post(path, json=BODY | more) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == param


async def test_without_tools_it_is_refused_and_costs_nothing(start_daemon: StartDaemon, tmp_path: Path) -> None:
    for name, settings in (("none", {}), ("off", {"mcp": {"local": STDIO}, "tools_rounds": 0})):
        served = Served(await start_daemon(models={"smol": 0}, folder=tmp_path / name, **settings), tmp_path)
        answer, told = await served.ask()
        assert (answer.status, told["error"]["param"]) == (400, "modelrunner_tools")
        assert "tools are off here" in told["error"]["message"]
        assert served.daemon.backend.runs == 0


async def test_servers_that_fail(start_daemon: StartDaemon, tmp_path: Path) -> None:
    gone = {"command": ["/no/such/program"]}
    served = Served(await start_daemon(models={"smol": 0}, folder=tmp_path / "a", mcp={"gone": gone}), tmp_path)
    answer, told = await served.ask()
    assert (answer.status, told["error"]["code"]) == (502, "tool_server_failed")
    mcp = {"gone": gone, "local": STDIO}
    served = Served(await start_daemon(models={"smol": 0}, folder=tmp_path / "b", mcp=mcp), tmp_path)
    served.calls([ADD])
    answer, told = await served.ask()
    assert (answer.status, answer.headers["X-Modelrunner-Tools-Missing"]) == (200, "gone")


async def test_keys(served: Served) -> None:
    served.calls([ADD])
    heads = []
    for name, more in (
        ("any", {"tokens_per_minute": 5}),
        ("other", {"models": ["another*"]}),
        ("models", {"scopes": ["models"]}),
    ):
        async with served.daemon.unix.post("/keys", json={"name": name, **more}) as made:
            heads.append({"Authorization": f"Bearer {(await made.json())['text']}"})
    statuses = []
    for head in (*heads[1:], heads[0], heads[0]):
        async with served.daemon.tcp.post(CHAT, json=BODY, headers=head) as answer:
            statuses.append(answer.status)
    assert statuses == [403, 403, 200, 429]  # the tokens of both answers counted


async def test_a_keys_limit_of_tokens_holds_for_each_answer_of_the_model(served: Served) -> None:
    async with served.daemon.unix.post("/keys", json={"name": "kim", "max_tokens": 2}) as made:
        head = {"X-API-Key": (await made.json())["text"]}
    served.calls([ADD])
    async with served.daemon.tcp.post(CHAT, json=BODY, headers=head) as answer:
        told = await answer.json()
    assert [asked["max_tokens"] for asked in served.questions()] == [2, 2]
    assert told["choices"][0]["message"]["content"] == "w0 w1 "


async def test_an_answer_that_breaks_off_counts_too(served: Served) -> None:
    """The engine has read its prompt, whatever ended it."""
    async with served.daemon.unix.post("/engines/_configure", json={"model": "smol", "max-seconds": 0.3}) as answer:
        assert answer.status == 202
    served.calls([ADD], knobs=("--token-gate", str(served.record.parent / "never")))
    _, told = await served.ask()
    assert told["error"]["code"] == "request_too_long"
    async with served.daemon.unix.get("/engines/requests") as answer:
        [found] = await answer.json()
    assert found["prompt_tokens"] > 0


async def test_an_alias_and_a_cold_model(start_daemon: StartDaemon, tmp_path: Path) -> None:
    daemon = await start_daemon(models={"smol": 0}, mcp={"local": STDIO}, aliases={"gpt": "smol"})
    served = Served(daemon, tmp_path)
    served.calls([ADD])
    answer, _ = await served.ask(model="gpt")
    assert (answer.status, answer.headers["X-Modelrunner-Model"]) == (200, "smol")
    assert [asked["model"] for asked in served.questions()] == ["smol", "smol"]
    headers = {"X-Progress": "events"}
    async with daemon.unix.post("/engines/unload", json={"all": True}):
        pass
    async with daemon.tcp.post(CHAT, json=BODY | {"stream": True}, headers=headers) as stream:
        text = await stream.text()
    assert "event: modelrunner.progress" in text
    assert text.endswith("data: [DONE]\n\n")


async def test_nothing_is_left_when_the_daemon_ends(served: Served) -> None:
    served.calls([["local__process", {}]], [["local__sleep", {"seconds": 600}]])
    asking = asyncio.create_task(served.ask())
    while len(served.questions()) < 2:
        await asyncio.sleep(0)
        assert not asking.done()
    pid = int(served.questions()[1]["messages"][-1]["content"])
    async with served.daemon.unix.post("/shutdown"):
        pass
    await served.daemon.task
    assert not psutil.pid_exists(pid)
    await asyncio.gather(asking, return_exceptions=True)


async def _now(daemon: Daemon) -> Any:
    async with daemon.unix.get("/engines/now") as answer:
        return await answer.json()


async def _until_idle(daemon: Daemon) -> None:
    async with asyncio.timeout(HUNG):
        while (await _now(daemon))["running"]:
            pass
