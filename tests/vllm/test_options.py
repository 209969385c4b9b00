"""What may be set for a model: typed, limited, and nothing that can name code, files or other repositories."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from modelrunner.errors import BadRequest
from modelrunner_vllm import flags, model
from modelrunner_vllm.model_options import VllmOptions


@pytest.mark.parametrize(
    "given_",
    [
        {},
        {"hf-overrides": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 32768}},
        {"hf-overrides": {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}},
        {"gpu-memory-utilization": 0.5, "tensor-parallel-size": 2, "pipeline-parallel-size": 2},
        {"executor": "ray", "ray-address": "ray://head.example:10001"},
        {"executor": "ray", "ray-address": "192.0.2.7:6379"},
        {"tool-call-parser": "none", "reasoning-parser": "qwen3"},
        {"tool_call_parser": "hermes", "sleep": 2, "quantization": "awq", "kv-cache-dtype": "fp8"},
    ],
)
def test_ordinary_options_pass(given_: dict[str, Any]) -> None:
    options = VllmOptions.model_validate(given_)
    assert VllmOptions.model_validate(options.model_dump(by_alias=True)) == options


@pytest.mark.parametrize(
    ("given_", "named"),
    [
        ({"hf-overrides": {"auto_map": {"AutoModel": "evil.Model"}}}, "auto_map"),
        ({"hf-overrides": {"_name_or_path": "/etc"}}, "_name_or_path"),
        ({"hf-overrides": {"quantization_config": {}}}, "quantization_config"),
        ({"hf-overrides": {"architectures": ["../evil"]}}, "architectures"),
        ({"hf-overrides": {"architectures": ["A", "B"]}}, "architectures"),
        ({"hf-overrides": {"rope_theta": float("inf")}}, "rope_theta"),
        ({"hf-overrides": {"max_position_embeddings": -1}}, "max_position_embeddings"),
        ({"gpu-memory-utilization": 1.5}, "gpu-memory-utilization"),
        ({"gpu-memory-utilization": 0.5, "kv-cache-size": 1 << 30}, "exclude each other"),
        ({"tensor-parallel-size": 0}, "tensor-parallel-size"),
        ({"executor": "external_launcher"}, "executor"),
        ({"ray-address": "head:6379"}, "needs executor ray"),
        ({"executor": "ray", "ray-address": "head:6379 --x"}, "ray-address"),
        ({"tool-call-parser": "/tmp/evil.py"}, "tool-call-parser"),
        ({"trust-remote-code": True}, "trust-remote-code"),
        ({"quantization": "gguf"}, "quantization"),
    ],
)
def test_others_are_refused_by_name(given_: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        VllmOptions.model_validate(given_)


@pytest.mark.parametrize(
    ("words", "parsed"),
    [
        (("--max-num-batched-tokens", "4096", "--seed", "7"), {"--max-num-batched-tokens": "4096", "--seed": "7"}),
        (("--no-enable-prefix-caching",), {"--enable-prefix-caching": "off"}),
        (
            ("-O", "1", "--scheduling-policy", "priority"),
            {"--optimization-level": "1", "--scheduling-policy": "priority"},
        ),
    ],
)
def test_ordinary_flags_pass(words: tuple[str, ...], parsed: dict[str, str]) -> None:
    assert flags.parse(words) == parsed


@pytest.mark.parametrize(
    "flag",
    [
        *("--model", "--trust-remote-code", "--uds", "--host", "--port", "--api-key", "--middleware", "--hf-overrides"),
        *(
            "--served-model-name",
            "--download-dir",
            "--tool-parser-plugin",
            "--worker-cls",
            "--chat-template",
            "--config",
        ),
        *("--allowed-local-media-path", "--kv-transfer-config", "--logits-processors", "--compilation-config", "-cc"),
    ],
)
def test_what_the_daemon_owns_cannot_be_given(flag: str) -> None:
    for words in ((flag,), (flag, "x"), (f"{flag}=x",)):
        with pytest.raises(BadRequest, match=f"{flag} (is set by modelrunner|cannot be given)"):
            flags.parse(words)


@pytest.mark.parametrize(
    "words",
    [("--load-format", "pt"), ("--load-format", "auto"), ("--max-logprobs", "x"), ("--seed",), ("stray",), ("--vv",)],
)
def test_wrong_flags_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(BadRequest):
        flags.parse(words)


def test_flags_that_stand_for_fields_are_folded() -> None:
    words = ("--max-model-len", "4096", "--seed", "1", "--max-num-seqs", "8", "--no-async-scheduling")
    assert flags.fold(words) == ({"context_size": 4096, "parallel": 8}, ("--seed", "1", "--no-async-scheduling"))


@given(st.lists(st.one_of(st.sampled_from([flag.flag for flag in flags.ALLOWED]), st.text(max_size=8))))
def test_only_known_flags_with_checked_values_come_out(words: list[str]) -> None:
    try:
        parsed = flags.parse(words)
    except BadRequest:
        return
    for flag, text in parsed.items():
        flags.OPTIONS[flag].kind.check(text)


@pytest.mark.parametrize(
    ("architecture", "vocabulary", "tools", "reasoning"),
    [
        ("Qwen3ForCausalLM", 151936, "hermes", "qwen3"),
        ("MistralForCausalLM", 32768, "mistral", None),
        ("GptOssForCausalLM", 201088, "openai", "openai_gptoss"),
        ("LlamaForCausalLM", 128256, "llama3_json", None),
        ("LlamaForCausalLM", 49152, None, None),
        ("BertModel", 30522, None, None),
    ],
)
def test_parsers_go_by_the_architecture(
    architecture: str, vocabulary: int, tools: str | None, reasoning: str | None
) -> None:
    config = {"general.architecture": architecture, "vocab_size": vocabulary}
    assert model.tool_parser(config, None) == tools
    assert model.reasoning_parser(config, None) == reasoning
    assert model.tool_parser(config, "none") is None
    assert model.tool_parser(config, "xlam") == "xlam"
    for found, known in ((tools, model.TOOL_PARSERS), (reasoning, model.REASONING_PARSERS)):
        assert found is None or found in known
