"""Makes the engine's command line from a run's specification. Pure."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modelrunner.sdk import BadRequest, Bundle, Endpoint, EngineDevice, Mode, RunSpec
from modelrunner.sdk.flags import words_of
from modelrunner_llamacpp import adapters, flags, rpc
from modelrunner_llamacpp.engines import Engine, EngineKind
from modelrunner_llamacpp.environment import INSIDE
from modelrunner_llamacpp.flags import OPTIONS
from modelrunner_llamacpp.hparams import Header
from modelrunner_llamacpp.model_options import LlamaCppOptions

# Flags that extend the context beyond the trained one.
_STRETCHING = {"--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale"}
# Copies of a sequence's sliding or recurrent layers, to roll it back: llama.cpp's default of 32 for each sequence
# can take more than the model.
_CHECKPOINTS = "3"
# The architectures whose heads llama.cpp computes (LLM_GRAPH_TYPE_DECODER_MTP in src/models).
_PREDICTING = frozenset(
    {"bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe", "glm5-next", "hy_v3"}
    | {"mimo2", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "step35"}
)
# The architectures whose layers a head for them can read (t_layer_inp in src/models). With another one llama-server
# aborts at the first request.
_READABLE = frozenset(
    {"bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe", "llama"}
    | {"mimo2", "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe", "qwen3"}
    | {"qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen4exp"}
)
_SERVE = INSIDE / "modelrunner_serve.py"
_POOLING = ("none", "mean", "cls", "last", "rank")  # llama_pooling_type's numbers, as in `ARCH.pooling_type`


def effective(
    spec: RunSpec,
    *,
    cache_ram: int = 0,
    threads: int | None = None,
    batch: int | None = None,
    rearranged: bool = False,
) -> dict[str, str]:
    """Returns the options that decide memory and speed, keyed by llama-server's flags. The user's flags win over the
    specification. `cache_ram` is in MiB, `batch` in tokens (None for llama.cpp's default), and `rearranged` is True if
    most weights would be in memory twice (repack.py). Raises `BadRequest` as `flags.parse` does."""
    own = flags.parse(spec.flags)
    context, parallel = _sizes(spec, own)
    options = {
        "--ctx-size": str(context * parallel),
        "--parallel": str(parallel),
        "--kv-unified": "off",  # each sequence has a context of its own, so that no request can fail because of others
        "--cache-ram": str(cache_ram),  # llama.cpp's default is 8 GiB, which no estimate counts
        "--n-gpu-layers": "auto" if spec.gpu_layers is None else str(spec.gpu_layers),
        "--ctx-checkpoints": _CHECKPOINTS,
        "--jinja": "on",
    }
    if threads is not None:
        options |= {"--threads": str(threads)}
    if batch is not None:
        size = str(max(batch, parallel))
        options |= {"--batch-size": size, "--ubatch-size": size}
    if is_stretched(spec):
        options["--yarn-orig-ctx"] = str(spec.bundle.context_length)
    if spec.draft_tokens is not None:
        options["--spec-ngram-simple-size-m" if spec.ngram else "--spec-draft-n-max"] = str(spec.draft_tokens)
    if spec.draft_acceptance is not None:
        options["--spec-draft-p-min"] = str(spec.draft_acceptance)
    if (budget := LlamaCppOptions.of(spec.options).reasoning_budget) is not None:
        options["--reasoning-budget"] = str(budget)
    if rearranged and own.get("--repack") != "off":
        options["--load-mode"] = "none"
    if (options | own)["--n-gpu-layers"] != "auto":
        options["--fit"] = "off"  # the layers are counted already
    own = {flag: text for flag, text in own.items() if flag not in ("--ctx-size", "--parallel")}
    return options | _mode(spec, options | own, context) | own


def tunings(threads: Sequence[int] | None) -> list[tuple[str, ...]]:
    """Returns the flags that are worth measuring on a machine. `threads` are the numbers to try on a processor, None
    for an engine with devices. A smaller type of the cache is none of them: it changes answers."""
    flash = ("--flash-attn", "off")
    if threads is None:
        return [("--batch-size", "2048", "--ubatch-size", "1024"), flash]
    # No larger batch: the engine notices between two of them that a client has left.
    batch = ("--batch-size", "256", "--ubatch-size", "256")
    return [*[("--threads", str(count)) for count in threads], batch, flash]


def _sizes(spec: RunSpec, own: Mapping[str, str]) -> tuple[int, int]:
    """Returns the tokens of one sequence's context, and the number of sequences."""
    return int(own.get("--ctx-size", spec.context_size)), int(own.get("--parallel", spec.parallel))


def _mode(spec: RunSpec, options: Mapping[str, str], context: int) -> dict[str, str]:
    match spec.mode:
        case Mode.EMBEDDING:
            pooling = options.get("--pooling") or pooling_of(spec.bundle)
            return {"--embeddings": "on", "--pooling": pooling} | _batch(pooling, context)
        case Mode.RERANKING:
            return {"--embeddings": "on", "--pooling": "rank"} | _batch("rank", context)
        case _:
            return {}


def _batch(pooling: str, context: int) -> dict[str, str]:
    """Returns the sizes of a batch. A pooled input is computed in one physical batch, so that batch is as large as the
    context of a sequence. llama.cpp can split it only with the last token's pooling (`can_split` in
    tools/server/server-context.cpp)."""
    return {} if pooling == "last" else {"--batch-size": str(context), "--ubatch-size": str(context)}


def pooling_of(bundle: Bundle) -> str:
    """Returns the model's own pooling. A model without one is causal: only its last token has seen the whole text, so
    the pooling is "last"."""
    number = bundle.header.metadata.get(f"{bundle.header.architecture}.pooling_type")
    return _POOLING[number] if isinstance(number, int) and 0 < number < len(_POOLING) else "last"


def owned(spec: RunSpec, endpoint: Endpoint, engine: Engine, slots: Path | None = None) -> dict[str, str]:
    """Returns the options that no flag may change. `slots` is the folder for saved slots, None where they are not
    kept."""
    options = {
        "--model": str(spec.bundle.model_file),
        "--alias": spec.bundle.name,
        "--host": str(endpoint.path or endpoint.host),
        "--metrics": "on",
        "--slots": "off" if slots is None else "on",  # shows the length of each prompt, never its text
        "--props": "off",
        "--webui": "off",
        "--offline": "on",
    }
    if slots is not None:
        options["--slot-save-path"] = f"{slots}/"
    if endpoint.port is not None:
        options["--port"] = str(endpoint.port)
    if engine.devices is False:
        options["--fit"] = "off"  # there is no device to fit the model to, and trying opens the file a second time
    hears_alone = "vision" not in spec.bundle.capabilities  # llama-cpp-python's server cannot do that
    projector = spec.bundle.files.get("mmproj.gguf")
    if projector is not None and not (engine.kind is EngineKind.PYTHON and hears_alone):
        options["--mmproj"] = str(projector)
    if (template := spec.bundle.files.get("chat_template.jinja")) and "--chat-template" not in flags.parse(spec.flags):
        options["--chat-template-file"] = str(template)
    options |= adapters.options(spec)
    if spec.draft is not None:
        options |= {
            "--spec-draft-model": str(spec.draft.model_file),
            "--spec-type": Header(spec.draft.header).drafter,
        }
    elif spec.mtp:
        options["--spec-type"] = "draft-mtp"
    elif spec.ngram:
        options["--spec-type"] = "ngram-simple"
    if is_stretched(spec):  # the engine would cut a slot's context to the file's figure (server-context.cpp)
        options["--override-kv"] = f"{spec.bundle.header.architecture}.context_length=int:{spec.context_size}"
    return options


def by_name(options: Mapping[str, str], listed: Sequence[EngineDevice]) -> dict[str, str]:
    """Returns the options of llama-server with its names of devices (`--list-devices`, in that order) in place of
    numbers, and with the RPC servers that have them. Without names it begins on each device that there is, which takes
    some hundred MiB of each, also for a run with no layer there (llama_prepare_model_devices of llama.cpp); the
    projector is on the first one that is named."""
    match options.get("--split-mode", "layer"):
        case "none":
            shares = {int(options.get("--main-gpu", "0")): ""}
        case "layer" if "--tensor-split" in options:
            shares = dict(enumerate(options["--tensor-split"].split(",")))
        case _:
            return dict(options)
    used = {listed[i]: share for i, share in shares.items() if 0 <= i < len(listed) and (not share or float(share))}
    servers, names = rpc.names(used, listed)
    kept = {"--rpc": ",".join(servers)} if servers else {}  # before the names of its devices
    kept |= {
        flag: text for flag, text in options.items() if flag not in ("--split-mode", "--main-gpu", "--tensor-split")
    }
    kept["--device"] = ",".join(names.get(device.name, device.name) for device in used) or "none"
    return kept if len(used) < 2 else kept | {"--tensor-split": ",".join(used.values())}


def is_stretched(spec: RunSpec) -> bool:
    """Returns True if one sequence may be longer than the model was trained for."""
    return spec.bundle.context_length is not None and spec.context_size > spec.bundle.context_length


def check(spec: RunSpec, kind: EngineKind | None) -> None:
    """Raises `BadRequest` for a run that an engine of this kind cannot do. None stands for an engine that is not
    installed yet."""
    adapters.check(spec)
    if (spec.ngram or spec.mtp or spec.draft) and kind is EngineKind.PYTHON:
        raise BadRequest(
            "llama-cpp-python's server has no speculative decoding: install llama.cpp's own with `modelrunner install "
            "llama.cpp`",
            param="speculative",
        )
    _check_heads(spec)
    _check_context(spec, kind)


def _check_heads(spec: RunSpec) -> None:
    """Raises `BadRequest` for heads that the model does not have, and for a head that was made for another model."""
    own, name = Header(spec.bundle.header), spec.bundle.name
    if spec.mtp and not own.predicts:
        raise BadRequest(
            f"{name} has no heads that predict further tokens (MTP), or its file leaves them out: take a draft model, "
            "or `--draft-ngram on`",
            param="speculative.mtp",
        )
    if spec.mtp and own.architecture not in _PREDICTING:
        raise BadRequest(
            f"llama.cpp does not use the heads of {own.architecture} models such as {name}: take a draft model, or "
            "`--draft-ngram on`",
            param="speculative.mtp",
        )
    if spec.draft is None:
        return
    head, another = Header(spec.draft.header), f"{spec.draft.name} is a head for another model"
    if head.drafter == "draft-mtp" and head.width != own.width:  # llama-server would abort
        raise BadRequest(
            f"{another} (its states have {head.width} figures, those of {name} {own.width}): take the head that was "
            "made for it",
            param="speculative.draft_model",
        )
    if head.drafter == "draft-eagle3":
        if own.architecture not in _READABLE:
            raise BadRequest(
                f"llama.cpp cannot draft with an EAGLE head for {own.architecture} models such as {name}: take a small "
                "model, or `--draft-ngram on`",
                param="speculative.draft_model",
            )
        width, reads = head.integer("target_hidden_size"), max(head.integers("target_layers"), default=0)
        if width != own.embedding or reads > own.layers:
            raise BadRequest(
                f"{another} (it reads {width} figures of layer {reads}; {name} has "
                f"{own.layers} layers of {own.embedding}): take the head that was made for it",
                param="speculative.draft_model",
            )


def _check_context(spec: RunSpec, kind: EngineKind | None) -> None:
    """Raises `BadRequest` for a stretched context without the flags that extend the model's positions, or with an
    engine that lacks them."""
    if not is_stretched(spec):
        return
    trained, wanted = spec.bundle.context_length, f"context-size {spec.context_size} is beyond the"
    if not flags.parse(spec.flags).keys() & _STRETCHING:
        factor = -(-spec.context_size // (trained or 1))
        raise BadRequest(
            f"{wanted} {trained} tokens that the model was trained for; to stretch them, with some loss, give the "
            f"runtime flags `--rope-scaling yarn --rope-scale {factor}` too",
            param="context-size",
        )
    if kind is not None and kind is not EngineKind.NATIVE:
        raise BadRequest(
            f"{wanted} {trained} tokens that the model was trained for, and only llama.cpp's own server can go there: "
            "build it with `modelrunner install --build llama.cpp`",
            param="context-size",
        )


def command(engine: Engine, options: Mapping[str, str]) -> list[str]:
    """Returns the words to execute. Raises `BadRequest` for an option that llama-cpp-python's server does not have."""
    match engine.kind:
        case EngineKind.NATIVE:
            words = [word for flag, text in options.items() for word in words_of(OPTIONS[flag], text)]
            return [str(engine.program), *words]
        case EngineKind.WHEEL:
            return [str(engine.program), "-I", str(_SERVE), "xllamacpp", json.dumps(attributes(options))]
        case EngineKind.PYTHON:
            return [str(engine.program), "-I", str(_SERVE), "llama_cpp", json.dumps(model_settings(options))]


def attributes(options: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values for `xllamacpp.CommonParams` by dotted path; an enum's member stands there by its name.
    `pinned` lists the sampling settings that the model's own defaults must not replace."""
    chosen: dict[str, Any] = {}
    for flag, text in options.items():
        name, value = OPTIONS[flag].attribute, OPTIONS[flag].attribute_value(text)
        several = name == "tensor_buft_overrides" and chosen.get(name)
        chosen[name] = f"{several},{value}" if several else value
    return {"attributes": chosen, "pinned": [pins for flag in options if (pins := OPTIONS[flag].pins)]}


# Options that the daemon gives every engine and that llama-cpp-python's server lacks: it has one sequence, its own
# routes and no projector detection. Any other option that it lacks came from the user, and is refused.
_NOT_IN_PYTHON = frozenset(
    (
        *("--parallel", "--ctx-checkpoints", "--kv-unified", "--cache-ram", "--jinja", "--pooling", "--spec-type"),
        *("--metrics", "--slots", "--props", "--webui", "--offline", "--fit", "--host", "--port"),
    )
)


def model_settings(options: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields of `llama_cpp.server.settings.ModelSettings`, and where to listen."""
    for flag in options.keys() - _NOT_IN_PYTHON:
        if not OPTIONS[flag].setting:
            raise BadRequest(
                f"{flag} needs llama.cpp's own server, and only llama-cpp-python's is here: "
                "install it with `modelrunner install llama.cpp`",
                param="runtime-flags",
            )
    pairs = [(OPTIONS[flag], text) for flag, text in options.items()]
    settings = {option.setting: option.setting_value(text) for option, text in pairs if option.setting}
    if "--mmproj" in options:
        settings["chat_format"] = "mtmd"  # without one of its names, the projector is not even opened
    return {"settings": settings, "host": options["--host"], "port": int(options.get("--port", 0))}
