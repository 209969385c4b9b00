"""Which runtime flags of vLLM a person may give: numbers, switches and words of a closed list. What names files, code,
addresses or other models is not among them; what has an option or a field of its own is refused with that reason.
Names: vllm/engine/arg_utils.py and vllm/entrypoints/launchers/cli_args.py."""

from dataclasses import dataclass

from modelrunner.flags import AllowList, Choice, Integer, Kind, Number, Switch, words_of

_TOKENS = 1 << 24


@dataclass(frozen=True)
class Flag:
    flag: str
    kind: Kind
    aliases: tuple[str, ...] = ()


def _words(*words: str) -> Choice:
    return Choice(dict.fromkeys(words))


def _switch(name: str) -> Flag:
    return Flag(f"--{name}", Switch(f"--no-{name}"))


ALLOWED = (
    Flag("--max-model-len", Integer(1, _TOKENS)),
    Flag("--max-num-seqs", Integer(1, 256)),
    Flag("--max-num-batched-tokens", Integer(1, _TOKENS)),
    Flag("--long-prefill-token-threshold", Integer(0, _TOKENS)),
    Flag("--block-size", Integer(1, 1024)),
    Flag("--seed", Integer(0, 2**63 - 1)),
    Flag("--max-logprobs", Integer(0, 1_000_000)),
    Flag("--cpu-offload-gb", Number(0, 65536)),
    Flag("--stream-interval", Integer(1, 1024)),
    Flag("--optimization-level", Integer(0, 3), ("-O",)),
    Flag("--performance-mode", _words("balanced", "interactivity", "throughput")),
    Flag("--scheduling-policy", _words("fcfs", "priority")),
    Flag("--logprobs-mode", _words("raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs")),
    Flag("--prefix-caching-hash-algo", _words("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")),
    Flag("--tokenizer-mode", _words("auto", "hf", "slow", "mistral")),
    Flag("--config-format", _words("auto", "hf", "mistral")),
    Flag("--load-format", _words("safetensors", "mistral", "dummy")),  # never a pickle
    Flag("--safetensors-load-strategy", _words("lazy", "eager", "prefetch")),
    Flag("--model-impl", _words("auto", "vllm", "transformers")),
    Flag("--convert", _words("auto", "none", "embed", "classify")),
    Flag("--chat-template-content-format", _words("auto", "string", "openai")),
    Flag("--generation-config", _words("auto", "vllm")),
    Flag("--all2all-backend", _words("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency")),
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
# What the daemon decides, or what a model's configuration has a field for.
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

FLAGS = {flag.flag: flag for flag in ALLOWED}
parse = AllowList("vLLM", ALLOWED, also_owned=OWNED).parse


# Flags that stand for a field of a model's configuration.
_FIELDS = {"--max-model-len": "context_size", "--max-num-seqs": "parallel"}


def fold(flags: tuple[str, ...]) -> tuple[dict[str, int | None], tuple[str, ...]]:
    """As `Backend.fold_flags`."""
    parsed = parse(flags)
    fields: dict[str, int | None] = {_FIELDS[flag]: int(text) for flag, text in parsed.items() if flag in _FIELDS}
    rest = (word for flag, text in parsed.items() if flag not in _FIELDS for word in words_of(FLAGS[flag], text))
    return fields, tuple(rest)
