"""What real models can do, and a chat template that shows tools to one of them."""

from pathlib import Path
from typing import Any

from tests.e2e.conftest import GEMMA3, MINILM, SMOLLM2
from tests.e2e.daemons import Daemon
from tests.models.prepare import MINILM_SAFETENSORS, RERANKER, RERANKER_SAFETENSORS, SMOLLM2_SAFETENSORS

# ChatML, with the tools of a request before the first message: as Hermes and Qwen were trained for.
TEMPLATE = """{%- if tools %}<|im_start|>system
You call functions. <tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
Answer with <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>.<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
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


def test_a_template_with_tools_shows_them_to_a_model(daemon: Daemon, tmp_path: Path) -> None:
    """A model as small as this one seldom calls a tool: what counts is that it was shown the tools."""
    (tmp_path / "tools.jinja").write_text(TEMPLATE)
    tools: dict[str, Any] = {"tools": [{"type": "function", "function": WEATHER}]}
    refused = daemon.chat(SMOLLM2, max_tokens=1, tool_choice="required", **tools)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    assert daemon.chat(SMOLLM2, max_tokens=1, **tools).headers["x-modelrunner-ignored"] == "tools"
    given = daemon.run("configure", SMOLLM2, "--chat-template", str(tmp_path / "tools.jinja"), "--restart")
    assert given.returncode == 0, given.stderr
    assert capabilities(daemon)[SMOLLM2] == ["chat", "completion", "tools"]
    without = daemon.chat(SMOLLM2, max_tokens=1)
    answer = daemon.chat(SMOLLM2, max_tokens=1, tool_choice="required", **tools)
    assert (answer.status_code, answer.headers.get("x-modelrunner-ignored")) == (200, None)
    assert answer.json()["usage"]["prompt_tokens"] > without.json()["usage"]["prompt_tokens"] + 30
    assert daemon.run("configure", SMOLLM2, "--chat-template", "default", "--restart").returncode == 0
    assert capabilities(daemon)[SMOLLM2] == ["chat", "completion"]


def test_a_template_that_cannot_be_read_changes_nothing(daemon: Daemon, tmp_path: Path) -> None:
    assert daemon.chat(SMOLLM2, max_tokens=1).status_code == 200
    (tmp_path / "broken.jinja").write_text("{% for message in %}")
    refused = daemon.run("configure", SMOLLM2, "--chat-template", str(tmp_path / "broken.jinja"), "--restart")
    assert refused.returncode == 1
    assert "nothing was changed" in refused.stderr
    assert daemon.chat(SMOLLM2, max_tokens=1).status_code == 200
