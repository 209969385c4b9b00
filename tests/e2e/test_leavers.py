"""Plain answers that are put together from the engine's stream: as the engine's own, and given up with their client.
A request that was given up has its lease for as long as the engine works on it."""

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import MINILM, SMOLLM2
from tests.e2e.daemons import Daemon, until
from tests.e2e.engines import engine, processing, sent
from tests.models.prepare import RERANKER

SAY = [{"role": "user", "content": "Say hi"}]
LETTER = {"type": "object", "properties": {"letter": {"enum": ["a", "b"]}}, "required": ["letter"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": LETTER}}
PICTURE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]
CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


@pytest.fixture(scope="module", autouse=True)
def several_sequences(daemon: Daemon) -> None:
    """From the first load on."""
    assert daemon.run("configure", SMOLLM2, "--parallel", "4").returncode == 0


def shape(value: Any, name: str = "") -> Any:
    """An answer without what differs from one request to the next."""
    if name in ("id", "created", "timings"):
        return sorted(value) if isinstance(value, dict) else type(value)
    if isinstance(value, dict):
        return {key: shape(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(inner) for inner in value]
    return round(value, 1) if isinstance(value, float) else value


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": SAY}),
        (CHAT, {"messages": SAY, "stream": False, "stream_options": None}),
        (CHAT, {"messages": SAY, "stop": ["glad"]}),
        (CHAT, {"messages": SAY, "logprobs": True, "top_logprobs": 2}),
        (CHAT, {"messages": SAY, "n": 2}),
        (CHAT, {"messages": SAY, "tools": [TOOL]}),
        (CHAT, {"messages": SAY, "max_tokens": 40, "response_format": {"type": "json_object", "schema": LETTER}}),
        (TEXT, {"prompt": "The sea"}),
        (TEXT, {"prompt": ["The sea", "A dog"]}),
        (MESSAGES, {"messages": SAY}),
    ],
)
def test_a_plain_answer_is_the_engines_own(daemon: Daemon, path: str, fields: Mapping[str, Any]) -> None:
    body = {"model": SMOLLM2, "max_tokens": 6, "temperature": 0, "cache_prompt": False, **fields}
    ours, theirs = daemon.post(path, body), at_the_engine(daemon, path, body)
    assert (ours.status_code, theirs.status_code) == (200, 200)
    found, expected = ours.json(), theirs.json()
    for usage in (found["usage"], expected["usage"]) if path == MESSAGES else ():  # what is cached, changes
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    if len(found.get("choices", ())) > 1:  # the engine counts one of them
        assert found.pop("usage")["completion_tokens"] == 2 * expected.pop("usage")["completion_tokens"]
    assert shape(found) == shape(expected)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": [{"role": "user", "content": PICTURE}]}),
        (CHAT, {"messages": [{"role": "user", "content": "hi " * 20_000}]}),
        (CHAT, {"messages": SAY, "grammar": "root ::= ("}),
        (TEXT, {"prompt": {}}),
    ],
)
def test_a_refusal_is_the_one_of_a_stream(daemon: Daemon, path: str, fields: Mapping[str, Any]) -> None:
    """And says what the engine says to the plain request, but for the hint of how to start the engine."""
    body = {"model": SMOLLM2, "max_tokens": 6, **fields}
    ours, streamed = daemon.post(path, body), daemon.post(path, {**body, "stream": True})
    assert ours.status_code == streamed.status_code == 400
    assert ours.json()["error"] == streamed.json()["error"]
    message: str = at_the_engine(daemon, path, body).json()["error"]["message"]
    message, _, _ = message.partition(" - hint: ")
    assert ours.json()["error"]["message"].startswith(message)


def at_the_engine(daemon: Daemon, path: str, body: Mapping[str, Any]) -> httpx.Response:
    daemon.post("/v1/completions", {"model": SMOLLM2, "prompt": "a", "max_tokens": 1}).raise_for_status()
    with engine(daemon) as client:
        return client.post(path, json=body)


def test_a_plain_request_that_is_given_up_ends_beside_a_stream(daemon: Daemon) -> None:
    """Time is counted in tokens of the stream: a leaver is noticed at the next one, and 20 are enough."""
    body = {"model": SMOLLM2, "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "max_tokens": 1500}
    daemon.post("/v1/completions", body | {"max_tokens": 1}).raise_for_status()
    with daemon.client() as client, client.stream("POST", TEXT, json=body | {"stream": True}) as answer:
        tokens = (line for line in answer.iter_lines() if line.startswith("data:"))
        with sent(daemon, TEXT, body), sent(daemon, TEXT, body):
            while processing(daemon) < 3:
                next(tokens)
            assert leases(daemon) == 3
        for _ in range(20):
            next(tokens)
        while leases(daemon) > 1:  # the daemon has noticed too
            next(tokens)
        for _ in range(20):
            next(tokens)
        assert processing(daemon) == 1


LONG = "the sea is wide and the night is long, " * 150
TEXTS = [f"{number}: {LONG[:600]}" for number in range(400)]


@pytest.mark.parametrize(
    ("path", "fields", "mode"),
    [
        (TEXT, {"prompt": LONG, "stream": True}, "completion"),
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "completion"),
        (MESSAGES, {"messages": [{"role": "user", "content": LONG}]}, "completion"),
        ("/v1/embeddings", {"model": MINILM, "input": TEXTS}, "embedding"),
        ("/v1/rerank", {"model": RERANKER, "query": "the sea", "documents": TEXTS}, "reranking"),
    ],
    ids=["stream", "chat", "messages", "embeddings", "rerank"],
)
def test_a_lease_lasts_as_long_as_the_engine_works(
    daemon: Daemon, path: str, fields: Mapping[str, Any], mode: str
) -> None:
    """The client leaves in the prompt, while the engine computes a batch."""
    body = {"model": SMOLLM2, "max_tokens": 4, "cache_prompt": False, **fields}
    small = {"input": "a", "documents": ["a"], "prompt": "a", "messages": SAY}
    loading = body | {name: value for name, value in small.items() if name in fields}
    daemon.post(path, loading).raise_for_status()
    with sent(daemon, path, body):
        until(lambda: processing(daemon, mode))
    until(lambda: not leases(daemon))
    assert processing(daemon, mode) == 0


def leases(daemon: Daemon) -> int:
    return sum(runner["leases"] for runner in daemon.runners())
