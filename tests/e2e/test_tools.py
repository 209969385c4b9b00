"""Tools with a real engine. The call is forced, so that it is not luck: the engine's grammar lets no answer end without
a call of the tool that `tool_choice` names, and the chat before shows how one begins."""

import json
from typing import Any

import pytest

from tests.e2e.conftest import SMOLLM2, StartDaemon
from tests.e2e.daemons import Daemon
from tests.e2e.test_capabilities import TEMPLATE

TOOL = "process"


@pytest.fixture(scope="module")
def daemon(make_daemon: StartDaemon, engine: str) -> Daemon:
    daemon = make_daemon(engine)
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


def test_the_tool_that_a_client_names_is_called(daemon: Daemon) -> None:
    """Though the chat before called another one."""
    function = {"name": "other", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    messages = [message for number in range(4) for message in shown(number)]
    body = {
        "model": SMOLLM2,
        "messages": [*messages, {"role": "user", "content": "Which process is it?"}],
        "tools": [{"type": "function", "function": {**function, "name": name}} for name in (TOOL, "other")],
        "tool_choice": {"type": "function", "function": {"name": "other"}},
        "temperature": 0,
        "max_tokens": 64,
    }
    answer = daemon.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("other", {})
