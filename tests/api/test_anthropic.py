"""Anthropic's own client against the daemon: nothing but its base URL is changed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from modelrunner.engineapi import OPENAI_ENDPOINTS
from tests.api.conftest import Daemon, StartDaemon
from tests.waiting import HUNG

HELLO: Any = {"model": "smol", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(params=["engine's own", "translated"])
async def client(
    start_daemon: StartDaemon, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[Daemon, anthropic.AsyncAnthropic]]:
    daemon = await start_daemon(models={"smol": 0})
    if request.param == "translated":
        daemon.backend.endpoints = OPENAI_ENDPOINTS
    base = f"http://127.0.0.1:{daemon.port}/anthropic"
    async with anthropic.AsyncAnthropic(base_url=base, api_key="none", max_retries=0) as made:
        yield daemon, made


Made = tuple[Daemon, anthropic.AsyncAnthropic]


async def test_messages_and_tokens(client: Made) -> None:
    _, made = client
    message = await made.messages.create(**HELLO)
    assert [block.text for block in message.content if block.type == "text"] == ["w0 w1 w2 "]
    assert (await made.messages.count_tokens(model="smol", messages=HELLO["messages"])).input_tokens == 3


async def test_a_stream(client: Made) -> None:
    _, made = client
    async with made.messages.stream(**HELLO) as stream:
        assert [text async for text in stream.text_stream] == ["w0 ", "w1 ", "w2 "]
        assert (await stream.get_final_message()).usage.output_tokens == 3


async def test_errors_before_an_engine_is_asked(client: Made) -> None:
    daemon, made = client
    with pytest.raises(anthropic.NotFoundError, match="not here") as unknown:
        await made.messages.create(**HELLO | {"model": "nope"})
    assert unknown.value.body["type"] == "error"  # type: ignore[index]
    with pytest.raises(anthropic.NotFoundError):
        await made.beta.messages.batches.retrieve("none")
    assert daemon.backend.runs == 0


async def test_an_error_in_a_stream(client: Made) -> None:
    daemon, made = client
    daemon.backend.knobs = ("--die", "1")
    async with made.messages.stream(**HELLO) as stream:
        with pytest.raises(anthropic.APIStatusError, match="the fake engine threw up"):
            await stream.get_final_message()


async def test_a_stream_that_waits_is_kept_alive(client: Made) -> None:
    daemon, made = client
    daemon.backend.knobs = ("--ready-after", "0.3")
    raw = made.messages.with_raw_response
    answer = await raw.create(**HELLO, stream=True, extra_headers={"X-Progress": "events"})
    assert answer.headers["content-type"] == "text/event-stream"
    async with asyncio.timeout(HUNG):
        events = [event.type async for event in await answer.parse()]
    assert (events[0], events[-1]) == ("message_start", "message_stop")
