"""What real models can do, and a chat template that makes one of them call tools."""

from pathlib import Path

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
        SMOLLM2_SAFETENSORS: ["completion"],
        RERANKER: ["reranking"],
        RERANKER_SAFETENSORS: ["reranking"],
    }


def test_a_template_with_tools_makes_a_model_call_them(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "tools.jinja").write_text(TEMPLATE)
    asked = {"tools": [{"type": "function", "function": WEATHER}], "tool_choice": "required", "max_tokens": 256}
    refused = daemon.chat(SMOLLM2, "What is the weather in Paris?", **asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    given = daemon.run("configure", SMOLLM2, "--chat-template", str(tmp_path / "tools.jinja"), "--restart")
    assert given.returncode == 0, given.stderr
    assert capabilities(daemon)[SMOLLM2] == ["chat", "completion", "tools"]
    answer = daemon.chat(SMOLLM2, "What is the weather in Paris?", **asked)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert "tool_calls" in choice["message"], choice
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert "x-modelrunner-ignored" not in answer.headers
    assert daemon.run("configure", SMOLLM2, "--chat-template", "default", "--restart").returncode == 0
    assert capabilities(daemon)[SMOLLM2] == ["chat", "completion"]


def test_a_template_that_cannot_be_read_changes_nothing(daemon: Daemon, tmp_path: Path) -> None:
    assert daemon.chat(SMOLLM2, max_tokens=1).status_code == 200
    (tmp_path / "broken.jinja").write_text("{% for message in %}")
    refused = daemon.run("configure", SMOLLM2, "--chat-template", str(tmp_path / "broken.jinja"), "--restart")
    assert refused.returncode == 1
    assert "nothing was changed" in refused.stderr
    assert daemon.chat(SMOLLM2, max_tokens=1).status_code == 200
