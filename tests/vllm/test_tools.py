"""Tools with the real vLLM: the one that a client names, and those that it allows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import StartDaemon
from tests.e2e.daemons import Daemon
from tests.models.prepare import SMOLLM2_SAFETENSORS
from tests.models.prompts import TOOLS

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
LOAD = 300  # seconds
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
}
QUESTION = {"role": "user", "content": "How is the weather in Paris?"}


@pytest.fixture(autouse=True)
def nothing_left(no_process_left: None) -> None:
    """Instead of the check after every test: the daemon serves all of them."""


@pytest.fixture(scope="module")
def daemon(installed: Path, make_daemon: StartDaemon) -> Iterator[Daemon]:
    daemon = make_daemon("wheel")
    (daemon.data / "engines" / "vllm").symlink_to(installed)
    daemon.start()
    (daemon.data.parent / "tools.jinja").write_text(TOOLS)
    words = ("--set", "vllm.tool-call-parser=hermes", "--chat-template", str(daemon.data.parent / "tools.jinja"))
    configured = daemon.run("configure", SMOLLM2_SAFETENSORS, *words)
    assert configured.returncode == 0, configured.stderr
    yield daemon
    daemon.stop()


def chat(daemon: Daemon, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
    with daemon.client(LOAD) as client:
        body = {"model": SMOLLM2_SAFETENSORS, "messages": messages, "temperature": 0, "max_tokens": 64, **fields}
        return client.post("/engines/vllm/v1/chat/completions", json=body)


def test_the_tool_that_a_client_names_among_others_is_called(daemon: Daemon) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": WEATHER}} for name in ("other", "weather")]
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = chat(daemon, QUESTION, tools=tools, tool_choice=choice)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_the_tools_that_a_client_allows_are_offered(daemon: Daemon, mode: str) -> None:
    """In OpenAI's shape, which vLLM does not know: it is shown these tools alone, and calls one if it must."""
    functions = [{"name": name, "parameters": WEATHER} for name in ("other", "weather")]
    tools = [{"type": "function", "function": function} for function in functions]
    named = {"type": "function", "function": {"name": "weather"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
    answer = chat(daemon, QUESTION, tools=tools, tool_choice=choice)
    alone = chat(daemon, QUESTION, tools=tools[1:], tool_choice=mode)
    assert (answer.status_code, alone.status_code) == (200, 200), answer.text
    assert answer.json()["usage"]["prompt_tokens"] == alone.json()["usage"]["prompt_tokens"]
    calls = answer.json()["choices"][0]["message"].get("tool_calls") or []
    assert mode == "auto" or [call["function"]["name"] for call in calls] == ["weather"]


def test_a_response_allows_tools_too(daemon: Daemon) -> None:
    tools = [{"type": "function", "name": name, "parameters": WEATHER} for name in ("other", "weather")]
    listed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    body = {"model": SMOLLM2_SAFETENSORS, "input": QUESTION["content"], "max_output_tokens": 64, "temperature": 0}
    with daemon.client(LOAD) as client:
        used = []
        for asks in ({"tools": tools, "tool_choice": listed}, {"tools": tools[1:], "tool_choice": "required"}):
            answer = client.post("/engines/vllm/v1/responses", json={**body, **asks})
            assert answer.status_code == 200, answer.text
            assert [item["name"] for item in answer.json()["output"] if item["type"] == "function_call"] == ["weather"]
            used.append(answer.json()["usage"]["input_tokens"])
    assert used[0] == used[1]
