"""The runtime flags of vLLM that a user may give: numbers, switches and words of a closed list. Flags with files, code,
addresses or other models are not allowed. If the model's table has a setting instead, the refusal names it.

The names are those of vllm/engine/arg_utils.py and vllm/entrypoints/launchers/cli_args.py."""

from dataclasses import dataclass

from modelrunner.sdk.flags import AllowList, Choice, Field, FlagKind, Integer, Number, Switch
from modelrunner_vllm.model_options import VllmOptions

_TOKENS = 1 << 24


@dataclass(frozen=True)
class Option:
    flag: str
    kind: FlagKind
    aliases: tuple[str, ...] = ()


def _words(*words: str) -> Choice:
    return Choice(dict.fromkeys(words))


def _switch(name: str) -> Option:
    return Option(f"--{name}", Switch(f"--no-{name}"))


ALLOWED = (
    Option("--max-model-len", Integer(1, _TOKENS)),
    Option("--max-num-seqs", Integer(1, 256)),
    Option("--max-num-batched-tokens", Integer(1, _TOKENS)),
    Option("--long-prefill-token-threshold", Integer(0, _TOKENS)),
    Option("--block-size", Integer(1, 1024)),
    Option("--seed", Integer(0, 2**63 - 1)),
    Option("--max-logprobs", Integer(0, 1_000_000)),
    Option("--cpu-offload-gb", Number(0, 65536)),
    Option("--stream-interval", Integer(1, 1024)),
    Option("--optimization-level", Integer(0, 3), ("-O",)),
    Option("--performance-mode", _words("balanced", "interactivity", "throughput")),
    Option("--scheduling-policy", _words("fcfs", "priority")),
    Option("--logprobs-mode", _words("raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs")),
    Option("--prefix-caching-hash-algo", _words("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")),
    Option("--tokenizer-mode", _words("auto", "hf", "slow", "mistral")),
    Option("--config-format", _words("auto", "hf", "mistral")),
    Option("--load-format", _words("safetensors", "mistral", "dummy")),  # never a pickle
    Option("--safetensors-load-strategy", _words("lazy", "eager", "prefetch")),
    Option("--model-impl", _words("auto", "vllm", "transformers")),
    Option("--convert", _words("auto", "none", "embed", "classify")),
    Option("--chat-template-content-format", _words("auto", "string", "openai")),
    Option("--generation-config", _words("auto", "vllm")),
    Option("--all2all-backend", _words("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency")),
    _switch("enable-prefix-caching"),
    _switch("enable-chunked-prefill"),
    _switch("enable-expert-parallel"),
    _switch("async-scheduling"),
    _switch("disable-sliding-window"),
    _switch("disable-cascade-attn"),
    _switch("disable-custom-all-reduce"),
    _switch("disable-hybrid-kv-cache-manager"),
    _switch("language-model-only"),
    _switch("enable-prompt-tokens-details"),
    _switch("enable-force-include-usage"),
    _switch("exclude-tools-when-tool-choice-none"),
    _switch("use-tqdm-on-load"),
    _switch("kv-sharing-fast-prefill"),
)
# Flags that the daemon sets, or that a field of a model's configuration stands for.
OWNED = (  # noqa: SIM905
    "--model --served-model-name --uds --host --port --runner --middleware --root-path "
    "--api-key --trust-remote-code --hf-overrides --hf-token --hf-config-path --revision --code-revision --tokenizer "
    "--tokenizer-revision --download-dir --gpu-memory-utilization --kv-cache-memory-bytes --kv-cache-dtype --dtype "
    "--quantization -q --enforce-eager --no-enforce-eager --tensor-parallel-size -tp --pipeline-parallel-size -pp "
    "--data-parallel-size -dp --distributed-executor-backend --tool-call-parser --reasoning-parser --enable-lora "
    "--enable-auto-tool-choice --lora-modules --speculative-config -sc --enable-sleep-mode --chat-template "
    "--tool-parser-plugin --reasoning-parser-plugin --io-processor-plugin --logits-processors --worker-cls "
    "--worker-extension-cls --scheduler-cls --model-class-overrides --tool-server --allowed-local-media-path "
    "--allowed-media-domains --config --log-config-file --otlp-traces-endpoint --kv-transfer-config "
    "--additional-config --compilation-config -cc --enable-log-requests --enable-log-outputs --ssl-keyfile "
    "--ssl-certfile --api-server-count --headless --grpc --nnodes --node-rank --master-addr --master-port"
).split()

OPTIONS = {option.flag: option for option in ALLOWED}
_REASONS = {
    flag: f"set `{key}` in the model's table `vllm` instead (docs/vllm.md)"
    for flag, key in {
        **{f"--{key}": key for key in (name.replace("_", "-") for name in VllmOptions.model_fields)},
        "--kv-cache-memory-bytes": "kv-cache-size",
        "--no-enforce-eager": "enforce-eager",
        "--enable-auto-tool-choice": "tool-call-parser",
        "--enable-lora": "lora-adapters",
        "--lora-modules": "lora-adapters",
        "--enable-sleep-mode": "sleep",
        "--distributed-executor-backend": "executor",
        "-q": "quantization",
        "-tp": "tensor-parallel-size",
        "-pp": "pipeline-parallel-size",
    }.items()
} | {
    "--trust-remote-code": "only the command that takes a model can trust its code: `--trust-remote-code` there",
    "--speculative-config": "use `speculative`: a draft model, `ngram` or `mtp`",
    "--served-model-name": "`modelrunner tag` gives a model another name",
}
_FIELDS = {"--max-model-len": Field("context_size"), "--max-num-seqs": Field("parallel")}
_LIST = AllowList("vLLM", ALLOWED, also_owned=OWNED, reasons=_REASONS, fields=_FIELDS)
parse, fold = _LIST.parse, _LIST.fold
