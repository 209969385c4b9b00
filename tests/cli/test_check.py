"""The command check, against a daemon that answers as a model does that can do everything, or fails in one thing."""

import json
from typing import Any

import pytest

from modelrunner.cli import check
from tests.cli.conftest import Cli
from tests.cli.fake_daemon import FakeDaemon, Handler, Request, Status, Stream, events

ABLE = ["chat", "tools", "vision", "reasoning"]
ALL = 13
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
KEPT = {"passed": ALL, "failed": [], "time": 1, "engine": "fake 1"}
USAGE = {"prompt_tokens": 9, "completion_tokens": 3}


def answer(request: Request) -> Any:
    """What a model that can do everything answers; a word of the prompt is a token."""
    body = request.body
    if body.get("stream"):
        return events({"choices": [{"delta": {"content": "one"}}]}, {"choices": [], "usage": USAGE})
    said: dict[str, Any] = {"content": "yes"}
    thinks = body.get("chat_template_kwargs", {}).get("enable_thinking")
    if body.get("tools") and body["messages"][-1]["role"] == "user":
        said = {"content": None, "tool_calls": [CALL]}
    elif body.get("response_format"):
        said = {"content": '{"name": "Ada", "age": 36}'}
    elif thinks:
        said = {"content": "no", "reasoning_content": "7 times 13"}
    words = sum(len(str(message["content"]).split()) for message in body["messages"])
    return {"choices": [{"message": said}], "usage": {"prompt_tokens": words, "completion_tokens": 1}}


@pytest.fixture
def model(daemon: FakeDaemon) -> dict[str, Any]:
    found = {"id": "sha256:1", "tags": ["m"], "created": 1, "config": {}, "capabilities": ABLE, "context_window": 4096}
    daemon.answers |= {
        "GET /models/m": found,
        "GET /v1/models/m": {"backend": None},
        "POST /v1/chat/completions": answer,
        "POST /models/m/check": KEPT,
    }
    return found


def verdicts(cli: Cli, code: int = 0) -> dict[str, str]:
    result = cli("check", "m", "--json")
    assert result.code == code, result.err
    return {each["name"]: each["verdict"] for each in json.loads(result.out)["checks"]}


def test_a_model_that_can_do_everything_passes(model: dict[str, Any], cli: Cli) -> None:
    assert set(verdicts(cli).values()) == {"passed"}
    result = cli("check", "m")
    assert f"m: {ALL} of {ALL} passed" in result.out
    assert "get_weather('Paris')" in result.out


def test_the_daemon_gets_the_result_and_a_refusal_of_it_is_no_failure(
    model: dict[str, Any], daemon: FakeDaemon, cli: Cli
) -> None:
    daemon.answers["POST /v1/chat/completions"] = lambda request: (
        {"choices": [{"message": {"content": "Sunny."}}], "usage": USAGE}
        if request.body.get("tools")
        else answer(request)
    )
    verdicts(cli, 1)
    (told,) = daemon.asked("POST", "/models/m/check")
    assert told == {"passed": ALL - 2, "failed": ["tool call", "tool call unasked"]}
    daemon.answers |= {
        "POST /v1/chat/completions": answer,
        "POST /models/m/check": Status(403, "forbidden", "the key may not change models"),
    }
    result = cli("check", "m")
    assert (result.code, "the key may not change models" in result.err) == (0, True)


def test_lists_show_the_mark_of_a_model_that_was_checked(model: dict[str, Any], daemon: FakeDaemon, cli: Cli) -> None:
    other = model | {"id": "sha256:2", "tags": ["n"]}
    daemon.answers |= {"GET /models": [model, other], "GET /models/m": model | {"check": KEPT}}
    assert "CHECK" not in cli("ls").out
    daemon.answers["GET /models"] = [model | {"check": KEPT}, other | {"check": KEPT | {"failed": ["stream"]}}]
    lines = cli("ls").out.splitlines()
    assert "passed" in lines[1]
    assert f"failed 1 of {ALL + 1}" in lines[2]
    assert "passed" in cli("inspect", "m").out


def test_what_a_model_has_not_is_not_asked(model: dict[str, Any], daemon: FakeDaemon, cli: Cli) -> None:
    daemon.answers["GET /models/m"] = model | {"capabilities": ["chat"], "context_window": None}
    found = verdicts(cli)
    passed = {name for name, verdict in found.items() if verdict == "passed"}
    assert passed == {"system prompt", "several turns", "stream", "two users in turn", "schema"}
    assert set(found.values()) == {"passed", "skipped"}


FAULTS: dict[str, tuple[set[str], Any]] = {
    "words in place of a call": (
        {"tool call", "tool call unasked"},
        lambda body: {"content": "Sunny."} if body.get("tools") else None,
    ),
    "a call without its argument": (
        {"tool call", "tool call unasked"},
        lambda body: (
            {"tool_calls": [{"function": {"name": "get_weather", "arguments": "{}"}}]}
            if body.get("tools") and body["messages"][-1]["role"] == "user"
            else None
        ),
    ),
    "no JSON": (
        {"schema", "schema with thinking"},
        lambda body: {"content": "Ada is 36"} if body.get("response_format") else None,
    ),
    "thinking that nobody asked for": (
        {"no thinking"},
        lambda body: (
            {"content": "<think>hm</think>hello"}
            if body.get("chat_template_kwargs") == {"enable_thinking": False}
            else None
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_its_own_conversations(model: dict[str, Any], daemon: FakeDaemon, cli: Cli, fault: str) -> None:
    expected, broken = FAULTS[fault]

    def odd(request: Request) -> Any:
        said = broken(request.body)
        return answer(request) if said is None else {"choices": [{"message": said}], "usage": USAGE}

    daemon.answers["POST /v1/chat/completions"] = odd
    assert {name for name, verdict in verdicts(cli, 1).items() if verdict == "failed"} == expected


def test_a_machine_that_is_too_slow_is_no_failure_of_the_model(
    model: dict[str, Any], daemon: FakeDaemon, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_PATIENCE", 0.1)
    answers = daemon.answers["POST /v1/chat/completions"]

    def slow(request: Request) -> Any:
        return (
            Stream([], hold=Handler.wait_for_client_to_leave)
            if request.body.get("response_format")
            else answers(request)
        )

    daemon.answers["POST /v1/chat/completions"] = slow
    found = verdicts(cli)
    assert {name for name, verdict in found.items() if verdict != "passed"} == {"schema", "schema with thinking"}
    assert set(found.values()) == {"passed", "skipped"}


def test_a_window_that_is_smaller_than_it_says(model: dict[str, Any], daemon: FakeDaemon, cli: Cli) -> None:
    def short(request: Request) -> Any:
        found = answer(request)
        if isinstance(found, dict) and found["usage"]["prompt_tokens"] > 2048:
            return Status(400, "context_length_exceeded", "too long")
        return found

    daemon.answers["POST /v1/chat/completions"] = short
    assert {name for name, verdict in verdicts(cli, 1).items() if verdict == "failed"} == {"full window"}
