"""PyPI's `anthropic`: nothing but its base URL is given."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.clients.conftest import StopsTheEngine
from tests.clients.questions import CITIES, CITY, SHOWN, STORY
from tests.e2e.conftest import MINILM, SMOLLM2
from tests.e2e.daemons import Daemon
from tests.models.prompts import PARIS, QUESTION, SYSTEM

ASKED: Any = {
    "model": SMOLLM2,
    "max_tokens": 40,
    "system": SYSTEM,
    "messages": [{"role": "user", "content": QUESTION}],
    "extra_body": {"temperature": 0},  # the client has no argument for it
}


@pytest.fixture
def client(base: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"{base}/anthropic", api_key="none", max_retries=0) as made:
        yield made


def test_a_message_and_a_stream(client: anthropic.Anthropic, daemon: Daemon) -> None:
    message = client.messages.create(**ASKED)
    [block] = message.content
    assert block.type == "text"
    assert PARIS in block.text
    assert message.usage.input_tokens > 0
    with client.messages.stream(**ASKED) as stream:
        assert PARIS in "".join(stream.text_stream)
        usage = stream.get_final_message().usage
    record = daemon.get("/engines/requests").json()[0]
    counted = [record[f"{kind}_tokens"] for kind in ("prompt", "cached", "completion")]
    cached = usage.cache_read_input_tokens or 0
    assert counted == [usage.input_tokens + cached, cached, usage.output_tokens]
    assert counted[0] > 10
    plain = {name: ASKED[name] for name in ("model", "system", "messages")}
    assert client.messages.count_tokens(**plain).input_tokens > 10


def test_structured_output(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ASKED, output_config={"format": {"type": "json_schema", "schema": CITY}})
    [block] = message.content
    assert block.type == "text"
    assert json.loads(block.text)["city"] in CITIES


def test_tools(client: anthropic.Anthropic) -> None:
    tool: Any = {"name": "weather", "description": "of a city", "input_schema": CITY}
    without = client.messages.create(**ASKED)
    shown = client.messages.create(**ASKED, tools=[tool], tool_choice={"type": "any"})
    [call] = [block for block in shown.content if block.type == "tool_use"]
    assert (shown.stop_reason, call.name, call.input["city"] in CITIES) == ("tool_use", "weather", True)
    read = [one.usage.input_tokens + (one.usage.cache_read_input_tokens or 0) for one in (without, shown)]
    assert read[1] > read[0] + SHOWN
    plain = {name: ASKED[name] for name in ("model", "messages")}
    assert client.messages.count_tokens(**plain, tools=[tool]).input_tokens > SHOWN


def test_models(client: anthropic.Anthropic) -> None:
    models = {model.id: model for model in client.models.list()}
    assert {SMOLLM2, MINILM} <= set(models)
    assert client.models.retrieve(SMOLLM2) == models[SMOLLM2]
    assert models[SMOLLM2].max_input_tokens
    with pytest.raises(anthropic.NotFoundError, match="not here"):
        client.models.retrieve("nope")


def test_errors(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not here"):
        client.messages.create(**ASKED | {"model": "nope"})
    with pytest.raises(anthropic.BadRequestError, match="it offers embedding"):
        client.messages.create(**ASKED | {"model": MINILM})


def test_a_stream_that_is_left_stops_the_engine(client: anthropic.Anthropic, stops_the_engine: StopsTheEngine) -> None:
    asked = ASKED | {"max_tokens": 4000, "messages": [{"role": "user", "content": STORY}]}
    with stops_the_engine(), client.messages.stream(**asked) as stream:
        next(iter(stream.text_stream))
