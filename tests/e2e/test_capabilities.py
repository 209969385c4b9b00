"""What real models can do, and a chat template with which one of them calls tools."""

import json
from pathlib import Path
from typing import Any

from tests.e2e.conftest import GEMMA3, MINILM, SMOLLM2
from tests.e2e.daemons import Daemon
from tests.models.prepare import MINILM_SAFETENSORS, RERANKER, RERANKER_SAFETENSORS, SMOLLM2_SAFETENSORS
from tests.models.prompts import SHOWN, TOOLS

WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
}


def capabilities(daemon: Daemon) -> dict[str, list[str]]:
    return {model["id"]: model["capabilities"] for model in daemon.get("/v1/models").json()["data"]}


def test_what_the_models_can_do(daemon: Daemon) -> None:
    assert capabilities(daemon) == {
        SMOLLM2: ["chat", "completion"],
        GEMMA3: ["completion"],
        MINILM: ["embedding"],
        MINILM_SAFETENSORS: ["embedding"],
        SMOLLM2_SAFETENSORS: ["chat", "completion"],
        RERANKER: ["reranking"],
        RERANKER_SAFETENSORS: ["reranking"],
    }


def test_a_template_with_tools_makes_a_model_call_them(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "tools.jinja").write_text(TOOLS)
    tools: dict[str, Any] = {"tools": [{"type": "function", "function": WEATHER}]}
    refused = daemon.chat(SMOLLM2, max_tokens=1, tool_choice="required", **tools)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    assert daemon.chat(SMOLLM2, max_tokens=1, **tools).headers["x-modelrunner-ignored"] == "tools"
    given = daemon.run("configure", SMOLLM2, "--chat-template", str(tmp_path / "tools.jinja"), "--restart")
    assert given.returncode == 0, given.stderr
    assert capabilities(daemon)[SMOLLM2] == ["chat", "completion", "tools"]
    tools["tools"].append({"type": "function", "function": WEATHER | {"name": "other"}})
    named = {"type": "function", "function": {"name": "other"}}
    for wanted, name in (("auto", "get_weather"), ("required", "get_weather"), (named, "other")):
        answer = daemon.chat(SMOLLM2, tool_choice=wanted, **tools)
        assert (answer.status_code, answer.headers.get("x-modelrunner-ignored")) == (200, None)
        [choice] = answer.json()["choices"]
        [call] = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", name)
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
    assert daemon.run("configure", SMOLLM2, "--chat-template", "default", "--restart").returncode == 0
    assert capabilities(daemon)[SMOLLM2] == ["chat", "completion"]


def test_a_required_call_comes_without_prose(daemon: Daemon, tmp_path: Path) -> None:
    """Of a weak model whose template only shows the tools: it would tell the story. In each family that can require a
    call."""
    (tmp_path / "shown.jinja").write_text(SHOWN)
    configured = daemon.run("configure", SMOLLM2, "--chat-template", str(tmp_path / "shown.jinja"), "--restart")
    assert configured.returncode == 0, configured.stderr
    story = "Tell me a story of a dragon."
    asked: dict[str, Any] = {"model": SMOLLM2, "messages": [{"role": "user", "content": story}]}
    chat = asked | {"tools": [{"type": "function", "function": WEATHER}], "max_tokens": 300}
    [choice] = daemon.post("/v1/chat/completions", chat | {"tool_choice": "required"}).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    offered = [{"name": WEATHER["name"], "input_schema": WEATHER["parameters"]}]
    asked |= {"tools": offered, "tool_choice": {"type": "any"}, "max_tokens": 300}
    [block] = daemon.post("/v1/messages", asked).json()["content"]
    wanted = {"model": SMOLLM2, "input": story, "tools": [{"type": "function", **WEATHER}], "tool_choice": "required"}
    [item] = daemon.post("/v1/responses", wanted | {"max_output_tokens": 300}).json()["output"]
    assert (block["type"], item["type"]) == ("tool_use", "function_call")
    for arguments in (json.loads(call["function"]["arguments"]), block["input"], json.loads(item["arguments"])):
        assert arguments["city"] in ("Paris", "Rome")
    assert daemon.run("configure", SMOLLM2, "--chat-template", "default", "--restart").returncode == 0


def test_an_effort_of_none_switches_thinking_off(daemon: Daemon, tmp_path: Path) -> None:
    template = "{{ messages[-1].content }}{% if enable_thinking is defined and not enable_thinking %} off{% endif %}"
    (tmp_path / "think.jinja").write_text(template)
    configured = daemon.run("configure", SMOLLM2, "--chat-template", str(tmp_path / "think.jinja"), "--restart")
    assert configured.returncode == 0, configured.stderr
    body = {"model": SMOLLM2, "messages": [{"role": "user", "content": "Hello"}]}
    prompts = [
        daemon.post("/v1/apply-template", body | {"reasoning_effort": effort}).json()["prompt"]
        for effort in (None, "none", "low")
    ]
    assert prompts == ["Hello", "Hello off", "Hello"]
    assert daemon.run("configure", SMOLLM2, "--chat-template", "default", "--restart").returncode == 0


def test_a_template_that_cannot_be_read_changes_nothing(daemon: Daemon, tmp_path: Path) -> None:
    assert daemon.chat(SMOLLM2, max_tokens=1).status_code == 200
    (tmp_path / "broken.jinja").write_text("{% for message in %}")
    refused = daemon.run("configure", SMOLLM2, "--chat-template", str(tmp_path / "broken.jinja"), "--restart")
    assert refused.returncode == 1
    assert "the chat template cannot be parsed: line 1" in refused.stderr
    assert daemon.chat(SMOLLM2, max_tokens=1).status_code == 200
