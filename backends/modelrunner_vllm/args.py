"""Makes vLLM's command line from a run's specification. Pure."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from modelrunner.sdk import BadRequest, Endpoint, Mode, RunSpec
from modelrunner.sdk.flags import words_of
from modelrunner_vllm import adapters, flags, model
from modelrunner_vllm.engines import Engine, EngineKind
from modelrunner_vllm.environment import served_names
from modelrunner_vllm.memory import Config
from modelrunner_vllm.model_options import VllmOptions

_SERVE = "modelrunner_serve"
_DRAFT_TOKENS = 4
_TEMPLATE = "chat_template.jinja"
# No media is fetched for a client: data: URLs have no domain, and no domain can have this name (RFC 2606).
_NO_DOMAIN = "media.invalid"


def command(
    spec: RunSpec,
    endpoint: Endpoint,
    engine: Engine,
    *,
    kv_cache: int | None,
    scratch: Path,
    share: float | None = None,
) -> list[str]:
    """Returns the words to execute. `kv_cache` is bytes on each device, None for vLLM's own choice; `share` is
    `memory.share`; `scratch` is a folder for files of this run. Raises `BadRequest`."""
    options = VllmOptions.of(spec.options)
    eager = engine.kind is EngineKind.CPU if options.enforce_eager is None else options.enforce_eager
    words = [
        *_owned(spec, endpoint),
        *_sizes(spec, options, kv_cache, share),
        *_mode(spec, options),
        *_weights(options, eager=eager),
        *_devices(options),
        *adapters.words(spec, scratch),
    ]
    if options.sleep is not None:
        words.append("--enable-sleep-mode")
    own = flags.parse(spec.flags)
    return [str(engine.program), "-P", "-m", _SERVE, *words, *_flags({"--load-format": "safetensors"} | own)]


def _owned(spec: RunSpec, endpoint: Endpoint) -> Iterator[str]:
    """Yields the words that no option and no flag may change."""
    where = (
        ["--uds", str(endpoint.path)] if endpoint.path else ["--host", str(endpoint.host), "--port", str(endpoint.port)]
    )
    served = [adapters.BASE] if spec.bundle.adapters else served_names(spec)
    yield from ("--model", str(spec.bundle.directory), "--served-model-name", *served, *where)
    yield from ("--middleware", "modelrunner_guard.ModelGuard", "--allowed-media-domains", _NO_DOMAIN)
    yield from ("--disable-uvicorn-access-log", "--disable-fastapi-docs")
    if spec.bundle.brings_code:
        yield "--trust-remote-code"


def _sizes(spec: RunSpec, options: VllmOptions, kv_cache: int | None, share: float | None) -> Iterator[str]:
    yield from ("--max-model-len", str(spec.context_size), "--max-num-seqs", str(spec.parallel))
    if kv_cache is not None:
        yield from ("--kv-cache-memory-bytes", str(kv_cache))
    if (utilization := options.gpu_memory_utilization or share) is not None:
        yield from ("--gpu-memory-utilization", str(utilization))
    if options.kv_cache_dtype != "auto":
        yield from ("--kv-cache-dtype", options.kv_cache_dtype)


def _mode(spec: RunSpec, options: VllmOptions) -> Iterator[str]:
    if spec.mode is not Mode.COMPLETION:
        yield from ("--runner", "pooling")
        return
    yield from ("--runner", "generate")
    config = spec.bundle.header.metadata
    template = spec.bundle.files.get(_TEMPLATE)
    if template is not None and template.parent != spec.bundle.directory:  # vLLM finds the model's own
        yield from ("--chat-template", str(template))
    if tools := model.tool_parser(config, options.tool_call_parser):
        yield from ("--enable-auto-tool-choice", "--tool-call-parser", tools)
    if reasoning := model.reasoning_parser(config, options.reasoning_parser):
        yield from ("--reasoning-parser", reasoning)
    if speculative := _speculative(spec):
        yield from ("--speculative-config", json.dumps(speculative))


def _speculative(spec: RunSpec) -> dict[str, Any] | None:
    tokens = spec.draft_tokens or _DRAFT_TOKENS
    if spec.draft is not None:
        method = Config(spec.draft.header).drafter
        return {"method": method, "model": str(spec.draft.directory), "num_speculative_tokens": tokens}
    if spec.mtp:
        return {"method": "mtp", "num_speculative_tokens": spec.draft_tokens or Config(spec.bundle.header).heads}
    if spec.ngram:
        return {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": max(tokens, 2)}
    return None


def _weights(options: VllmOptions, *, eager: bool) -> Iterator[str]:
    if options.dtype != "auto":
        yield from ("--dtype", options.dtype)
    if options.quantization is not None:
        yield from ("--quantization", options.quantization)
    if options.hf_overrides is not None:
        yield from ("--hf-overrides", json.dumps(options.hf_overrides.values()))
    if eager:
        yield "--enforce-eager"


def _devices(options: VllmOptions) -> Iterator[str]:
    for name, size in (("tensor", options.tensor_parallel_size), ("pipeline", options.pipeline_parallel_size)):
        if size > 1:
            yield from (f"--{name}-parallel-size", str(size))
    if options.executor is not None:
        yield from ("--distributed-executor-backend", options.executor)
    elif options.workers > 1:
        yield from ("--distributed-executor-backend", "mp")  # vLLM's own choice depends on whether Ray can be imported


def _flags(own: Mapping[str, str]) -> Iterator[str]:
    for flag, text in own.items():
        yield from words_of(flags.OPTIONS[flag], text)


def check(spec: RunSpec, kind: EngineKind) -> None:
    """Raises `BadRequest` for a run that an engine of this kind cannot do."""
    options = VllmOptions.of(spec.options)
    if options.sleep is not None and kind is EngineKind.CPU:
        raise BadRequest("sleep needs the CUDA build of vLLM: this machine runs the CPU build", param="vllm.sleep")
    if options.gpu_memory_utilization is not None and kind is EngineKind.CPU:
        raise BadRequest(
            "gpu-memory-utilization needs a GPU: on the CPU set kv-cache-size, or leave it to the context size",
            param="vllm.gpu-memory-utilization",
        )
    if spec.mtp and not Config(spec.bundle.header).heads:
        raise BadRequest(
            f"{spec.bundle.name} has no heads that predict further tokens (MTP): take a draft model, or "
            "`--draft-ngram on`",
            param="speculative.mtp",
        )
    adapters.check(spec)
