"""Estimates the bytes of an engine from the model's header and the options of the run. Pure.

On the CPU an engine that has just loaded its model holds the weights, some of them twice (repack.py), the KV cache,
0.21 KiB for each word of the vocabulary and its program's own memory. Later it uses memory for the activations of one
batch, for checkpoints and for prompts. Measured in docs/memory.md."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from modelrunner.sdk import BadRequest, Bundle, Mode, RequiredMemory, RunSpec, default_context_size
from modelrunner_llamacpp import kvcache, repack, split
from modelrunner_llamacpp.engines import EngineKind
from modelrunner_llamacpp.hparams import Header
from modelrunner_llamacpp.kvcache import Shape
from modelrunner_llamacpp.model_options import LlamaCppOptions

MIB = 1 << 20
# The memory of the program itself. The wheel runs in a Python, llama-cpp-python's server in one with a web server.
_PROGRAM = {EngineKind.NATIVE: 19 * MIB, EngineKind.WHEEL: 42 * MIB, EngineKind.PYTHON: 90 * MIB}
_PER_WORD = 215  # 0.21 KiB: tokenizer and sampling candidates
_SEQUENCE = MIB  # a thread, a request and its tokens
# A driver's memory on each device in use (context, kernels, library workspaces), and its libraries and buffers in main
# memory: 343 and 320 MiB on an NVIDIA H200 (docs/memory.md).
PER_DEVICE = 350 * MIB
_DRIVER = 320 * MIB
# The largest caches of a model without a configuration, regardless of its weights.
_SMALL_CACHE = 1 << 30
_MOST_SEQUENCES = 4
_DRAFTED = 3  # tokens that heads propose at once by default (common_params_speculative_draft of common/common.h)
_LONGEST = 131_072  # tokens of a context that nobody asked for
_LAYER = re.compile(r"blk\.(\d{1,4})\..*")
_EXPERTS = re.compile(r"\.ffn_(?:up|down|gate|gate_up)_(?:ch)?exps")
PROJECTOR = re.compile(r"(?:v|a|mm|resampler)\..*")
_COPIES = 4  # of what goes into a batch, where several devices compute several batches at once (GGML_SCHED_MAX_COPIES)


@dataclass(frozen=True, slots=True)
class TensorSizes:
    """The sizes of a model's parts that can lie on different devices, in bytes. `rest` stays in main memory: the token
    embedding, which is looked up, not multiplied. `output` counts as one layer more when layers are placed; without an
    output of its own a model uses the embedding again, which is `copied` to the output's device."""

    layers: tuple[int, ...]
    caches: tuple[int, ...]
    output: int
    copied: int
    rest: int
    projector: int

    @property
    def weights(self) -> int:
        """Returns the bytes of the model's files that can be mapped."""
        return sum(self.layers) + self.output - self.copied + self.rest


def tensor_sizes(bundle: Bundle, shape: Shape, experts_on_host: int = 0) -> TensorSizes:
    """Returns the sizes from the tensor table. Where it is empty, the weights are spread evenly over the layers. The
    experts of the first `experts_on_host` layers stay in main memory."""
    header = Header(bundle.header)
    layers, output, embedding, projector = [0] * header.layers, 0, 0, 0
    for tensor in bundle.header.tensors:
        if (match := _LAYER.fullmatch(tensor.name)) and int(match[1]) < header.layers:
            if int(match[1]) < experts_on_host and _EXPERTS.search(tensor.name):
                continue  # in `rest`
            layers[int(match[1])] += tensor.size
        elif tensor.name.startswith("output"):
            output += tensor.size
        elif tensor.name == "token_embd.weight":
            embedding = tensor.size
        elif PROJECTOR.fullmatch(tensor.name):
            projector += tensor.size
    if not any(layers) and layers:
        layers = [bundle.size // len(layers)] * len(layers)
    caches = kvcache.by_layer(header, shape)
    copied = 0 if any(tensor.name == "output.weight" for tensor in bundle.header.tensors) else embedding
    return TensorSizes(
        layers=tuple(layers),
        caches=tuple(caches.get(layer, 0) for layer in range(header.layers)),
        output=output + copied,
        copied=copied,
        rest=max(0, weights(bundle) - sum(layers) - output),
        projector=projector,
    )


def default_context(bundle: Bundle) -> int:
    """Returns the tokens of one sequence of a model without a configuration: its own context where that is at most
    8,192, else 8,192 tokens, doubled while the cache takes at most half of the weights, up to its own or 131,072. A
    model that only pools computes each text in one batch, which grows with the context: it keeps 8,192."""
    header, longest = Header(bundle.header), min(bundle.context_length or 0, _LONGEST)
    context = default_context_size(bundle)
    while context < longest and Mode.COMPLETION in bundle.capabilities:
        longer = min(2 * context, longest)
        if kvcache.kv_cache(header, Shape(longer, 1)) > weights(bundle) // 2:
            break
        context = longer
    return context


def default_parallel(bundle: Bundle, context: int) -> int:
    """Returns the sequences that a model without a configuration may have: 4, 2 or 1, the most whose caches together
    take no more memory than the weights, or than 1 GiB. `context` is the number of tokens of one sequence."""
    one = kvcache.kv_cache(Header(bundle.header), Shape(context, 1))
    parallel = _MOST_SEQUENCES
    while parallel > 1 and parallel * one > max(weights(bundle), _SMALL_CACHE):
        parallel //= 2
    return parallel


def cache_of_other_prompts(spec: RunSpec) -> int:
    """Returns the bytes of main memory in which a run of one sequence, that may grow, keeps the prompts of finished
    requests: as many as the sequences that it could have would keep. Clients that ask in turn, such as an agent and its
    small questions, else compute each other's prompts anew. It is filled as prompts come."""
    if not spec.grows or spec.parallel > 1:
        return 0
    others = default_parallel(spec.bundle, spec.context_size) - 1
    return others * kvcache.kv_cache(Header(spec.bundle.header), Shape(spec.context_size, 1))


def weights(bundle: Bundle) -> int:
    """Returns the bytes of the weights without a projector's, or of the files where there is no tensor table."""
    listed = sum(tensor.size for tensor in bundle.header.tensors if not PROJECTOR.fullmatch(tensor.name))
    return listed or bundle.size


def held_twice(bundle: Bundle, options: Mapping[str, str], features: Collection[str]) -> int:
    """Returns the bytes of the weights that are both mapped and rearranged on a processor with these features."""
    if not rearranges(options):
        return 0
    return repack.size((t for t in bundle.header.tensors if not PROJECTOR.fullmatch(t.name)), features)


def rearranges(options: Mapping[str, str]) -> bool:
    """Returns True if weights may be held twice. Weights that are read instead of mapped are rearranged while they are
    read."""
    return _mapped(options) and options.get("--repack") != "off"


def _mapped(options: Mapping[str, str]) -> bool:
    return options.get("--load-mode") not in ("none", "dio")


def required(
    spec: RunSpec, kind: EngineKind, options: Mapping[str, str], features: Collection[str] = ()
) -> RequiredMemory:
    """Returns the memory of the run at a full context. `options` are those of args.effective. If they give each device
    a number of layers (split.py), the devices count too; otherwise everything is main memory. `features` are the
    processor's (repack.py)."""
    bundle, draft, shape = spec.bundle, spec.draft, _shape(spec, options)
    model, header = tensor_sizes(bundle, shape, _experts_on_host(options)), Header(bundle.header)
    placed = placement(options, len(model.layers) + 1)
    host = _PROGRAM[kind] + (header.vocabulary * _PER_WORD if header.causal else 0)
    beside = adapters_size(bundle) + drafts_size(spec, shape)
    if not any(placed):
        rearranged = sum(held_twice(each, options, features) for each in (bundle, draft) if each)
        held = model.weights + model.projector + rearranged + sum(model.caches) + beside
        loaded = RequiredMemory(host + held, shared=model.weights)
    else:
        loaded = _on_devices(bundle, model, placed, options)
        main = placed.index(max(placed))
        vram = tuple(size + beside if i == main else size for i, size in enumerate(loaded.vram))
        loaded = replace(loaded, ram=loaded.ram + host + _DRIVER, vram=vram)
    if not _mapped(options):
        loaded = replace(loaded, shared=0)
    return loaded + growth(spec, options)


def growth(spec: RunSpec, options: Mapping[str, str]) -> RequiredMemory:
    """Returns the main memory that is used only as prompts come: what goes into a batch and its attention mask, the
    activations unless there is a device, which computes large batches also of the layers that are not there, and the
    logits if every token is an output; checkpoints of states that cannot be rolled back; the cache of prompts."""
    shape, header = _shape(spec, options), Header(spec.bundle.header)
    placed = placement(options, header.layers + 1)
    row = 4 * header.embedding + _mask(shape) * _batches(placed, header, options)
    if not any(placed) or options.get("--op-offload") == "off":
        row += 4 * (2 * header.integer("feed_forward_length") + 5 * header.embedding)
    if sum(placed) <= header.layers and not shape.flash:
        # The scores of all heads, and a copy at half the precision that values are multiplied by.
        row += 6 * header.integer("attention.head_count", 1) * shape.context
    if _drafter(spec):  # its context has a mask of its own
        row += _mask(shape)
    sequences = shape.parallel * _SEQUENCE
    if options.get("--embeddings") == "on":
        row += 4 * header.vocabulary * (2 if header.causal else 1)  # computed, and copied out
        sequences = 0  # nothing is generated
    count = int(options["--ctx-checkpoints"])
    kept = kvcache.checkpoints(header, shape, count)
    if spec.draft is not None:  # its states are kept beside the model's
        kept += kvcache.checkpoints(Header(spec.draft.header), _drafting(shape), count)
    prompts = int(options["--cache-ram"]) * MIB
    states = _states(spec) * 4 * header.embedding * int(options.get("--batch-size", kvcache.DEFAULT_BATCH))
    return RequiredMemory(shape.ubatch * row + kept + prompts + sequences + states)


def drafts_size(spec: RunSpec, shape: Shape) -> int:
    """Returns the bytes right after the load of what drafts, beside those of the model: another model or a head, or the
    context of the model's own heads, whose weights are in its file."""
    if spec.draft is None and not spec.mtp:
        return 0
    header, own = Header((spec.draft or spec.bundle).header), weights(spec.draft) if spec.draft else 0
    cache = kvcache.of_heads if spec.mtp or header.drafter == "draft-mtp" else kvcache.kv_cache
    return own + cache(header, _drafting(shape)) + header.vocabulary * _PER_WORD


def _drafter(spec: RunSpec) -> str:
    return Header(spec.draft.header).drafter if spec.draft else "draft-mtp" if spec.mtp else ""


def _states(spec: RunSpec) -> int:
    """Returns the states of the model that are copied out for each token of a batch, since heads read them: that after
    the last layer, or those of three layers (output_reserve of llama-context.cpp)."""
    return {"draft-mtp": 1, "draft-eagle3": 3}.get(_drafter(spec), 0)


def _shape(spec: RunSpec, options: Mapping[str, str]) -> Shape:
    """Returns the shape of the run. Where heads draft, recurrent states can be taken back by as many tokens as they
    propose (need_n_rs_seq of common/common.h)."""
    drafted = int(options.get("--spec-draft-n-max", _DRAFTED))
    return replace(Shape.of(options), rollback=drafted if _states(spec) else 0)


def adapters_size(bundle: Bundle) -> int:
    """Returns the bytes of the LoRA adapters, which are read and not mapped, and lie where their layers do."""
    return sum(adapter.size for adapter in bundle.adapters)


def _drafting(shape: Shape) -> Shape:
    """Returns the shape of the draft model's cache, which does not have the types of the model's
    (common_base_params_to_speculative of common/speculative.cpp), and whose states are not taken back."""
    return replace(shape, type_k="f16", type_v="f16", rollback=0)


def placement(options: Mapping[str, str], layers: int) -> tuple[int, ...]:
    """Returns how many layers each device gets, where the output counts as the last layer. It is empty if llama.cpp
    decides. The last layers go to devices, cut by the shares (load_tensors of llama-model.cpp)."""
    text = options.get("--n-gpu-layers", "auto")
    if text == "auto":
        return ()
    count = layers if text == "all" else min(int(text), layers)
    if options.get("--split-mode") == "none":
        return (*[0] * int(options.get("--main-gpu", "0")), count)
    shares = [float(share) for share in options.get("--tensor-split", "").split(",") if share]
    if not sum(shares):
        return ()
    ends = [end / sum(shares) for end in accumulate(shares)]
    owners = [next(i for i, end in enumerate(ends) if end > layer / count) for layer in range(count)]
    return tuple(owners.count(device) for device in range(len(shares)))


def _experts_on_host(options: Mapping[str, str]) -> int:
    """Returns the number of layers whose experts the options keep in main memory."""
    return 10_000 if options.get("--cpu-moe") == "on" else int(options.get("--n-cpu-moe", "0"))


def placements(spec: RunSpec, options: Mapping[str, str], rooms: Sequence[int]) -> list[list[split.Placement]]:
    """Returns the ways to place the run's layers on devices with these `rooms` (bytes), as `split.placements`. There is
    none if there is no device, or if flags decide (`placed_by_hand`). Raises `BadRequest` for a device that is not
    there."""
    check_devices(LlamaCppOptions.of(spec.options), options, len(rooms))
    if not rooms:
        return []
    if _is_split_by_hand(options) or "--override-tensor" in options:
        return []
    shape, header = _shape(spec, options), Header(spec.bundle.header)
    chosen, model = LlamaCppOptions.of(spec.options), tensor_sizes(spec.bundle, shape, _experts_on_host(options))
    each = PER_DEVICE + compute(header, shape, options, output=False) + model.projector  # it is on the first one
    logits = compute(header, shape, options, output=True) - compute(header, shape, options, output=False)
    caches = model.caches if options.get("--kv-offload") != "off" else (0,) * len(model.caches)
    blocks = [weights + cache for weights, cache in zip(model.layers, caches, strict=True)] + [model.output + logits]
    taken = adapters_size(spec.bundle) + drafts_size(spec, shape)
    free = [room - taken if not chosen.devices or i in chosen.devices else 0 for i, room in enumerate(rooms)]
    named = int(options["--main-gpu"]) if "--main-gpu" in options else next(iter(chosen.devices), None)
    main = chosen.main_device if chosen.main_device is not None else named
    layers = options["--n-gpu-layers"]
    exactly = None if layers == "auto" else len(blocks) if layers == "all" else int(layers)
    return split.placements(blocks, each, free, main=main, exactly=exactly)


def placed_by_hand(spec: RunSpec, options: Mapping[str, str], rooms: Sequence[int]) -> RunSpec:
    """Returns the run with what its flags leave open about devices with these `rooms` (bytes), so that `required`
    counts them: llama.cpp puts every layer on devices that flags split, in shares of their free memory."""
    if not rooms or not _is_split_by_hand(options):
        return spec
    flags = spec.flags
    if options.get("--n-gpu-layers", "auto") == "auto":
        flags += ("--n-gpu-layers", "all")
    if "--tensor-split" not in options and options["--split-mode"] != "none":
        flags += ("--tensor-split", ",".join(str(room // MIB) for room in rooms))
    return replace(spec, flags=flags)


def _is_split_by_hand(options: Mapping[str, str]) -> bool:
    return "--tensor-split" in options or options.get("--split-mode", "layer") != "layer"


def check_devices(chosen: LlamaCppOptions, options: Mapping[str, str], count: int) -> None:
    """Raises `BadRequest` if the options or flags name a device beyond the `count` that are there."""
    named = {*chosen.devices, *([] if chosen.main_device is None else [chosen.main_device])}
    there = f"devices 0 to {count - 1}" if count > 1 else "device 0 alone" if count else "the processor alone"
    last = max(int(options.get("--main-gpu", "0")), options.get("--tensor-split", "").count(","))
    if 0 < count <= last:
        raise BadRequest(f"llama.cpp has {there} here: change `--main-gpu` or `--tensor-split`", param="runtime-flags")
    if missing := sorted(number for number in named if number >= count):
        raise BadRequest(
            f"there is no device {', '.join(map(str, missing))} for llama.cpp here, but {there}: change `devices` or "
            "`main-device`",
            param="llamacpp.devices",
        )


def _on_devices(
    bundle: Bundle, model: TensorSizes, placed: tuple[int, ...], options: Mapping[str, str]
) -> RequiredMemory:
    """Returns the memory of a run on devices, without the part of main memory that the process needs in any case."""
    header, shape = Header(bundle.header), Shape.of(options)
    on_host = len(model.layers) + 1 - sum(placed)
    batches, token = _batches(placed, header, options), 4 * header.embedding
    more = shape.ubatch * (batches - 1) * (token + _mask(shape))
    caches = model.caches if options.get("--kv-offload") != "off" else (0,) * len(model.caches)
    blocks = [weights + cache for weights, cache in zip(model.layers, caches, strict=True)] + [model.output]
    vram, first = [], on_host
    for count in placed:
        end = first + count
        size = sum(blocks[first:end]) + PER_DEVICE + compute(header, shape, options, output=end == len(blocks))
        vram.append(size + more if count else 0)
        if count and batches > 1 and first > on_host:  # what the device before it has computed
            vram[-1] += shape.ubatch * batches * token
        first = end
    vram[next(i for i, count in enumerate(placed) if count)] += model.projector  # args.by_name
    mapped = sum(model.layers[:on_host]) + model.rest
    if _mapped(options):
        mapped = max(mapped, _mapped_part(bundle, on_host, _experts_on_host(options)))
    cached = sum(model.caches) - sum(caches[on_host:])
    return RequiredMemory(mapped + cached, tuple(vram), shared=mapped)


def _mapped_part(bundle: Bundle, on_host: int, experts_on_host: int) -> int:
    """Returns the bytes of the file that stay mapped: from the first to the last tensor of main memory, with those of
    devices in between (load_all_data of llama-model-loader.cpp). A file may begin with the embedding and the output."""

    def is_on_host(name: str) -> bool:
        if match := _LAYER.fullmatch(name):
            layer = int(match[1])
            return layer < on_host or (layer < experts_on_host and _EXPERTS.search(name) is not None)
        return not name.startswith("output")

    tensors = [tensor for tensor in bundle.header.tensors if not PROJECTOR.fullmatch(tensor.name)]
    kept = [number for number, tensor in enumerate(tensors) if is_on_host(tensor.name)]
    return sum(tensor.size for tensor in tensors[kept[0] : kept[-1] + 1]) if kept else 0


def _mask(shape: Shape) -> int:
    """Returns the bytes of a token's row of the attention mask."""
    return (2 if shape.flash else 4) * shape.context


def _batches(placed: tuple[int, ...], header: Header, options: Mapping[str, str]) -> int:
    """Returns how many batches there are at once: several where all layers are split over devices, which then compute
    at the same time (pipeline_parallel of llama-context.cpp)."""
    is_split = sum(1 for count in placed if count) > 1 and sum(placed) > header.layers
    return _COPIES if is_split and options.get("--kv-offload") != "off" and not _experts_on_host(options) else 1


def compute(header: Header, shape: Shape, options: Mapping[str, str], *, output: bool) -> int:
    """Returns the bytes of a device's buffer for one batch: the logits if it has the output, the activations, the
    attention mask, and without flash attention the scores of all heads."""
    heads = header.integer("attention.head_count", 1)
    scores = heads * shape.context * 4 if options.get("--flash-attn") == "off" else 0
    logits = header.vocabulary * 4 if output else 0
    activations = 4 * (2 * header.integer("feed_forward_length") + 6 * header.embedding)
    return shape.ubatch * (logits + activations + _mask(shape) + scores)
