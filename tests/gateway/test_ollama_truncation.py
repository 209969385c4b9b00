"""What is too long for the model's window: Ollama cuts it, and so is it here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from modelrunner.errors import ContextTooLong, ModelRunnerError
from modelrunner.gateway.dialects.ollama_context import context_of
from tests.gateway.fakes import SSE, Call, event
from tests.gateway.harness import CHAT, Answer, Proxy, proxy, request

WINDOW = 20
STOP = msgspec.json.encode({"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}).decode()
TOO_LONG = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"


def words(body: Mapping[str, Any]) -> int:
    """The tokens of a request: its words, and one for each message."""
    if "messages" in body:
        return sum(1 + len(message["content"].split()) for message in body["messages"])
    inputs = body.get("input", body.get("prompt"))
    each = inputs if isinstance(inputs, list) else [inputs]
    return max(len(one) if isinstance(one, list) else 2 + len(one.split()) for one in each)


async def narrow(call: Call) -> None:
    """An engine with a small window; a token is a word, and there is one before and one after each text."""
    body = msgspec.json.decode(call.request.body)
    if call.request.path == "/tokenize":
        tokens = [1, *range(10, 10 + len(body["content"].split())), 2]
        answer = msgspec.json.encode({"tokens": tokens})
        await call.send(WHOLE % (len(answer), answer))
    elif (size := words(body)) > WINDOW:
        error = msgspec.json.encode({"error": {"message": f"{size} too many"}})
        await call.send(TOO_LONG % (len(error), error))
    elif call.request.path == "/v1/embeddings":
        inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
        vectors = [{"index": place, "embedding": [3.0, 4.0, 12.0]} for place, _ in enumerate(inputs)]
        answer = msgspec.json.encode({"data": vectors})
        await call.send(WHOLE % (len(answer), answer))
    else:
        await call.send(SSE + event(STOP) + event("[DONE]") + b"0\r\n\r\n")


async def request_error(status: int, message: str, fields: Mapping[str, Any]) -> ModelRunnerError | None:
    return ContextTooLong(message, int(message.split()[0]), WINDOW)


async def ask(folder: Path, path: str, **fields: Any) -> tuple[Answer, Any, Proxy]:
    """Returns the answer, and the last body that the engine got."""
    async with proxy(folder, "fast", narrow) as served:
        served.runner.request_error = request_error  # type: ignore[method-assign]
        answer = await served.ask(request(path, {"model": "m", "stream": False} | fields))
        return answer, msgspec.json.decode(served.engine.received[-1].body), served


def say(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


TALK = [
    say("system", "be kind"),
    *(say(role, f"number {turn} of them") for turn in range(5) for role in ("user", "assistant")),
    say("user", "and now"),
]


async def test_the_oldest_messages_go_first_and_the_systems_stay(folder: Path) -> None:
    answer, body, _ = await ask(folder, "/api/chat", messages=TALK)
    assert answer.status == 200
    system, *rest, last = body["messages"]
    assert (system, last) == (TALK[0], TALK[-1])
    assert rest
    assert rest == TALK[-1 - len(rest) : -1]
    assert answer.headers["x-modelrunner-truncated"] == f"messages.{len(TALK) - len(body['messages'])}"


async def test_the_answer_of_a_tool_goes_with_its_call(folder: Path) -> None:
    call = {"role": "assistant", "content": "one two three four five", "tool_calls": [{"function": {"name": "f"}}]}
    messages = [call, say("tool", "six"), say("user", "a b c d e f g h i j k l m n o")]
    answer, body, _ = await ask(folder, "/api/chat", messages=messages)
    assert (answer.status, body["messages"]) == (200, messages[-1:])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_message_is_cut_at_its_beginning(folder: Path, stream: bool) -> None:
    text = " ".join(str(number) for number in range(1000, 1100))
    answer, body, _ = await ask(folder, "/api/chat", messages=[say("user", text)], stream=stream)
    assert answer.status == 200
    [message] = body["messages"]
    assert text.endswith(message["content"])
    assert WINDOW // 2 <= words(body) <= WINDOW
    assert answer.headers["x-modelrunner-truncated"] == "user.content"


@pytest.mark.parametrize("raw", [False, True])
async def test_a_long_prompt_is_cut_at_its_beginning(folder: Path, raw: bool) -> None:
    text = " ".join(str(number) for number in range(1000, 1100))
    answer, body, _ = await ask(folder, "/api/generate", prompt=text, raw=raw)
    assert answer.status == 200
    assert words(body) <= WINDOW
    assert text.endswith(body["prompt"] if raw else body["messages"][0]["content"])
    assert answer.headers["x-modelrunner-truncated"] == "prompt"


async def test_long_texts_are_cut_as_tokens_for_embeddings(folder: Path) -> None:
    texts = ["short", "word " * 100, "just " * (WINDOW - 2)]
    answer, body, _ = await ask(folder, "/api/embed", input=texts)
    assert answer.status == 200
    assert body["input"] == [texts[0], [1, *range(10, 10 + WINDOW - 2), 2], texts[2]]
    assert answer.headers["x-modelrunner-truncated"] == "input.1"
    single, body, _ = await ask(folder, "/api/embeddings", prompt=texts[1])
    assert (single.status, len(body["input"][0])) == (200, WINDOW)


async def test_an_engine_that_cuts_by_itself_is_asked_to(folder: Path) -> None:
    async def script(call: Call) -> None:
        body = msgspec.json.decode(call.request.body)
        if body.pop("truncate_prompt_tokens", None) == -1:
            call.request.body = msgspec.json.encode(body | {"input": "short"})
        await narrow(call)

    async with proxy(folder, "fast", script) as served:
        served.runner.request_error = request_error  # type: ignore[method-assign]
        reads = frozenset({"input", "encoding_format", "truncate_prompt_tokens"})
        served.runner.change(("/v1/embeddings",), reads=reads)
        answer = await served.ask(request("/api/embed", {"model": "m", "input": "word " * 100}))
        assert (answer.status, answer.headers["x-modelrunner-truncated"]) == (200, "input")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", {"messages": TALK}),
        ("/api/generate", {"prompt": "word " * 100}),
        ("/api/embed", {"input": "word " * 100}),
    ],
)
async def test_without_truncation_it_is_refused(folder: Path, path: str, fields: dict[str, Any]) -> None:
    answer, _, served = await ask(folder, path, truncate=False, **fields)
    assert answer.status == 400
    assert len(served.engine.received) == 1


async def test_other_families_refuse_what_is_too_long(folder: Path) -> None:
    answer, _, served = await ask(folder, CHAT, messages=TALK)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert len(served.engine.received) == 1


@pytest.mark.parametrize(("wanted", "got"), [(2, [0.6, 0.8]), (2.0, [0.6, 0.8]), (3, [3, 4, 12]), (9, [3, 4, 12])])
async def test_vectors_are_shortened_and_normalised(folder: Path, wanted: float, got: list[float]) -> None:
    answer, body, _ = await ask(folder, "/api/embed", input="a", dimensions=wanted)
    assert answer.json()["embeddings"] == [got]
    assert "dimensions" not in body


async def test_dimensions_are_a_whole_number(folder: Path) -> None:
    async with proxy(folder, "fast", narrow) as served:
        answer = await served.ask(request("/api/embed", {"model": "m", "input": "a", "dimensions": "x"}))
        assert answer.status == 400
        assert not served.engine.received


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": TALK}, "messages"),
        ("/v1/completions", {"prompt": "word " * 100}, "prompt"),
        ("/v1/embeddings", {"input": "word " * 100}, "input"),
    ],
)
async def test_the_error_names_what_is_too_long(folder: Path, path: str, fields: dict[str, Any], param: str) -> None:
    answer, *_ = await ask(folder, path, **fields)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_a_context_goes_before_the_prompt_is_cut(folder: Path) -> None:
    context = context_of([("user", "word " * 30), ("assistant", "yes")])
    answer, asked, _ = await ask(folder, "/api/generate", prompt="and now", context=context)
    assert (answer.status, answer.headers["x-modelrunner-truncated"]) == (200, "context")
    assert [message["content"] for message in asked["messages"]] == ["and now"]
    kept, _, _ = await ask(folder, "/api/generate", prompt="and now", context=context, truncate=False)
    assert kept.status == 400
