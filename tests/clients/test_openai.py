"""PyPI's `openai`: nothing but its base URL is given."""

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.clients.conftest import StopsTheEngine
from tests.clients.questions import CITIES, CITY, ENDLESS, SHOWN, TOOL
from tests.e2e.conftest import MINILM, SMOLLM2
from tests.models.prompts import MESSAGES, PARIS, QUESTION
from tests.models.prompts import SYSTEM as INSTRUCTIONS


@pytest.fixture
def client(base: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=SMOLLM2, messages=MESSAGES, temperature=0)
    assert PARIS in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_a_stream_of_a_chat(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model=SMOLLM2, messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert PARIS in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None


def test_further_fields_of_a_chat(client: openai.OpenAI) -> None:
    """Several answers, logprobs, a text that ends them, and a seed that repeats them."""
    asked: Any = {"model": SMOLLM2, "messages": MESSAGES, "temperature": 1.0, "seed": 7, "max_tokens": 12}
    several = client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in several.choices] == [0, 1]
    for choice in several.choices:
        assert choice.logprobs is not None
        tokens = choice.logprobs.content or []
        assert "".join(token.token for token in tokens).startswith(choice.message.content or "")
        assert {len(token.top_logprobs) for token in tokens} == {2}
    first, again = (client.chat.completions.create(**asked).choices[0].message.content for _ in range(2))
    assert first
    assert first == again
    ended = client.chat.completions.create(**asked, stop=[first[1:4]]).choices[0]
    assert (ended.message.content, ended.finish_reason) == (first.partition(first[1:4])[0], "stop")


def test_structured_output_of_a_chat(client: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = client.chat.completions.create(model=SMOLLM2, messages=MESSAGES, response_format=wanted)
    assert json.loads(answer.choices[0].message.content or "")["city"] in CITIES


def test_tools_of_a_chat(client: openai.OpenAI) -> None:
    asked: Any = {"model": SMOLLM2, "messages": MESSAGES, "temperature": 0}
    without = client.chat.completions.create(**asked)
    shown = client.chat.completions.create(**asked, tools=[TOOL], tool_choice="required")
    [choice] = shown.choices
    [call] = choice.message.tool_calls or []
    assert (choice.finish_reason, call.type) == ("tool_calls", "function")
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)["city"] in CITIES) == ("weather", True)
    assert without.usage
    assert shown.usage
    assert shown.usage.prompt_tokens > without.usage.prompt_tokens + SHOWN


def test_a_chat_that_is_left_stops_the_engine(client: openai.OpenAI, stops_the_engine: StopsTheEngine) -> None:
    asked: Any = [{"role": "user", "content": "Count to a million."}]
    with (
        stops_the_engine(),
        client.chat.completions.create(
            model=SMOLLM2, messages=asked, max_tokens=4000, stream=True, extra_body=ENDLESS
        ) as stream,
    ):
        next(iter(stream))


def test_a_response_and_its_conversation(client: openai.OpenAI) -> None:
    first = client.responses.create(model=SMOLLM2, input=QUESTION, instructions=INSTRUCTIONS, temperature=0)
    assert PARIS in first.output_text
    assert first.usage is not None
    assert first.usage.output_tokens > 0
    second = client.responses.create(
        model=SMOLLM2,
        input="What did I ask?",
        instructions=INSTRUCTIONS,
        previous_response_id=first.id,
        temperature=0,
        max_output_tokens=30,
    )
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text


def test_a_stream_of_a_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model=SMOLLM2, input=QUESTION, instructions=INSTRUCTIONS, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text
    assert PARIS in text


def test_structured_output_of_a_response(client: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    response = client.responses.create(model=SMOLLM2, input=QUESTION, text=text, temperature=0)
    assert json.loads(response.output_text)["city"] in CITIES


def test_tools_of_a_response(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "strict": True, **TOOL["function"]}
    asked: Any = {"model": SMOLLM2, "input": QUESTION, "instructions": INSTRUCTIONS, "temperature": 0}
    without = client.responses.create(**asked)
    shown = client.responses.create(**asked, tools=[tool], tool_choice="required")
    [call] = [item for item in shown.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)["city"] in CITIES) == ("weather", True)
    assert without.usage
    assert shown.usage
    assert shown.usage.input_tokens > without.usage.input_tokens + SHOWN


def test_a_response_that_is_left_stops_the_engine(client: openai.OpenAI, stops_the_engine: StopsTheEngine) -> None:
    with stops_the_engine():
        stream = client.responses.create(
            model=SMOLLM2, input="Count to a million.", max_output_tokens=4000, stream=True, extra_body=ENDLESS
        )
        next(iter(stream))
        stream.close()


def test_embeddings_in_base64_and_of_tokens(client: openai.OpenAI) -> None:
    plain = client.embeddings.create(model=MINILM, input="a cat", encoding_format="float").data[0].embedding
    raw = client.embeddings.with_raw_response.create(model=MINILM, input="a cat", encoding_format="base64")
    coded = json.loads(raw.content)["data"][0]["embedding"]
    assert struct.unpack("<384f", base64.b64decode(coded)) == pytest.approx(plain, abs=1e-5)
    tokens = client.embeddings.create(model=MINILM, input=[[101, 1037, 4937, 102]])
    assert len(tokens.data[0].embedding) == 384


def test_models_and_errors(client: openai.OpenAI) -> None:
    assert {SMOLLM2, MINILM} <= {model.id for model in client.models.list()}
    with pytest.raises(openai.NotFoundError, match="not here"):
        client.chat.completions.create(model="nope", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError, match="not here"):
        client.responses.create(model="nope", input="x")
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(model=SMOLLM2, input="hello " * 9000)
