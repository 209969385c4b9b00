"""Anthropic's client and clients' mistakes, with the real llama.cpp."""

import json
from typing import Any

import anthropic
import pytest

from tests.e2e.conftest import MINILM, SMOLLM2
from tests.e2e.daemons import Daemon

CHAT = "/v1/chat/completions"
_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE = f"data:image/png;base64,{_PIXEL}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


@pytest.fixture
def client(daemon: Daemon) -> anthropic.Anthropic:
    base = daemon.get("/version").json()["listen"]
    return anthropic.Anthropic(base_url=f"{base}/anthropic", api_key="none", max_retries=0)


def test_anthropics_client(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": SMOLLM2, "max_tokens": 8, "messages": user("hello")}
    message = client.messages.create(**asked)
    assert message.content[0].type == "text"
    assert 0 < message.usage.output_tokens <= 8
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream)
    assert client.messages.count_tokens(model=SMOLLM2, messages=asked["messages"]).input_tokens > 1
    with pytest.raises(anthropic.BadRequestError, match="exceeds the available context size"):
        client.messages.create(**asked | {"messages": user("hello " * 9000)})
    client.close()


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (CHAT, {"messages": user([{"type": "image_url", "image_url": {"url": IMAGE}}])}, None, "image input"),
        (CHAT, {"messages": user("x"), "tools": TOOLS, "tool_choice": "required"}, "tool_choice", "knows no tools"),
        (CHAT, {"messages": user("x"), "model": MINILM}, "model", "it offers embedding"),
        ("/v1/tokenize", {"content": "x", "model": MINILM}, "model", "it offers embedding"),
        ("/v1/rerank", {"query": "x", "documents": ["x"]}, "model", "it offers chat, completion"),
        ("/v1/embeddings", {"input": "x", "model": MINILM, "dimensions": 64}, "dimensions", "take all 384"),
    ],
)
def test_a_clients_mistake_is_a_400(
    daemon: Daemon, path: str, body: dict[str, object], param: str | None, said: str
) -> None:
    answer = daemon.post(path, json.dumps({"model": SMOLLM2, "max_tokens": 2} | body).encode())
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert said in answer.json()["error"]["message"]


def test_an_overflow_has_its_figures(daemon: Daemon) -> None:
    for path, body, limit in (
        (CHAT, {"model": SMOLLM2, "messages": user("hello " * 9000)}, 8192),
        ("/v1/completions", {"model": SMOLLM2, "prompt": "hello " * 9000}, 8192),
        ("/v1/embeddings", {"model": MINILM, "input": "hello " * 2000}, 512),
    ):
        answer = daemon.post(path, json.dumps(body).encode())
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["n_ctx"]) == (400, "context_length_exceeded", limit)
        assert (error["type"], error["n_prompt_tokens"] > limit) == ("exceed_context_size_error", True)


def test_fields_that_llama_cpp_does_not_read(daemon: Daemon) -> None:
    """Named, or refused where the answer would mean something else."""
    asked = {"model": SMOLLM2, "messages": user("x"), "max_tokens": 1}
    answer = daemon.post(CHAT, asked | {"user": "kim", "repetition_penalty": 1.1, "mirostat": 2, "seed": 1})
    assert (answer.status_code, answer.headers["x-modelrunner-ignored"]) == (200, "user, repetition_penalty")
    for name, value in (("guided_regex", "[a-z]+"), ("modalities", ["text", "audio"])):
        refused = daemon.post(CHAT, asked | {name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    refused = daemon.post("/v1/completions", {"model": SMOLLM2, "prompt": "x", "suffix": "y"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "suffix")


def test_more_choices_than_the_engine_has_sequences(daemon: Daemon) -> None:
    """The prompt counts once, however often the engine was asked."""
    asked = {"model": SMOLLM2, "messages": user("Name a fruit."), "max_tokens": 4, "seed": 7, "temperature": 1.5}
    alone = daemon.post(CHAT, asked).json()
    several = daemon.post(CHAT, asked | {"n": 6})
    answer = several.json()
    assert (several.status_code, [choice["index"] for choice in answer["choices"]]) == (200, list(range(6)))
    assert answer["choices"][0]["message"] == alone["choices"][0]["message"]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) > 1
    assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert alone["usage"]["completion_tokens"] < answer["usage"]["completion_tokens"] <= 24
    prompts = {"model": SMOLLM2, "prompt": ["One", "Two"], "n": 5, "max_tokens": 3}
    found = daemon.post("/v1/completions", prompts)
    assert (found.status_code, len(found.json()["choices"])) == (200, 10)
    refused = daemon.post(CHAT, asked | {"n": 129})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


def test_tools_that_are_ignored_are_named(daemon: Daemon) -> None:
    body = {"model": SMOLLM2, "messages": user("x"), "tools": TOOLS, "max_tokens": 2}
    answer = daemon.post(CHAT, json.dumps(body).encode())
    assert (answer.status_code, answer.headers["x-modelrunner-ignored"]) == (200, "tools")
