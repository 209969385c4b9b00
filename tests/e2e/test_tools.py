"""The loop of tools on the server with a real engine. The call is forced, so that it is not luck: the engine's grammar
lets no answer end without a call of the tool that `tool_choice` names, and the chat before shows how one begins."""

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import SMOLLM2, StartDaemon
from tests.e2e.daemons import Daemon
from tests.e2e.test_capabilities import TEMPLATE

SERVER = Path(__file__).parent.parent / "tools" / "server.py"
TOOL = "local__process"


@pytest.fixture(scope="module")
def daemon(make_daemon: StartDaemon, engine: str) -> Daemon:
    daemon = make_daemon(engine)
    config = Path(daemon.environment["MODELRUNNER_CONFIG"])
    config.write_text(f"[mcp.local]\ncommand = {json.dumps([sys.executable, str(SERVER)])}\n")
    daemon.start(listen="127.0.0.1:0")
    (daemon.data.parent / "tools.jinja").write_text(TEMPLATE)
    given = daemon.run("configure", SMOLLM2, "--chat-template", str(daemon.data.parent / "tools.jinja"))
    assert given.returncode == 0, given.stderr
    return daemon


def shown(number: int) -> list[dict[str, Any]]:
    """A question, a call, its result and the answer."""
    call = {"id": f"c{number}", "type": "function", "function": {"name": TOOL, "arguments": "{}"}}
    return [
        {"role": "user", "content": "Which process is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": str(4000 + number)},
        {"role": "assistant", "content": f"It is {4000 + number}."},
    ]


def ask(daemon: Daemon, **more: Any) -> httpx.Response:
    messages = [message for number in range(4) for message in shown(number)]
    return daemon.post(
        "/v1/chat/completions",
        {
            "model": SMOLLM2,
            "messages": [*messages, {"role": "user", "content": "Which process is it?"}],
            "tool_choice": {"type": "function", "function": {"name": TOOL}},
            "modelrunner_tools": "auto",
            "temperature": 0,
            "max_tokens": 64,
            **more,
        },
    )


def called(answer: httpx.Response) -> Any:
    """The answer of a chat in which the daemon has called the tool, and the model went on."""
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["modelrunner_tool_calls"], told
    call = told["modelrunner_tool_calls"][0]
    assert (call["name"], call["is_error"], call["result"].isdigit()) == (TOOL, False, True)
    assert told["choices"][0]["finish_reason"] in ("stop", "length")
    assert "tool_calls" not in told["choices"][0]["message"]
    return told


def test_a_tool_is_called_and_the_model_goes_on(daemon: Daemon) -> None:
    called(ask(daemon))


def test_the_tool_that_a_client_names_is_called(daemon: Daemon, engine: str) -> None:
    """Though the chat before called another one."""
    function = {"name": "other", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    tools = [{"type": "function", "function": {**function, "name": name}} for name in (TOOL, "other")]
    choice = {"type": "function", "function": {"name": "other"}}
    answer = ask(daemon, tools=tools, tool_choice=choice, modelrunner_tools=None)
    assert answer.status_code == 200, answer.text
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("other", {})


def test_in_a_stream(daemon: Daemon) -> None:
    text = ask(daemon, stream=True).text
    assert text.index("event: modelrunner.tool_call\n") < text.index("event: modelrunner.tool_result\n")
    assert text.endswith("data: [DONE]\n\n")
