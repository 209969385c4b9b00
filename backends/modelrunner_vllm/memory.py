"""Estimates the bytes of vLLM from config.json, the safetensors headers and the options of the run. Pure.

The cache is as large as the context needs, not vLLM's default of all free memory (its --gpu-memory-utilization of
0.92), so that several models can live together. Block sizes and the cache's layout are those of vllm/platforms and
vllm/v1/kv_cache_interface.py."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from typing import Any

from modelrunner.sdk import BadRequest, Bundle, InvalidModel, Mode, ModelHeader, RequiredMemory, RunSpec, Variant
from modelrunner_vllm import flags
from modelrunner_vllm.engines import EngineKind
from modelrunner_vllm.model_options import VllmOptions

MIB = 1 << 20
VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # numbers devices as the budget does
_MOST_SETS = 64  # of devices that are offered for one run
_LEAST_SHARE = 0.001  # of a device: vLLM refuses 0
# The PSS of the API server, EngineCore and its tracker, and of a worker without its weights, measured on Linux x86-64
# with one worker.
_SERVER = 1100 * MIB
_WORKER = 620 * MIB
# A CUDA context with NCCL and the kernels' workspaces, and a worker's part of main memory with CUDA. They were not
# measured.
_CUDA_CONTEXT = 1024 * MIB
_CUDA_WORKER = 2048 * MIB
_CPU_BLOCK, _CUDA_BLOCK = 128, 16  # tokens
_BATCHED_TOKENS = 2048
_MOST = 1 << 31  # for any figure in config.json
_PARTS = ("", "text_config.", "transformer_layer_config.")
# The names of the number of layers for further tokens, and of one for any further depth (hf_config_override of
# vllm/config/speculative.py).
_HEADS = (
    *("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"),
    "mtp_config.num_nextn_predict_layers",
)
_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# Encoders: every token sees all others, and nothing is kept from one request to the next.
_ENCODERS = ("Bert", "Roberta", "XLMRoberta", "ModernBert", "NomicBert", "DistilBert", "Electra", "Gte", "NewModel")


@dataclass(frozen=True, slots=True)
class Shape:
    """The options of a run that decide its memory. There are `parallel` sequences of `context` tokens. A block of the
    cache has `block` tokens, and one computation at most `batched`. Each worker keeps `offloaded` bytes of the weights
    in main memory instead of its device."""

    context: int
    parallel: int
    options: VllmOptions
    block: int
    batched: int
    offloaded: int

    @classmethod
    def of(cls, spec: RunSpec, kind: EngineKind) -> "Shape":
        own = flags.parse(spec.flags)
        block = int(own.get("--block-size", _CUDA_BLOCK if kind is EngineKind.CUDA else _CPU_BLOCK))
        batched = int(own.get("--max-num-batched-tokens", _BATCHED_TOKENS))
        options = VllmOptions.of(spec.options)
        offloaded = int(float(own.get("--cpu-offload-gb", 0)) * (1 << 30))
        return cls(spec.context_size, spec.parallel, options, block, batched, offloaded)


class Config:
    """The values of config.json, as the store flattened it. A model of several parts has the text model's figures in
    `text_config`, and a head in the form of speculators those of its layer in `transformer_layer_config`."""

    def __init__(self, header: ModelHeader) -> None:
        self._values = header.metadata
        self._tensors = header.tensors

    def get(self, name: str) -> Any:
        found = (self._values.get(f"{part}{name}") for part in _PARTS)
        return next((value for value in found if value is not None), None)

    def number(self, name: str, default: int = 0) -> int:
        """Returns a figure, the largest one if the file has one for each layer. Raises `InvalidModel` for text, a
        boolean, or a figure beyond all models."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, list | tuple):
            value = max((each for each in value if isinstance(each, int)), default=default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST:
            raise InvalidModel(f"its config.json says {str(value)[:40]!r} for {name}, which is no such number")
        return value

    @property
    def is_encoder(self) -> bool:
        return str(self._values.get("general.architecture", "")).startswith(_ENCODERS)

    @property
    def heads(self) -> int:
        """Returns the number of layers that predict further tokens (MTP), 0 for a model without."""
        said = next(filter(None, map(self.number, _HEADS)), 0)
        return said or int(any("mtp" in tensor.name for tensor in self._tensors))

    @property
    def drafter(self) -> str:
        """Returns how the model drafts for another one, as vLLM's `method` names it."""
        names = f"{self.get('general.architecture')} {self.get('speculators_model_type')}".lower()
        return next((method for method in ("eagle3", "eagle") if method in names), "draft_model")

    @property
    def layers(self) -> int:
        """Returns the number of layers with attention, without a hybrid model's recurrent ones."""
        kinds = self.get("layer_types")
        if isinstance(kinds, Sequence) and not isinstance(kinds, str):
            return sum("attention" in str(kind) and "linear" not in str(kind) for kind in kinds)
        return self.number("num_hidden_layers")


def required(spec: RunSpec, kind: EngineKind) -> RequiredMemory:
    """Returns the memory of the run. On GPUs the whole model lies there, in equal parts."""
    run = Shape.of(spec, kind)
    workers = run.options.workers
    adapters = sum(adapter.size for adapter in spec.bundle.adapters)
    model = weights(spec.bundle, run.options) + adapters + _activations(Config(spec.bundle.header), run, spec.mode)
    if spec.draft is not None:
        model += weights(spec.draft, run.options) + _activations(Config(spec.draft.header), run, spec.mode)
    if spec.mtp:  # their weights are in the model's files
        model += _activations(Config(spec.bundle.header), run, spec.mode)
    cache = kv_cache(spec, kind) or 0
    if run.options.ray_address is not None:
        return RequiredMemory(_SERVER)  # Ray places the workers, and accounts for them
    if kind is EngineKind.CPU:
        return RequiredMemory(_SERVER + workers * (_WORKER + cache) + model)
    offloaded = min(run.offloaded, weights(spec.bundle, run.options) // workers)
    device = model // workers - offloaded + cache + _CUDA_CONTEXT
    return RequiredMemory(_SERVER + workers * (_CUDA_WORKER + offloaded), (device,) * workers)


def share(spec: RunSpec, kind: EngineKind, totals: Sequence[int]) -> float | None:
    """Returns the share of a device, from 0 to 1, that must be free before vLLM starts; `totals` are the bytes of the
    engine's devices. vLLM's default is most of a device, also with a cache of a given size (`request_memory` of
    vllm/v1/worker/utils.py), so nothing could stand beside it. None where nothing is to be said, or somebody said
    it."""
    device = max(required(spec, kind).vram, default=0)
    if not device or not totals or VllmOptions.of(spec.options).gpu_memory_utilization is not None:
        return None
    return min(1.0, max(_LEAST_SHARE, round(device / max(totals), 4)))


def placed(
    spec: RunSpec, kind: EngineKind, devices: int, visible: Sequence[str], totals: Sequence[int] = ()
) -> list[Variant]:
    """Returns the run on each set of devices that it may take, of so many `devices` as the budget has; `visible` are
    their names in CUDA_VISIBLE_DEVICES, `totals` their bytes, as far as they are known. There is one way where nothing
    is to be placed: on the processors, where Ray places, or where the budget has no device. With the executor ray
    several hosts may share it. Raises `BadRequest` if there are too few devices, or none for the executor ray."""
    needed, options = required(spec, kind), VllmOptions.of(spec.options)
    if options.executor == "ray" and options.ray_address is None:
        if kind is EngineKind.CPU:
            raise BadRequest(
                "executor ray needs GPUs: vLLM's build for processors does not run on Ray", param="vllm.executor"
            )
        return _shared(spec, kind, devices, visible, totals)
    if not devices or not needed.vram:
        return [Variant(spec, needed)]
    allowed = options.devices or tuple(range(devices))
    missing = [number for number in allowed if number >= devices]
    if missing or options.workers > devices:
        what = f"there is no device {missing[0]}" if missing else f"{options.workers} workers need a device each"
        raise BadRequest(
            f"{what}: vLLM has {devices} here, numbered from 0; change `devices` or the parallel sizes",
            param="vllm.devices" if missing else "vllm.tensor-parallel-size",
        )
    sizes = [needed.vram[0]] * devices
    if options.gpu_memory_utilization is not None and len(totals) == devices:
        sizes = [int(options.gpu_memory_utilization * total) for total in totals]  # it takes all of its share
    return [
        Variant(
            replace(spec, environment={**spec.environment, **_ORDER, VISIBLE: ",".join(visible[i] for i in chosen)}),
            replace(needed, vram=tuple(size if i in chosen else 0 for i, size in enumerate(sizes))),
        )
        for chosen in islice(combinations(allowed, options.workers), _MOST_SETS)
    ]


def _shared(
    spec: RunSpec, kind: EngineKind, devices: int, visible: Sequence[str], totals: Sequence[int]
) -> list[Variant]:
    """Returns the run on this host alone, by processes of the engine, and shared by as many hosts as its stages of
    pipeline parallelism can be dealt out to: the workers of one stage stay together, since they exchange the most
    (vLLM: docs/serving/parallelism_scaling.md). Raises `BadRequest` if not even one stage has its devices here."""
    options, needed = VllmOptions.of(spec.options), required(spec, kind)
    stages, found = options.pipeline_parallel_size, list[Variant]()
    allowed = [number for number in options.devices or range(devices) if number < devices]
    if len(allowed) >= options.workers:
        found = placed(replace(spec, options={**spec.options, "executor": "mp"}), kind, devices, visible, totals)
    worker = (needed.ram - _SERVER) // options.workers
    ordered = replace(spec, environment={**spec.environment, **_ORDER})
    for rank, hosts in enumerate([number for number in range(2, stages + 1) if not stages % number], 1):
        count = options.workers // hosts
        for first in range(0, len(allowed) - count + 1, count):
            chosen = allowed[first : first + count]
            vram = tuple([needed.vram[0] if number in chosen else 0 for number in range(devices)])
            memory = RequiredMemory(_SERVER + count * worker, vram)
            part = RequiredMemory(count * worker, vram)
            found.append(Variant(ordered, memory, f"over {hosts} hosts", rank, hosts, part))
    if not found:
        raise BadRequest(
            f"{options.workers} workers need a device each, and no part of them has them here: vLLM has {devices}, "
            "numbered from 0; change `devices` or the parallel sizes",
            param="vllm.tensor-parallel-size",
        )
    return found


def kv_cache(spec: RunSpec, kind: EngineKind) -> int | None:
    """Returns the bytes of the cache on each device, None if the options give vLLM a share of the GPU instead. A model
    without a cache gets a little: without a figure vLLM requires most of the memory to be free before it starts."""
    run = Shape.of(spec, kind)
    if run.options.gpu_memory_utilization is not None:
        return None
    if run.options.kv_cache_size is not None:
        return run.options.kv_cache_size
    own = Config(spec.bundle.header)
    total = _cache_of(own, run, own.layers + own.heads if spec.mtp else own.layers)
    if spec.draft is not None:
        total += _cache_of(draft := Config(spec.draft.header), run, draft.layers)
    return max(-(-total // run.options.workers), MIB)


def _cache_of(config: Config, run: Shape, layers: int) -> int:
    """Returns the bytes of one context, in whole blocks, which the sequences share, and of a begun block for each
    sequence. With a full cache, vLLM lets a sequence wait; none fails."""
    if config.is_encoder:
        return 0
    blocks = -(-run.context // run.block) + run.parallel + 1
    return layers * blocks * run.block * _token_bytes(config, run.options)


def _token_bytes(config: Config, options: VllmOptions) -> int:
    """Returns the bytes of one token's keys and values in one layer. Multi-head latent attention (DeepSeek) keeps
    compressed ones."""
    size = 1 if options.kv_cache_dtype.startswith("fp8") else _BYTES[options.dtype]
    if rank := config.number("kv_lora_rank"):
        return (rank + config.number("qk_rope_head_dim")) * size
    heads = config.number("num_attention_heads", 1) or 1
    head = config.number("head_dim") or config.number("hidden_size") // heads
    return 2 * config.number("num_key_value_heads", heads) * head * size


def weights(bundle: Bundle, options: VllmOptions) -> int:
    """Returns the bytes of the weights in memory. Floating-point tensors are converted to the type that the engine
    computes in; packed ones stay as they are."""
    size = 0
    for tensor in bundle.header.tensors:
        elements = 1
        for length in tensor.shape:
            elements *= length
        size += elements * _BYTES[options.dtype] if tensor.dtype in _FLOATS else tensor.size
    return size


def _activations(config: Config, run: Shape, mode: Mode) -> int:
    """Returns the bytes for the widest batch: hidden states and the feed-forward layer of each token, and the logits of
    each sequence (in 32 bits, and once more sorted, for sampling)."""
    size = _BYTES[run.options.dtype]
    row = (6 * config.number("hidden_size") + 3 * config.number("intermediate_size")) * size
    logits = run.parallel * config.number("vocab_size") * 8 if mode is Mode.COMPLETION else 0
    return run.batched * row + logits
