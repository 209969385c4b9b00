"""Ollama's family: what its requests become for the engine, and the engine's answers for its clients."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from modelrunner.errors import Unavailable
from modelrunner.gateway.dialects.ollama_context import context_of
from modelrunner.http.limits import Limits
from tests.gateway.fakes import SSE, Call, Script, event
from tests.gateway.harness import CHAT, Answer, Proxy, proxy, request

HELLO = {"role": "user", "content": "hello"}
PNG = "iVBORw0KGgoAAAANSUhEUg=="
USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}
TIMINGS = {"timings": {"prompt_ms": 20.5, "predicted_ms": 1000}}
STOP = {"choices": [{"delta": {}, "finish_reason": "stop"}]}


def chat(**more: Any) -> bytes:
    return request("/api/chat", {"model": "m", "messages": [HELLO]} | more)


def generate(**more: Any) -> bytes:
    return request("/api/generate", {"model": "m", "prompt": "hello"} | more)


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def answering(*chunks: dict[str, Any], size: int = 1 << 20) -> Script:
    """An engine that streams these, `size` bytes at a time."""

    async def script(call: Call) -> None:
        whole = b"".join(event(msgspec.json.encode(one).decode()) for one in chunks) + event("[DONE]") + b"0\r\n\r\n"
        await call.send(SSE)
        for start in range(0, len(whole), size):
            await call.send(whole[start : start + size])

    return script


def lines(answer: Answer) -> list[dict[str, Any]]:
    assert answer.complete
    return [msgspec.json.decode(line) for line in answer.body.splitlines()]


def asked(served: Proxy) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(served.engine.received[-1].body)
    return found


SAID = (delta(role="assistant", content=None), delta(content="Hel"), delta(content="lo €"), STOP, USAGE | TIMINGS)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
async def test_a_chat_is_streamed_line_by_line(folder: Path, kind: str, size: int) -> None:
    async with proxy(folder, kind, answering(*SAID, size=size)) as served:
        answer = await served.ask(chat())
        assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")
        *pieces, last = lines(answer)
        assert [piece["message"]["content"] for piece in pieces] == ["Hel", "lo €"]
        assert all(piece["model"] == "m" and not piece["done"] and piece["created_at"] for piece in pieces)
        assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
        assert (last["prompt_eval_count"], last["eval_count"]) == (5, 3)
        assert (last["prompt_eval_duration"], last["eval_duration"]) == (20_500_000, 1_000_000_000)
        assert last["total_duration"] >= last["load_duration"] >= 0
        assert served.engine.received[-1].path == CHAT
        assert asked(served)["messages"] == [HELLO]
        assert asked(served)["stream_options"] == {"include_usage": True}


async def test_a_chat_in_one_piece(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, answering(*SAID)) as served:
        answer = await served.ask(chat(stream=False))
        assert answer.headers["content-type"] == "application/json"
        found = answer.json()
        assert found["message"] == {"role": "assistant", "content": "Hello €"}
        assert (found["done"], found["done_reason"], found["eval_count"]) == (True, "stop", 3)


async def test_a_generation(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, answering(*SAID)) as served:
        assert [line["response"] for line in lines(await served.ask(generate(system="be kind")))] == ["Hel", "lo €", ""]
        assert asked(served)["messages"] == [{"role": "system", "content": "be kind"}, HELLO]
        assert (await served.ask(generate(stream=False))).json()["response"] == "Hello €"


@pytest.mark.parametrize("raw", [True, False])
async def test_a_raw_prompt_and_a_model_without_a_template(folder: Path, kind: str, raw: bool) -> None:
    chunks = ({"choices": [{"text": "a"}]}, {"choices": [{"text": "", "finish_reason": "length"}]})
    async with proxy(folder, kind, answering(*chunks)) as served:
        if not raw:
            served.runner.spec.bundle.capabilities = frozenset({"completion"})
        answer = await served.ask(generate(raw=raw, logprobs=True))
        assert answer.headers["x-modelrunner-ignored"] == "logprobs"
        first, last = lines(answer)
        assert (first["response"], last["done_reason"]) == ("a", "length")
        assert served.engine.received[-1].path == "/v1/completions"
        assert asked(served)["prompt"] == "hello"


async def test_without_the_engines_timings_the_durations_are_measured(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, answering(delta(content="a"), STOP, USAGE)) as served:
        last = lines(await served.ask(chat()))[-1]
        assert last["eval_count"] == 3
        assert 0 < last["prompt_eval_duration"] + last["eval_duration"] <= last["total_duration"]


async def test_options_are_mapped_and_others_are_named(folder: Path, kind: str) -> None:
    options = {"temperature": 0, "num_predict": 7, "stop": ["x"], "seed": 1, "repeat_penalty": 1.1, "top_k": None}
    async with proxy(folder, kind, answering(*SAID)) as served:
        answer = await served.ask(chat(options=options | {"num_ctx": 9000, "num_gpu": 1}))
        assert answer.headers["x-modelrunner-ignored"] == "options.num_ctx, options.num_gpu"
        found = asked(served)
        assert (found["temperature"], found["max_tokens"], found["stop"], found["seed"]) == (0, 7, ["x"], 1)
        assert (found["repeat_penalty"], found["repetition_penalty"]) == (1.1, 1.1)
        assert not {"top_k", "num_ctx", "options"} & set(found)
        assert "x-modelrunner-ignored" not in (await served.ask(chat(options={"num_predict": -1}))).headers
        assert "max_tokens" not in asked(served)


async def test_a_named_option_is_no_line_of_the_head(folder: Path, kind: str) -> None:
    options = {"x\r\nX-Evil: 1\r\n\r\nHTTP/1.1 200 OK": 1, "y" * 100_000: 1} | {f"z{n}": n for n in range(100)}
    async with proxy(folder, kind, answering(*SAID)) as served:
        answer = await served.ask(chat(options=options))
        names = answer.headers["x-modelrunner-ignored"].split(", ")
        assert names[0] == "options.x??X-Evil??1????HTTP?1.1?200?OK"
        assert (len(names), max(map(len, names))) == (32, 64)
        assert "x-evil" not in answer.headers
        assert lines(answer)[-1]["done"]


async def test_formats(folder: Path, kind: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    async with proxy(folder, kind, answering(*SAID)) as served:
        await served.ask(chat(format="json"))
        assert asked(served)["response_format"] == {"type": "json_object"}
        await served.ask(generate(format=schema))
        assert asked(served)["response_format"]["json_schema"]["schema"] == schema
        await served.ask(chat(format=""))
        assert "response_format" not in asked(served)


async def test_thinking(folder: Path, kind: str) -> None:
    thought = (delta(reasoning_content="hm"), delta(reasoning="..."), delta(content="yes"), STOP)
    async with proxy(folder, kind, answering(*thought)) as served:
        found = lines(await served.ask(chat(think="high")))
        assert [line["message"].get("thinking") for line in found] == ["hm", "...", None, None]
        assert asked(served)["chat_template_kwargs"] == {"enable_thinking": True}
        assert asked(served)["reasoning_effort"] == "high"
        await served.ask(chat(think=False))
        assert asked(served)["chat_template_kwargs"] == {"enable_thinking": False}


CALLS = (
    delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "sum", "arguments": '{"x":'}}]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": " 1}"}}]),
    delta(tool_calls=[{"index": 1, "id": "b", "function": {"name": "now", "arguments": ""}}]),
    {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
)


@pytest.mark.parametrize("stream", [True, False])
async def test_calls_of_tools_are_put_together(folder: Path, kind: str, stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]
    async with proxy(folder, kind, answering(*CALLS)) as served:
        found = lines(await served.ask(chat(tools=tools, stream=stream)))
        made = [call for line in found for call in line["message"].get("tool_calls", ())]
        assert [call["id"] for call in made] == ["a", "b"]
        calls = [call["function"] for call in made]
        assert [(call["name"], call["arguments"]) for call in calls] == [("sum", {"x": 1}), ("now", {})]
        assert found[-1]["done_reason"] == "stop"
        assert asked(served)["tools"] == tools


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_that_is_cut_off_is_text(folder: Path, kind: str, stream: bool) -> None:
    cut = {"choices": [{"delta": {}, "finish_reason": "length"}]}
    async with proxy(folder, kind, answering(CALLS[0], cut)) as served:
        found = lines(await served.ask(chat(stream=stream)))
        assert "".join(line["message"]["content"] for line in found) == '{"x":'
        assert found[-1]["done_reason"] == "length"


async def test_messages_with_calls_and_images(folder: Path, kind: str) -> None:
    call = {"function": {"name": "sum", "arguments": {"x": 1}}}
    other = {"function": {"name": "now", "arguments": {}}}
    said = [
        {"role": "user", "content": "look", "images": [PNG]},
        {"role": "assistant", "content": "", "tool_calls": [call, other]},
        {"role": "tool", "content": "12:00", "tool_name": "now"},
        {"role": "tool", "content": "2"},
    ]
    async with proxy(folder, kind, answering(*SAID)) as served:
        await served.ask(chat(messages=said))
        first, second, third, fourth = asked(served)["messages"]
        assert first["content"][1] == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
        assert [made["function"] for made in second["tool_calls"]] == [
            {"name": "sum", "arguments": '{"x":1}'},
            {"name": "now", "arguments": "{}"},
        ]
        ids = [made["id"] for made in second["tool_calls"]]
        assert [third["tool_call_id"], fourth["tool_call_id"]] == ids[::-1]


async def test_results_keep_the_ids_of_their_calls(folder: Path, kind: str) -> None:
    """Clients that know IDs, as LangChain's, write them into both messages."""
    calls = [{"id": id, "type": "function", "function": {"name": "sum", "arguments": {}}} for id in ("a", "b")]
    said: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [*calls, {"function": {"name": "sum", "arguments": {}}}]},
        {"role": "tool", "content": "2", "tool_call_id": "b", "tool_name": "sum"},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "tool", "content": "3", "tool_name": ""},
    ]
    async with proxy(folder, kind, answering(*SAID)) as served:
        await served.ask(chat(messages=said))
        made, *results = asked(served)["messages"]
        ids = [call["id"] for call in made["tool_calls"]]
        assert ids[:2] == ["a", "b"]
        assert [result["tool_call_id"] for result in results] == ["b", "a", ids[2]]


async def test_logprobs(folder: Path, kind: str) -> None:
    token = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    chunk = {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [token]}}]}
    async with proxy(folder, kind, answering(chunk, STOP)) as served:
        assert lines(await served.ask(chat(logprobs=True, top_logprobs=2)))[0]["logprobs"] == [token]
        assert (asked(served)["logprobs"], asked(served)["top_logprobs"]) == (True, 2)
        assert (await served.ask(chat(logprobs=True, stream=False))).json()["logprobs"] == [token]


async def test_an_empty_request_loads_and_with_no_keep_alive_unloads(folder: Path, kind: str) -> None:
    async with proxy(folder, kind) as served:
        found = (await served.ask(chat(messages=[], keep_alive="10m"))).json()
        assert (found["done"], found["done_reason"], found["message"]["content"]) == (True, "load", "")
        assert served.scheduler.keep_alive is not None
        assert served.scheduler.keep_alive.seconds == 600
        assert (await served.ask(generate(prompt="", stream=False))).json()["done_reason"] == "load"
        granted = served.scheduler.granted
        for keep_alive in (0, "0", "0s"):
            assert (await served.ask(generate(prompt="", keep_alive=keep_alive))).json()["done_reason"] == "unload"
        assert served.scheduler.unloaded == ["m", "m", "m"]
        assert served.scheduler.granted == granted
        assert not served.engine.received
        assert (await served.ask(chat(model="nope", messages=[], keep_alive=0))).status == 404


@pytest.mark.parametrize(("given", "seconds"), [(-1, float("inf")), ("-1m", float("inf")), (90, 90.0), ("2m", 120.0)])
async def test_keep_alive_of_a_chat(folder: Path, kind: str, given: object, seconds: float) -> None:
    async with proxy(folder, kind, answering(*SAID)) as served:
        await served.ask(chat(keep_alive=given))
        assert served.scheduler.keep_alive is not None
        assert served.scheduler.keep_alive.seconds == seconds


@pytest.mark.parametrize("stream", [True, False])
async def test_a_context_goes_on_with_the_conversation(folder: Path, kind: str, stream: bool) -> None:
    async with proxy(folder, kind, answering(*SAID)) as served:
        first = lines(await served.ask(generate(stream=stream, system="be brief", images=[PNG])))[-1]
        assert all(type(number) is int and 0 <= number < 1 << 24 for number in first["context"])
        second = lines(await served.ask(generate(prompt="and?", stream=stream, context=first["context"])))[-1]
        said = [("system", "be brief"), ("user", "hello"), ("assistant", "Hello €"), ("user", "and?")]
        assert [(one["role"], one["content"]) for one in asked(served)["messages"]] == said
        await served.ask(generate(prompt="x", stream=stream, context=second["context"], system="be long"))
        said = [("system", "be long"), *said[1:], ("assistant", "Hello €"), ("user", "x")]
        assert [(one["role"], one["content"]) for one in asked(served)["messages"]] == said
        assert "context" not in lines(await served.ask(generate(stream=stream, raw=True)))[-1]
        assert "context" not in lines(await served.ask(chat(stream=stream)))[-1]


async def embeddings(call: Call) -> None:
    data = [{"index": 1, "embedding": [0.25, 1e-9]}, {"index": 0, "embedding": [1, 2]}]
    body = msgspec.json.encode({"data": data, "usage": {"prompt_tokens": 4}})
    await call.send(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )


async def test_embeddings(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, embeddings) as served:
        answer = await served.ask(request("/api/embed", {"model": "m", "input": ["a", "b"], "options": {"num_ctx": 1}}))
        found = answer.json()
        assert (found["embeddings"], found["prompt_eval_count"]) == ([[1, 2], [0.25, 1e-9]], 4)
        assert answer.headers["x-modelrunner-ignored"] == "options.num_ctx"
        assert asked(served) == {"model": "m", "input": ["a", "b"], "encoding_format": "float"}
        old = await served.ask(request("/api/embeddings", {"model": "m", "prompt": "a"}))
        assert old.json() == {"embedding": [1, 2]}
        assert asked(served)["input"] == "a"
        empty = await served.ask(request("/api/embed", {"model": "m", "input": []}))
        assert empty.json() == {"model": "m", "embeddings": []}


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        (chat(model="nope"), 404, "there is no model"),
        (chat(model=7), 400, "model"),
        (chat(messages="hello"), 400, "messages"),
        (chat(messages=[{"content": "x"}]), 400, "role"),
        (chat(options={"temperature": "hot"}), 400, "options.temperature"),
        (chat(format=7), 400, "format"),
        (chat(keep_alive="soon"), 400, "keep-alive"),
        (generate(context=[1, 2]), 400, "context"),
        (generate(context=[-1]), 400, "context"),
        (generate(context=context_of([("user", "a")])[:-1]), 400, "context"),
        (generate(context=[*context_of([("user", "a")])[:4], 1 << 24]), 400, "context"),
        (generate(context=context_of([("user", "a")]), raw=True), 400, "raw"),
        (generate(template="{{ .Prompt }}"), 400, "template"),
        (generate(suffix="x"), 400, "suffix"),
        (generate(raw=True, images=[PNG]), 400, "images"),
        (request("/api/chat", b"{"), 400, "JSON"),
        (request("/api/embed", {"input": "x"}), 400, "model"),
        (request("/api/nothing", {}), 404, "there is no POST /api/nothing"),
        (chat(padding="x" * 5000), 413, "4096"),
    ],
)
async def test_refusals_have_ollamas_shape(folder: Path, kind: str, data: bytes, status: int, said: str) -> None:
    async with proxy(folder, kind, limits=Limits(body=4096)) as served:
        answer = await served.ask(data)
        assert (answer.status, list(answer.json())) == (status, ["error"])
        assert said in answer.json()["error"]
        assert not served.engine.received


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_breaks_off(folder: Path, kind: str, stream: bool) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + event(msgspec.json.encode(delta(content="a")).decode()))
        call.close()

    async with proxy(folder, kind, script) as served:
        answer = await served.ask(chat(stream=stream))
        assert (answer.status, answer.complete) == ((200 if stream else 502), True)
        assert list(msgspec.json.decode(answer.body.splitlines()[-1])) == ["error"]


@pytest.mark.parametrize("text", ['{"error": {"message": "no more"}}', "what?", '{"choices": 7}'])
async def test_a_stream_with_an_error_ends_with_one(folder: Path, kind: str, text: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + event(msgspec.json.encode(delta(content="a")).decode()))
        await heard.wait()
        await call.send(event(text) + b"0\r\n\r\n")

    heard = asyncio.Event()
    async with proxy(folder, kind, script) as served:
        client = await served.connect()
        await client.send(chat())
        answer = await client.head()
        await client.more(answer)
        heard.set()
        while await client.more(answer):
            pass
        first, last = map(msgspec.json.decode, answer.body.splitlines())
        assert first["message"]["content"] == "a"
        assert list(last) == ["error"]
        assert answer.complete


async def test_an_engines_refusal_keeps_its_status(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        body = b'{"error":{"message":"the prompt is too long","code":400}}'
        await call.send(b"HTTP/1.1 400 X\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async with proxy(folder, kind, script) as served:
        answer = await served.ask(chat())
        assert (answer.status, answer.json()) == (400, {"error": "the prompt is too long"})


async def test_a_chat_that_waits_is_kept_open_by_spaces(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, answering(*SAID), limits=Limits(check_every=0.05, progress_after=0.0)) as served:
        served.scheduler.is_warm = False
        client = await served.connect()
        await client.send(chat())
        answer = await client.head()
        assert answer.headers["content-type"] == "application/x-ndjson"
        assert await client.more(answer) == b" "
        served.scheduler.gate.set()
        while await client.more(answer):
            pass
        assert lines(answer)[-1]["done"]


async def test_a_chat_that_is_refused_while_it_waits(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, limits=Limits(check_every=0.05, progress_after=0.0)) as served:
        served.scheduler.is_warm = False
        served.scheduler.refusal = Unavailable("it cannot be loaded")
        client = await served.connect()
        await client.send(chat())
        answer = await client.head()
        await client.more(answer)
        served.scheduler.gate.set()
        while await client.more(answer):
            pass
        assert msgspec.json.decode(answer.body) == {"error": "it cannot be loaded"}


async def test_a_client_that_leaves_stops_the_engine(folder: Path, kind: str) -> None:
    async def script(call: Call) -> None:
        await call.send(SSE + event(msgspec.json.encode(delta(content="a")).decode()))
        await call.left()
        call.close()

    async with proxy(folder, kind, script) as served:
        client = await served.connect()
        await client.send(chat())
        await client.more(await client.head())
        await client.leave()
        await served.engine.until(lambda engine: engine.open == 0)


async def test_an_engine_that_knows_its_own_names_only(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, answering(*SAID)) as served:
        served.runner.names = ("docker.io/ai/m:latest",)
        answer = await served.ask(chat())
        assert asked(served)["model"] == "docker.io/ai/m:latest"
        assert {line["model"] for line in lines(answer)} == {"m"}
