"""PyPI's `ollama`: nothing but its host is given."""

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from tests.clients.conftest import StopsTheEngine
from tests.clients.questions import CITIES, SHOWN, STORY, TOOL
from tests.e2e.conftest import MINILM, SMOLLM2
from tests.models.prompts import MESSAGES as QUESTION
from tests.models.prompts import PARIS

LONG = "hello " * 3000
COLD = {"temperature": 0, "seed": 1}


@pytest.fixture
def client(base: str) -> Iterator[ollama.Client]:
    with ollama.Client(base) as made:
        yield made


def test_a_chat_and_its_figures(client: ollama.Client) -> None:
    answer = client.chat(SMOLLM2, QUESTION, options=COLD)
    assert PARIS in (answer.message.content or "")
    assert (answer.done_reason, answer.model) == ("stop", SMOLLM2)
    assert answer.prompt_eval_count
    assert answer.eval_count
    assert answer.total_duration
    assert 0 < (answer.prompt_eval_duration or 0) + (answer.eval_duration or 0) <= answer.total_duration


def test_a_stream_says_the_same(client: ollama.Client) -> None:
    parts = list(client.chat(SMOLLM2, QUESTION, options=COLD, stream=True))
    assert PARIS in "".join(part.message.content or "" for part in parts)
    assert len(parts) > 5
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_generations(client: ollama.Client) -> None:
    short = client.generate(SMOLLM2, "Count to ten.", options=COLD | {"num_predict": 3})
    assert (short.done_reason, short.eval_count) == ("length", 3)
    raw = client.generate(SMOLLM2, "hello", raw=True, options=COLD | {"num_predict": 4})
    assert raw.response
    assert (raw.prompt_eval_count or 0) < (short.prompt_eval_count or 0)


def test_structured_output(client: ollama.Client) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "rank": {"enum": [1, 2]}},
        "required": ["city", "rank"],
    }
    answer = client.chat(SMOLLM2, QUESTION, format=schema, options=COLD)
    found = json.loads(answer.message.content or "")
    assert found["city"] in ("Paris", "Rome")
    assert found["rank"] in (1, 2)


def test_tools(client: ollama.Client) -> None:
    without = client.chat(SMOLLM2, QUESTION, options=COLD)
    shown = client.chat(SMOLLM2, QUESTION, tools=[TOOL], options=COLD)
    [call] = shown.message.tool_calls or []
    assert (call.function.name, call.function.arguments["city"] in CITIES) == ("weather", True)
    assert (shown.prompt_eval_count or 0) > (without.prompt_eval_count or 0) + SHOWN


def test_embeddings(client: ollama.Client) -> None:
    found = client.embed(MINILM, ["a cat", "a dog"])
    assert [len(vector) for vector in found.embeddings] == [384, 384]
    assert found.prompt_eval_count
    assert client.embeddings(MINILM, "a cat").embedding == pytest.approx(found.embeddings[0], abs=1e-3)


def test_a_long_text_is_cut(client: ollama.Client) -> None:
    found = client.embed(MINILM, ["a cat", LONG])
    assert [len(vector) for vector in found.embeddings] == [384, 384]
    assert found.prompt_eval_count == 512 + 4
    assert len(client.embed(MINILM, "a cat", dimensions=8).embeddings[0]) == 8


def test_models(client: ollama.Client) -> None:
    models = {model.model: model for model in client.list().models}
    assert {SMOLLM2, f"{MINILM}:latest"} <= set(models)
    client.generate(SMOLLM2, keep_alive="10m")
    [running] = [model for model in client.ps().models if model.model == SMOLLM2]
    assert running.size
    assert running.expires_at
    shown = client.show(SMOLLM2)
    assert "completion" in (shown.capabilities or [])
    assert "im_start" in (shown.template or "")
    assert shown.modelinfo
    assert shown.modelinfo["general.architecture"] == "llama"
    assert client.show(MINILM).capabilities == ["embedding"]


def test_errors(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="not here") as unknown:
        client.chat("nope", QUESTION)
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="it offers embedding") as mode:
        client.chat(MINILM, QUESTION)
    assert mode.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="tokens") as long:
        client.embed(MINILM, LONG, truncate=False)
    assert long.value.status_code == 400


def test_a_stream_that_is_left_stops_the_engine(client: ollama.Client, stops_the_engine: StopsTheEngine) -> None:
    with stops_the_engine():
        stream = client.generate(SMOLLM2, STORY, stream=True, options=COLD | {"num_predict": 4000})
        next(iter(stream))
        stream.close()  # type: ignore[attr-defined]


def test_unloading(client: ollama.Client) -> None:
    client.generate(SMOLLM2, keep_alive=0)
    assert SMOLLM2 not in {model.model for model in client.ps().models}
