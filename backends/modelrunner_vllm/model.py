"""Facts about models that vLLM needs: their parsers of tool calls and reasoning, and the limit of their inputs.

The names of parsers are those of vllm/tool_parsers/__init__.py and vllm/reasoning/__init__.py, of the version in
engines.py. A parser is chosen by the architecture in config.json, since each family was trained on one syntax. An
architecture with several syntaxes gets none, and the user names it."""

import json
from collections.abc import Mapping
from typing import Any

from modelrunner.sdk import Bundle

TOOL_PARSERS = frozenset(
    (  # noqa: SIM905 (fifty quoted words would be harder to read)
        "apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 dots "
        "ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hf hunyuan_a13b "
        "hy_v3 hy_v4 inkling internlm jamba k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3_json llama4_json "
        "llama4_pythonic longcat mimo minicpm5 minimax_m2 minimax_m3 mistral muse_glimmer olmo3 openai phi4_mini_json "
        "plamo3 poolside_v1 pythonic qwen3_coder qwen3_json qwen3_xml seed_oss step3 step3p5 xlam"
    ).split()
)
REASONING_PARSERS = frozenset(
    (  # noqa: SIM905
        "cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45 gemma4 glm45 glm47 "
        "granite granite_thinking_parser hf holo2 hunyuan_a13b hy_v3 hy_v4 inkling k2_horizon kimi_k2 kimi_k3 ling3 "
        "mimo minicpmv minimax_m2 minimax_m2_append_think minimax_m3 mistral muse_glimmer nemotron_v3 olmo3 "
        "openai_gptoss plamo3 poolside_v1 qwen3 seed_oss step3 step3p5"
    ).split()
)

_TOOL_PARSER_OF = {
    "ApertusForCausalLM": "apertus",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "Ernie4_5_MoeForCausalLM": "ernie45",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Glm4MoeForCausalLM": "glm45",
    "GptOssForCausalLM": "openai",
    "GraniteForCausalLM": "granite",
    "GraniteMoeHybridForCausalLM": "granite4",
    "HunYuanMoEV1ForCausalLM": "hunyuan_a13b",
    "InternLM2ForCausalLM": "internlm",
    "JambaForCausalLM": "jamba",
    "KimiK2ForCausalLM": "kimi_k2",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2",
    "Llama4ForConditionalGeneration": "llama4_pythonic",
    "MiMoForCausalLM": "mimo",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Mistral3ForConditionalGeneration": "mistral",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mistral",
    "Olmo3ForCausalLM": "olmo3",
    "Phi3ForCausalLM": "phi4_mini_json",
    "Qwen2ForCausalLM": "hermes",
    "Qwen2MoeForCausalLM": "hermes",
    "Qwen3ForCausalLM": "hermes",
    "Qwen3MoeForCausalLM": "hermes",
    "Qwen3NextForCausalLM": "qwen3_xml",
    "SeedOssForCausalLM": "seed_oss",
}
_REASONING_PARSER_OF = {
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "Ernie4_5_MoeForCausalLM": "ernie45",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Glm4MoeForCausalLM": "glm45",
    "GptOssForCausalLM": "openai_gptoss",
    "HunYuanMoEV1ForCausalLM": "hunyuan_a13b",
    "MiMoForCausalLM": "mimo",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3",
    "SeedOssForCausalLM": "seed_oss",
}
_NONE = "none"
_LLAMA_3_VOCABULARY = 128_256  # many models have the Llama architecture; only Llama 3 has this vocabulary


def tool_parser(config: Mapping[str, Any], wanted: str | None) -> str | None:
    """Returns the parser of tool calls, None for none. `config` is a bundle's metadata; `wanted` is the user's choice
    ("none" for no parser), None to choose by the architecture."""
    architecture = config.get("general.architecture")
    if architecture == "LlamaForCausalLM" and config.get("vocab_size") == _LLAMA_3_VOCABULARY:
        return _chosen("llama3_json", wanted)
    return _chosen(_TOOL_PARSER_OF.get(str(architecture)), wanted)


def reasoning_parser(config: Mapping[str, Any], wanted: str | None) -> str | None:
    """Returns the parser of reasoning, as `tool_parser` does."""
    return _chosen(_REASONING_PARSER_OF.get(str(config.get("general.architecture"))), wanted)


def _chosen(known: str | None, wanted: str | None) -> str | None:
    return known if wanted is None else None if wanted == _NONE else wanted


_SENTENCE_FILE = "sentence_bert_config.json"


def sentence_limit(bundle: Bundle) -> int | None:
    """Returns the longest input in tokens that a sentence-transformers model was tuned for, None without such a limit.
    It may be less than config.json says, and vLLM accepts no larger context."""
    if _SENTENCE_FILE not in bundle.files:
        return None
    try:
        limit = json.loads(bundle.files[_SENTENCE_FILE].read_bytes()).get("max_seq_length")
    except (OSError, ValueError, AttributeError):
        return None  # damaged, as the engine will report
    return limit if isinstance(limit, int) and limit > 0 else None
