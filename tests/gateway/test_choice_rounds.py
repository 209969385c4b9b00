"""More choices than an engine makes at once: it is asked in rounds, and the client gets one answer."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.gateway.fakes import SSE, Call, chunk
from tests.gateway.harness import CHAT, Proxy, proxy, request

END = b"0\r\n\r\n"
COMPLETIONS = "/v1/completions"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def event(data: Any) -> bytes:
    return chunk(b"data: %b\n\n" % (data if isinstance(data, bytes) else msgspec.json.encode(data)))


async def engine(call: Call) -> None:
    """An engine that makes two choices at once, and numbers them and their usage as llama.cpp does."""
    body = msgspec.json.decode(call.request.body)
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) else ["x"]
    copies, seed = body.get("n", 1), body.get("seed", 0)
    same = {"id": f"id{seed}", "object": "x.chunk", "created": seed, "model": "m"}
    sent = [SSE]
    for index in range(copies * len(prompts)):
        text = f"{prompts[index // copies]}{seed + index % copies}"
        said = {"delta": {"content": text}} if "messages" in body else {"text": text}
        usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        sent.append(event({**same, "choices": [{"index": index, "finish_reason": None, **said}]}))
        sent.append(event({**same, "choices": [{"index": index, "finish_reason": "stop", "delta": {}}]}))
        sent.append(event({**same, "choices": [], "usage": usage}))
    await call.send(b"".join((*sent, event(b"[DONE]"), END)))


def of_two_sequences(served: Proxy) -> Proxy:
    served.runner.spec.parallel = 2
    served.runner.change([CHAT, COMPLETIONS], choices_by_sequence=True, as_stream=STREAM)
    return served


def ask(path: str = CHAT, **more: Any) -> bytes:
    said: dict[str, Any] = {"messages": []} if path == CHAT else {}
    return request(path, {"model": "m", **said, **more})


def asked(served: Proxy) -> list[tuple[Any, Any, Any]]:
    bodies = [msgspec.json.decode(received.body) for received in served.engine.received]
    return [(body["n"], body.get("seed"), body.get("n_cmpl")) for body in bodies]


async def test_a_plain_answer_has_the_choices_of_all_rounds(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, engine) as served:
        answer = await of_two_sequences(served).ask(ask(n_cmpl=5, seed=10))
        assert asked(served) == [(2, 10, None), (2, 12, None), (1, 14, None)]
        found = answer.json()
        texts = [(choice["index"], choice["message"]["content"]) for choice in found["choices"]]
        assert texts == [(index, f"x{10 + index}") for index in range(5)]
        assert (found["id"], found["created"]) == ("id10", 10)
        usage = found["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 10, 15)


async def test_choices_of_a_prompt_follow_each_other(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, engine) as served:
        answer = await of_two_sequences(served).ask(ask(COMPLETIONS, prompt=["a", "b"], n=3, seed=1))
        texts = [(choice["index"], choice["text"]) for choice in answer.json()["choices"]]
        assert texts == list(enumerate(["a1", "a2", "a3", "b1", "b2", "b3"]))
        assert answer.json()["usage"]["prompt_tokens"] == 10


@pytest.mark.parametrize("total", [True, False])
async def test_a_stream_has_one_name_one_usage_and_one_end(folder: Path, kind: str, total: bool) -> None:
    async with proxy(folder, kind, engine) as served:
        of_two_sequences(served)
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if total else {}
        answer = await served.ask(ask(stream=True, n=3, seed=4, **options))
        lines = [line[6:] for line in answer.body.split(b"\n\n") if line.startswith(b"data: ")]
        assert [line for line in lines if line == b"[DONE]"] == lines[-1:]
        events = [msgspec.json.decode(line) for line in lines[:-1]]
        assert {one["id"] for one in events} == {"id4"}
        choices = [choice for one in events for choice in one["choices"]]
        texts = {choice["index"]: text for choice in choices if (text := choice["delta"].get("content"))}
        assert texts == {0: "x4", 1: "x5", 2: "x6"}
        assert sorted(choice["index"] for choice in choices if choice["finish_reason"]) == [0, 1, 2]
        if total:
            [usage] = [one["usage"] for one in events if one.get("usage")]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 6)


async def test_an_engine_without_the_limit_is_asked_once(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, engine) as served:
        of_two_sequences(served).runner.change([CHAT], choices_by_sequence=False)
        await served.ask(ask(n=5))
        assert asked(served) == [(5, None, None)]
        of_two_sequences(served)
        await served.ask(ask(n=2))
        assert asked(served)[1:] == [(2, None, None)]


async def test_the_number_of_choices_is_bounded(folder: Path, kind: str) -> None:
    async with proxy(folder, kind, engine) as served:
        answer = await of_two_sequences(served).ask(ask(n=129))
        assert (answer.status, answer.error["param"], served.engine.received) == (400, "n", [])
        assert len((await served.ask(ask(n=128))).json()["choices"]) == 128


@pytest.mark.parametrize("stream", [True, False])
async def test_a_fault_of_a_later_round_ends_the_answer(folder: Path, kind: str, stream: bool) -> None:
    async def failing(call: Call) -> None:
        if len(served.engine.received) == 1:
            await engine(call)
        else:
            told = {"error": {"code": 400, "message": "no more"}}
            await call.send(SSE + event(told) + END)

    async with proxy(folder, kind, failing) as served:
        answer = await of_two_sequences(served).ask(ask(n=6, stream=stream))
        assert len(served.engine.received) == 2
        if stream:
            assert b"no more" in answer.body
        else:
            assert (answer.status, answer.error["message"]) == (400, "no more")


@pytest.mark.parametrize("streams", [0, 1])
async def test_an_engine_that_gives_no_stream_is_told(folder: Path, kind: str, streams: int) -> None:
    """Of the first round, or of a later one."""

    async def whole(call: Call) -> None:
        if len(served.engine.received) <= streams:
            await engine(call)
        else:
            data = b'{"choices": []}'
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
            await call.send(head + data)

    async with proxy(folder, kind, whole) as served:
        answer = await of_two_sequences(served).ask(ask(n=6, stream=True))
        assert b"the engine fake gives no stream" in answer.body
        assert len(served.engine.received) == streams + 1
