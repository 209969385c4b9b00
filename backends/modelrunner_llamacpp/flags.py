"""llama.cpp's flags, with the spelling of each for every engine: the flags that a user may set, with type and range,
and the flags that the daemon sets. Their names and ranges are those of common/arg.cpp of llama.cpp."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelrunner.sdk.flags import AllowList, Choice, Field, FlagKind, Integer, Number, Switch, Text


class Reciprocal(Number):
    """A number. The attribute takes its reciprocal."""

    def value(self, text: str) -> float:
        return 1.0 / float(text)


@dataclass(frozen=True)
class Numbers:
    """A list of at most 128 shares (llama.cpp's most devices), separated by commas."""

    def check(self, text: str) -> None:
        try:
            shares = self.value(text)
        except ValueError:
            shares = []
        if not 1 <= len(shares) <= 128 or not all(0 <= share <= 1e6 for share in shares):
            raise ValueError("numbers from 0 to 1000000 with commas between them, such as 3,1")

    def value(self, text: str) -> list[float]:
        return [float(share) for share in text.split(",")]


@dataclass(frozen=True)
class Words(Text):
    """Some of the `known` words, in any order, separated by semicolons."""

    known: frozenset[str]

    def check(self, text: str) -> None:
        if not set(text.split(";")) <= self.known:
            raise ValueError(f"some of {', '.join(sorted(self.known))}, with semicolons between them")


_EXPERTS = r"ffn_(up|down|gate|gate_up)_(ch|)exps"  # LLM_FFN_EXPS_REGEX of common/common.h
_BUFFERS = re.compile(r"[^\s=,]{1,128}=(?:CPU|(?:CUDA|ROCm|Vulkan|SYCL|MTL|Metal)\d{0,3}(?:_Host|_Split)?)")


class Overrides(Text):
    """The placement of tensors: patterns of their names, each with a buffer, separated by commas. Only the engine
    interprets the patterns."""

    def check(self, text: str) -> None:
        pieces = text.split(",")
        if len(pieces) > 64 or not all(map(_BUFFERS.fullmatch, pieces)):
            raise ValueError("PATTERN=BUFFER with commas between them, such as blk.1.*exps=CPU or exps=CUDA1")


class AllExperts(Switch):
    """Keeps the experts of all layers in main memory."""

    def value(self, text: str) -> str:
        return rf"\.{_EXPERTS}=CPU"


class Experts(Integer):
    """Keeps the experts of the first layers in main memory."""

    def value(self, text: str) -> str:
        return ",".join(rf"blk\.{layer}\.{_EXPERTS}=CPU" for layer in range(int(text)))


class ScaledPaths(Text):
    """A list of PATH:SCALE, separated by commas. The paths have neither commas nor colons."""

    def value(self, text: str) -> list[tuple[str, float]]:
        pairs = [item.split(":") for item in text.split(",")]
        return [(path, float(scale)) for path, scale in pairs]


GGML_TYPES = {  # the types of a KV cache, with ggml_type's numbers
    "f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2, "q4_1": 3, "iq4_nl": 20, "q5_0": 6, "q5_1": 7,
}  # fmt: skip
_SAMPLERS = frozenset("penalties dry top_n_sigma top_k typ_p top_p min_p xtc temperature adaptive_p".split())  # noqa: SIM905
_TEMPLATES = (  # noqa: SIM905 (fifty quoted words would be harder to read)
    "bailing bailing-think bailing2 chatglm3 chatglm4 chatml command-r deepseek deepseek-ocr deepseek2 deepseek3 "
    "exaone-moe exaone3 exaone4 falcon3 gemma gigachat glmedge gpt-oss granite granite-4.0 granite-4.1 grok-2 "
    "hunyuan-dense hunyuan-moe hunyuan-vl kimi-k2 llama2 llama2-sys llama2-sys-bos llama2-sys-strip llama3 llama4 "
    "megrez minicpm mistral-v1 mistral-v3 mistral-v3-tekken mistral-v7 mistral-v7-tekken monarch openchat orion "
    "pangu-embedded phi3 phi4 rwkv-world seed_oss smolvlm solar-open vicuna vicuna-orca yandex zephyr"
).split()


@dataclass(frozen=True)
class Option:
    """A flag of llama-server. `attribute` is the dotted path in `xllamacpp.CommonParams`; `negated` says that the
    attribute is true when the switch is off. `setting` is the field of llama-cpp-python's `ModelSettings`, "" for none,
    and `settings` has its values where they are not the attribute's. `pins` is the member of
    `common_params_sampling_config` that makes the flag win over the model's own default."""

    flag: str
    attribute: str
    kind: FlagKind
    aliases: tuple[str, ...] = ()
    setting: str = ""
    pins: str = ""
    negated: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def attribute_value(self, text: str) -> Any:
        value = self.kind.value(text)
        return not value if self.negated else value

    def setting_value(self, text: str) -> Any:
        return self.settings[text] if text in self.settings else self.kind.value(text)


def _enum(prefix: str, *words: str, **named: str) -> dict[str, str]:
    return {word: prefix + word.upper() for word in words} | {word: prefix + name for word, name in named.items()}


_CACHE_TYPE = Choice(_enum("GGML_TYPE_", *GGML_TYPES))
_LAYERS = Integer(0, 10_000, {"auto": -1, "all": -2})
_TOKENS = 1 << 24


def _sampling(flag: str, name: str, kind: FlagKind, *aliases: str, pins: str = "") -> Option:
    return Option(flag, f"sampling.{name}", kind, aliases, pins=pins)


ALLOWED = (
    Option("--ctx-size", "n_ctx", Integer(1, _TOKENS), ("-c",), "n_ctx"),
    Option("--parallel", "n_parallel", Integer(1, 256), ("-np",)),
    Option("--threads", "cpuparams.n_threads", Integer(1, 1024), ("-t",), "n_threads"),
    Option("--threads-batch", "cpuparams_batch.n_threads", Integer(1, 1024), ("-tb",), "n_threads_batch"),
    Option("--threads-http", "n_threads_http", Integer(1, 1024)),
    Option("--poll", "cpuparams.poll", Integer(0, 100)),
    Option("--batch-size", "n_batch", Integer(1, _TOKENS), ("-b",), "n_batch"),
    Option("--ubatch-size", "n_ubatch", Integer(1, _TOKENS), ("-ub",), "n_ubatch"),
    Option("--n-predict", "n_predict", Integer(-1, _TOKENS), ("-n", "--predict")),
    Option("--keep", "n_keep", Integer(-1, _TOKENS)),
    Option("--swa-full", "swa_full", Switch()),
    Option("--context-shift", "ctx_shift", Switch("--no-context-shift")),
    Option("--ctx-checkpoints", "n_ctx_checkpoints", Integer(0, 1024), ("-ctxcp", "--swa-checkpoints")),
    Option("--checkpoint-min-step", "checkpoint_min_step", Integer(0, _TOKENS), ("-cms",)),
    Option("--cache-ram", "cache_ram_mib", Integer(0, 1 << 20), ("-cram",)),
    Option("--cache-prompt", "cache_prompt", Switch("--no-cache-prompt")),
    Option("--cache-reuse", "n_cache_reuse", Integer(0, _TOKENS)),
    Option("--cache-idle-slots", "cache_idle_slots", Switch("--no-cache-idle-slots")),
    Option("--slot-prompt-similarity", "slot_prompt_similarity", Number(0, 1), ("-sps",)),
    Option("--cont-batching", "cont_batching", Switch("--no-cont-batching"), ("-cb",)),
    Option("--cache-type-k", "cache_type_k", _CACHE_TYPE, ("-ctk",), "type_k", settings=GGML_TYPES),
    Option("--cache-type-v", "cache_type_v", _CACHE_TYPE, ("-ctv",), "type_v", settings=GGML_TYPES),
    Option("--flash-attn", "flash_attn_type",
           Choice(_enum("LLAMA_FLASH_ATTN_TYPE_", "auto", on="ENABLED", off="DISABLED")),
           ("-fa",), "flash_attn", settings={"on": True, "off": False, "auto": False}),
    Option("--load-mode", "load_mode", Choice(_enum("LLAMA_LOAD_MODE_", "auto", "none", "mmap", "mlock",
           **{"mmap+mlock": "MMAP_MLOCK", "dio": "DIRECT_IO"})), ("-lm",)),
    Option("--lazy-mode", "lazy_mode", Choice(_enum("LLAMA_LAZY_MODE_", "on", "auto", "off")), ("-lzm",)),
    Option("--numa", "numa", Choice(_enum("GGML_NUMA_STRATEGY_", "distribute", "isolate", "numactl"))),
    Option("--kv-offload", "no_kv_offload", Switch("--no-kv-offload"), ("-kvo",), "offload_kqv", negated=True),
    Option("--op-offload", "no_op_offload", Switch("--no-op-offload"), negated=True),
    Option("--repack", "no_extra_bufts", Switch("--no-repack"), negated=True),
    Option("--no-host", "no_host", Switch()),
    Option("--check-tensors", "check_tensors", Switch()),
    Option("--warmup", "warmup", Switch("--no-warmup")),
    Option("--perf", "no_perf", Switch("--no-perf"), negated=True),
    Option("--n-gpu-layers", "n_gpu_layers", _LAYERS, ("-ngl", "--gpu-layers"), "n_gpu_layers"),
    Option("--split-mode", "split_mode", Choice(_enum("LLAMA_SPLIT_MODE_", "none", "layer", "row", "tensor")), ("-sm",),
           "split_mode", settings={"none": 0, "layer": 1, "row": 2, "tensor": 3}),
    Option("--tensor-split", "tensor_split", Numbers(), ("-ts",), "tensor_split"),
    Option("--main-gpu", "main_gpu", Integer(-1, 127), ("-mg",), "main_gpu"),
    Option("--override-tensor", "tensor_buft_overrides", Overrides(), ("-ot",)),
    Option("--cpu-moe", "tensor_buft_overrides", AllExperts(), ("-cmoe",)),
    Option("--n-cpu-moe", "tensor_buft_overrides", Experts(0, 512), ("-ncmoe",)),
    Option("--rope-scaling", "rope_scaling_type", Choice(_enum("LLAMA_ROPE_SCALING_TYPE_", "none", "linear", "yarn")),
           (), "rope_scaling_type", settings={"none": 0, "linear": 1, "yarn": 2}),
    Option("--rope-scale", "rope_freq_scale", Reciprocal(0.001, 1000), (), "rope_freq_scale"),
    Option("--rope-freq-base", "rope_freq_base", Number(0, 1e12), (), "rope_freq_base"),
    Option("--rope-freq-scale", "rope_freq_scale", Number(0, 1000), (), "rope_freq_scale"),
    Option("--yarn-orig-ctx", "yarn_orig_ctx", Integer(0, _TOKENS), (), "yarn_orig_ctx"),
    Option("--yarn-ext-factor", "yarn_ext_factor", Number(-1, 1000), (), "yarn_ext_factor"),
    Option("--yarn-attn-factor", "yarn_attn_factor", Number(-1, 1000), (), "yarn_attn_factor"),
    Option("--yarn-beta-slow", "yarn_beta_slow", Number(-1, 1000), (), "yarn_beta_slow"),
    Option("--yarn-beta-fast", "yarn_beta_fast", Number(-1, 1000), (), "yarn_beta_fast"),
    Option("--pooling", "pooling_type", Choice(_enum("LLAMA_POOLING_TYPE_", "none", "mean", "cls", "last", "rank"))),
    Option("--embd-normalize", "embd_normalize", Integer(-1, 100)),
    Option("--image-min-tokens", "image_min_tokens", Integer(1, _TOKENS)),
    Option("--image-max-tokens", "image_max_tokens", Integer(1, _TOKENS)),
    Option("--mmproj-offload", "mmproj_use_gpu", Switch("--no-mmproj-offload")),
    Option("--jinja", "use_jinja", Switch("--no-jinja")),
    Option("--chat-template", "chat_template", Choice({name: name for name in _TEMPLATES})),
    Option("--prefill-assistant", "prefill_assistant", Switch("--no-prefill-assistant")),
    Option("--reasoning-format", "reasoning_format", Choice(_enum("COMMON_REASONING_FORMAT_", "auto", "none",
           "deepseek", **{"deepseek-legacy": "DEEPSEEK_LEGACY"}))),
    Option("--reasoning", "enable_reasoning", Choice({"on": 1, "off": 0, "auto": -1}), ("-rea",)),
    _sampling("--reasoning-budget", "reasoning_budget_tokens", Integer(-1, _TOKENS)),
    Option("--seed", "sampling.seed", Integer(0, 2**32 - 1, {"-1": 2**32 - 1}), ("-s",), "seed"),
    _sampling("--samplers", "samplers", Words(_SAMPLERS), pins="SAMPLERS"),
    _sampling("--temp", "temp", Number(0, 100), "--temperature", pins="TEMP"),
    _sampling("--top-k", "top_k", Integer(0, _TOKENS), pins="TOP_K"),
    _sampling("--top-p", "top_p", Number(0, 1), pins="TOP_P"),
    _sampling("--min-p", "min_p", Number(0, 1), pins="MIN_P"),
    _sampling("--xtc-probability", "xtc_probability", Number(0, 1), pins="XTC_PROBABILITY"),
    _sampling("--xtc-threshold", "xtc_threshold", Number(0, 1), pins="XTC_THRESHOLD"),
    _sampling("--typical", "typ_p", Number(0, 1), "--typical-p"),
    _sampling("--repeat-last-n", "penalty_last_n", Integer(-1, _TOKENS), pins="PENALTY_LAST_N"),
    _sampling("--repeat-penalty", "penalty_repeat", Number(0, 100), pins="PENALTY_REPEAT"),
    _sampling("--presence-penalty", "penalty_present", Number(-100, 100)),
    _sampling("--frequency-penalty", "penalty_freq", Number(-100, 100)),
    _sampling("--dry-multiplier", "dry_multiplier", Number(0, 100)),
    _sampling("--dry-base", "dry_base", Number(0, 100)),
    _sampling("--dry-allowed-length", "dry_allowed_length", Integer(0, _TOKENS)),
    _sampling("--dry-penalty-last-n", "dry_penalty_last_n", Integer(-1, _TOKENS)),
    _sampling("--dynatemp-range", "dynatemp_range", Number(0, 100)),
    _sampling("--dynatemp-exp", "dynatemp_exponent", Number(0, 100)),
    _sampling("--mirostat", "mirostat", Integer(0, 2), pins="MIROSTAT"),
    _sampling("--mirostat-lr", "mirostat_eta", Number(0, 100), pins="MIROSTAT_ETA"),
    _sampling("--mirostat-ent", "mirostat_tau", Number(0, 100), pins="MIROSTAT_TAU"),
    Option("--spec-draft-n-max", "speculative.draft.n_max", Integer(1, 1024)),
    Option("--spec-draft-n-min", "speculative.draft.n_min", Integer(0, 1024)),
    Option("--spec-draft-p-min", "speculative.draft.p_min", Number(0, 1), ("--draft-p-min",)),
    Option("--spec-draft-p-split", "speculative.draft.p_split", Number(0, 1), ("--draft-p-split",)),
    Option("--spec-ngram-simple-size-n", "speculative.ngram_simple.size_n", Integer(1, 1024)),
    Option("--spec-ngram-simple-size-m", "speculative.ngram_simple.size_m", Integer(1, 1024)),
    Option("--spec-draft-ngl", "speculative.draft.n_gpu_layers", _LAYERS,
           ("-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft")),
)  # fmt: skip

# The daemon sets these. A user's value would break routing, health or another user's privacy.
OWNED = (
    Option("--model", "model.path", Text(), ("-m",), "model"),
    Option("--alias", "model_alias", Text(), ("-a",), "model_alias"),
    Option("--host", "hostnames", Text()),
    Option("--port", "port", Integer(0, 65535)),
    Option("--mmproj", "mmproj.path", Text(), ("-mm",), "clip_model_path"),
    Option("--spec-draft-model", "speculative.draft.mparams.path", Text(), ("-md", "--model-draft")),
    Option(
        "--spec-type",
        "speculative.types",
        Choice(
            {
                name: [f"COMMON_SPECULATIVE_TYPE_{name.replace('-', '_').upper()}"]
                for name in ("draft-simple", "draft-eagle3", "draft-mtp", "ngram-simple")
            }
        ),
    ),
    Option("--override-kv", "kv_overrides", Text()),  # only llama-server has it
    Option("--rpc", "", Text()),  # the same
    Option("--device", "devices", Text(), ("-dev",)),  # the same
    Option("--embeddings", "embedding", Switch(), ("--embedding",), "embedding"),
    Option("--fit", "fit_params", Choice({"on": True, "off": False}), ("-fit",)),
    Option("--slots", "endpoint_slots", Switch("--no-slots")),
    Option("--props", "endpoint_props", Switch()),
    Option("--metrics", "endpoint_metrics", Switch()),
    Option("--webui", "ui", Switch("--no-webui"), ("--ui", "--no-ui")),
    Option("--offline", "offline", Switch()),
    Option("--kv-unified", "kv_unified", Switch("--no-kv-unified"), ("-kvu", "-no-kvu")),
    Option("--slot-save-path", "slot_save_path", Text()),
    Option("--lora-scaled", "lora_adapters", ScaledPaths()),
    Option("--chat-template-file", "chat_template_file", Text()),  # inside/modelrunner_serve.py reads it for the wheel
)
# Flags of llama-server with the same effects, which the daemon never sets.
ALSO_OWNED = (  # noqa: SIM905
    "--api-key --api-key-file --api-prefix --path --log-file --log-disable --log-jsonl --log-prompts-dir --hf-repo -hf "
    "--hf-file --hf-token --model-url --docker-repo --mmproj-url --rerank --reranking --media-path "
    "--models-dir --models-preset --models-max --timeout --ssl-key-file --ssl-cert-file --tools --agent "
    "--reuse-port --sleep-idle-seconds --cors-origins"
).split()
OPTIONS = {option.flag: option for option in (*ALLOWED, *OWNED)}
# Refused flags with the setting to use instead.
_REASONS = {
    **dict.fromkeys(
        ("--lora", "--lora-scaled", "--lora-base"),
        "give the model adapters with `modelrunner configure MODEL --lora PATH[:SCALE]`",
    ),
    **dict.fromkeys(
        ("--chat-template-file", "--chat-template-kwargs"),
        "give the model a template with `modelrunner configure MODEL --chat-template FILE`; the flag --chat-template "
        "takes the name of one of llama.cpp's",
    ),
    **dict.fromkeys(
        ("--kv-unified", "-kvu", "--no-kv-unified", "-no-kvu", "--kv-unified-per-slot"),
        "every sequence has a context of its own, so that no request can fail because of others; lower context-size or "
        "parallel to save memory",
    ),
    **dict.fromkeys(
        ("--mmproj", "-mm", "--mmproj-url", "--mmproj-auto", "--no-mmproj"),
        "the projector is a part of the model: `modelrunner package --gguf FILE --mmproj FILE NAME`",
    ),
    **dict.fromkeys(
        ("--spec-draft-model", "-md", "--model-draft", "--spec-type"),
        "set a draft model with `modelrunner configure MODEL --draft-model DRAFT`, or take `--draft-ngram on` or "
        "`--draft-mtp on`",
    ),
    **dict.fromkeys(
        ("--device", "-dev"), "choose devices with `modelrunner configure MODEL --set llamacpp.devices=[0]`"
    ),
    **dict.fromkeys(
        ("--grammar", "--grammar-file", "--json-schema", "-j", "--json-schema-file", "-jf"),
        "a request brings its own, in the field `grammar` or `response_format`",
    ),
    **dict.fromkeys(
        ("--embedding", "--embeddings", "--rerank", "--reranking"),
        "the route of a request decides it: /v1/embeddings or /v1/rerank",
    ),
    **dict.fromkeys(("--model", "-m", "--hf-repo", "-hf", "--model-url"), "the request or the command names the model"),
    **dict.fromkeys(("--host", "--port"), "the daemon listens for the engine; see `listen` in docs/configuration.md"),
    **dict.fromkeys(("--api-key", "--api-key-file"), "the engine is reached through the daemon only"),
    **dict.fromkeys(("--rpc",), 'name servers in `rpc` of [backends."llama.cpp"] (docs/configuration.md)'),
    **dict.fromkeys(("--verbose", "-v", "--log-file", "--log-verbosity", "-lv"), "`modelrunner logs` shows the log"),
}

# llama-server's spellings before --load-mode, which are still in use.
_SHORTHANDS = {"--mlock": ("--load-mode", "mmap+mlock"), "--no-mmap": ("--load-mode", "none")}
_FIELDS = {
    "--ctx-size": Field("context_size"),
    "--parallel": Field("parallel"),
    "--n-gpu-layers": Field("gpu_layers", {"auto": None, "all": 10_000}),  # more layers than any model has
}
_LIST = AllowList(
    "llama.cpp", ALLOWED, owned=OWNED, also_owned=ALSO_OWNED, reasons=_REASONS, shorthands=_SHORTHANDS, fields=_FIELDS
)
parse, fold = _LIST.parse, _LIST.fold
