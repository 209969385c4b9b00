"""What a client or an engine sends takes work in proportion to its size, and is kept up to a limit: all requests share
one event loop."""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from modelrunner.batches import asking
from modelrunner.batches.batch import Batch, BatchState, Line
from modelrunner.engineapi import ApiShape
from modelrunner.errors import BadRequest, ContextTooLong
from modelrunner.gateway.calls import Inference, InferenceHead
from modelrunner.gateway.dialects.anthropic_request import MessageRequest
from modelrunner.gateway.dialects.ollama_request import ChatFields
from modelrunner.gateway.dialects.ollama_truncation import _shorter_chat
from modelrunner.gateway.dialects.one_piece import _SameEvents
from modelrunner.gateway.engine_request import EngineRequest
from modelrunner.gateway.interceptors import embedding_batcher
from modelrunner.gateway.request.schemas import plain_pattern
from modelrunner.gateway.request.tool_choice import choose_tools
from modelrunner.gateway.routes import match
from tests.gateway.fakes import SSE, Call, chunk
from tests.gateway.harness import CHAT, proxy, request
from tests.gateway.test_embedding_batcher import Engine, ask, together
from tests.gateway.test_tool_choice import allowed, functions, named

Work = Callable[[], object]


def results_of_tools(number: int) -> Work:
    """None of them is the result of an open call."""
    calls = [{"function": {"name": "a", "arguments": {}}}] * number
    messages = [{"role": "assistant", "tool_calls": calls}, *[{"role": "tool", "tool_name": "b"}] * number]
    return msgspec.convert({"model": "m", "messages": messages}, ChatFields).chat


def texts_of_a_message(number: int) -> Work:
    message = {"role": "assistant", "content": [{"type": "text", "text": "a" * 40}] * number}
    return msgspec.convert({"model": "m", "messages": [message]}, MessageRequest).chat


def dropped_messages(number: int) -> Work:
    system, user = {"role": "system", "content": ""}, {"role": "user", "content": "a"}
    fields = msgspec.convert({"model": "m", "messages": [system] * number + [user] * number}, ChatFields)
    route = match("/api/chat")
    assert route is not None
    head = InferenceHead(route, None, None, "", False, False, False)
    return partial(
        _shorter_chat, Inference(head, fields, None, b"", "1", 0.0), fields, ContextTooLong("", 1_000_000, 4096)
    )


def chosen_tools(number: int) -> Work:
    names = [f"a{place}" for place in range(number)]
    choice = allowed("auto", *(f"b{name}" for name in names), "a0")
    body = msgspec.json.encode({"tools": functions(*names), "tool_choice": choice})
    return lambda: choose_tools(EngineRequest(CHAT, body), ApiShape.CHAT, by_word=False)


def class_of_a_pattern(number: int) -> Work:
    return partial(plain_pattern, "[" + "\U0001f600" * number + "]")


def lines_of_an_event(number: int) -> Work:
    def work() -> None:
        events = _SameEvents()
        for _ in range(number):
            events.piece(b"data: %b\r\n" % (b"a" * 100))
        assert events.piece(b"\r\n").count(b"\n") == number + 1

    return work


def seconds(work: Work) -> float:
    taken = []
    for _ in range(3):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


@pytest.mark.parametrize(
    ("work", "size"),
    [
        (results_of_tools, 2000),
        (texts_of_a_message, 20_000),
        (dropped_messages, 2000),
        (chosen_tools, 1000),
        (class_of_a_pattern, 15_000),
        (lines_of_an_event, 4000),
    ],
)
def test_four_times_as_much_takes_four_times_as_long(work: Callable[[int], Work], size: int) -> None:
    assert seconds(work(4 * size)) < 8 * seconds(work(size))


def test_a_result_belongs_to_the_call_with_its_id_else_to_the_first_open_one_of_its_tool() -> None:
    calls = [
        {"id": id, "function": {"name": name, "arguments": {}}}
        for id, name in (("1", "a"), ("2", "b"), ("3", "a"), ("4", "b"), ("5", "a"))
    ]
    results: list[dict[str, str]] = [
        *({"tool_name": "b"}, {"tool_call_id": "3"}, {}, {"tool_name": "a"}, {"tool_call_id": "3"}),
        *({"tool_name": "a"}, {"tool_name": "b"}, {}),
    ]
    messages = [{"role": "assistant", "tool_calls": calls}, *({"role": "tool", **result} for result in results)]
    chat = msgspec.convert({"model": "m", "messages": messages}, ChatFields).chat()
    found = [message["tool_call_id"] for message in chat["messages"][1:]]
    assert found == ["2", "3", "1", "5", "3", "call_0", "4", "call_0"]


@pytest.mark.parametrize("step", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\n\r\n", b"\r\n\n"])
def test_events_end_however_they_are_cut(step: int, end: bytes) -> None:
    data = b"a: 1\r\nb: 2" + end + b"c: 3" + end + end + b"d: 4\r\ne"
    events = _SameEvents()
    found = b"".join(events.piece(data[at : at + step]) for at in range(0, len(data), step)) + events.end()
    assert found == b"a: 1\nb: 2\n\nc: 3\n\nd: 4\ne"


@pytest.mark.parametrize(
    "choice",
    [allowed("auto", *(f"b{place}" for place in range(10_000))), named("b" * 100_000)],
)
def test_the_error_names_few_of_the_missing_tools(choice: Any) -> None:
    body = msgspec.json.encode({"tools": functions("a"), "tool_choice": choice})
    with pytest.raises(BadRequest, match="names 'b") as caught:
        choose_tools(EngineRequest(CHAT, body), ApiShape.CHAT, by_word=True)
    assert len(str(caught.value)) < 1000


OBJECTS = b'{"model":"m","messages":[],"stop":[%b{}]}' % (b"{}," * 100_000)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, OBJECTS),
        ("/v1/messages", OBJECTS),
        ("/v1/responses", OBJECTS),
        ("/api/chat", OBJECTS),
        ("/v2/rerank", OBJECTS),
        (CHAT, b'{"model":"m","stop":[' + b'"\\"{",[],' * 100_001 + b"{}]}"),
        (CHAT, b"[" * 200_000),
    ],
)
async def test_a_body_of_too_many_objects_is_refused(folder: Path, path: str, body: bytes) -> None:
    async with proxy(folder, "fast") as served:
        answer = await served.ask(request(path, body))
        assert answer.status == 400
        assert b"100,000 objects and lists" in answer.body


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "{" * 150_000}],
        [{"role": "user", "content": '"{\\' * 150_000}],
        [{"role": "user", "content": ["[", "{"] * 75_000}],
        list(range(300_000)),
    ],
)
async def test_a_body_of_few_objects_passes(folder: Path, messages: list[Any]) -> None:
    async with proxy(folder, "fast") as served:
        body = msgspec.json.encode({"model": "m", "messages": messages})
        assert (await served.ask(request(CHAT, body))).status == 200
        assert served.engine.received[0].body == body


@pytest.mark.parametrize("tail", [b'"', b'"\\', b'"' + b'\\"' * 1_000_000, b'""' * 1_000_000])
async def test_the_search_ends_soon_for_what_is_no_json(folder: Path, tail: bytes) -> None:
    async with proxy(folder, "fast") as served:
        began = time.process_time()
        assert (await served.ask(request(CHAT, b'"' + b"{" * 150_000 + tail))).status == 400
        assert time.process_time() - began < 1


async def endless(call: Call) -> None:
    with suppress(ConnectionError):
        await call.send(SSE)
        while True:
            await call.send(chunk(b"data: {}\n\n" * 1000))


async def test_an_endless_answer_to_a_line_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "LARGEST_BODY", 1 << 20)
    batch = Batch("b", "", CHAT, "f", "24h", BatchState.IN_PROGRESS, 0.0, 1e12)
    line = Line("b", 1, "1", "m", b'{"model":"m","messages":[]}')
    async with proxy(folder, "fast", endless) as served:
        asker = asking.Asker(served.pipeline)
        answer = await asker.ask(line, batch, asker.together())
        assert answer is not None
        assert answer.status == 502
        assert b"too large" in answer.body


async def test_an_endless_answer_to_several_texts_is_asked_for_again_one_by_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_batcher, "LARGEST_BODY", 1 << 20)
    engine = Engine()

    async def script(call: Call) -> None:
        if call.request.path == "/v1/embeddings" and len(msgspec.json.decode(call.request.body)["input"]) > 1:
            await endless(call)
        else:
            await engine(call)

    async with proxy(folder, "fast", script) as served:
        answers = await together(served, ask("a"), ask("b"))
        assert [answer.json()["data"][0]["embedding"] for answer in answers] == [[1], [1]]
