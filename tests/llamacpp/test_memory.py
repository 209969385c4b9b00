"""The estimate against what was measured, in MiB: proportional set sizes of loaded engines, batches of 512 tokens."""

import asyncio
import tracemalloc
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelrunner.errors import InvalidModel
from modelrunner.types import Bundle, Mode, ModelHeader, RequiredMemory, RunSpec, Tensor
from modelrunner_llamacpp import args, memory
from modelrunner_llamacpp.engines import EngineKind
from modelrunner_llamacpp.hparams import Header
from modelrunner_llamacpp.kvcache import Shape, checkpoints, kv_cache
from modelrunner_llamacpp.memory import MIB
from tests.llamacpp.models import EAGLE, GEMMA3, GLM, MINILM, QWEN, SMOLLM2, bundle, header, spec
from tests.llamacpp.test_engines import MakeBackend, make_backend
from tests.models import random_llama
from tests.models.random_llama import Sizes

__all__ = ["make_backend"]

MASK = 512 * 2048 * 2  # bytes: of what drafts, for a batch and a context of 2,048 tokens
ONE_BILLION = Sizes(2048, 8192, 16, 32, 8, 131_072, 128_256, quantized=True)
EIGHT_BILLION = Sizes(4096, 14_336, 32, 32, 8, 131_072, 128_256, quantized=True)


def random_bundle(sizes: Sizes) -> Bundle:
    """The header of a model that `random_llama.write` would make."""
    tensors = tuple(
        Tensor(
            name, shape, "Q4_0" if len(shape) > 1 else "F32", prod(shape) * 18 // 32 if len(shape) > 1 else shape[0] * 4
        )
        for name, shape in random_llama.shapes(sizes.vocabulary, sizes).items()
    )
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": sizes.layers,
        "llama.embedding_length": sizes.width,
        "llama.feed_forward_length": sizes.inner,
        "llama.attention.head_count": sizes.heads,
        "llama.attention.head_count_kv": sizes.kv_heads,
        "llama.context_length": sizes.context,
        "llama.vocab_size": sizes.vocabulary,
    }
    return replace(bundle(SMOLLM2), header=ModelHeader(metadata, tensors), size=sum(each.size for each in tensors))


def required(run: RunSpec, kind: EngineKind = EngineKind.NATIVE) -> RequiredMemory:
    return memory.required(run, kind, args.effective(run))


def estimate(metadata: dict[str, Any], context: int, parallel: int, *flags: str, mode: Mode = Mode.COMPLETION) -> float:
    """Right after the load."""
    run = spec(bundle(metadata), *flags, mode=mode, context=context, parallel=parallel)
    return (required(run).ram - memory.growth(run, args.effective(run)).ram) / MIB


@pytest.mark.parametrize(
    ("metadata", "context", "parallel", "flags", "measured"),
    [
        (SMOLLM2, 512, 1, (), 134),
        (SMOLLM2, 2048, 1, (), 169),
        (SMOLLM2, 8192, 1, (), 304),
        (SMOLLM2, 128, 4, (), 146),
        (SMOLLM2, 512, 4, (), 171),
        (SMOLLM2, 2048, 4, (), 304),
        (SMOLLM2, 2048, 4, ("-ctk", "q8_0", "-ctv", "q8_0"), 219),
        (GEMMA3, 512, 1, (), 318),
        (GEMMA3, 2048, 1, (), 327),
        (GEMMA3, 8192, 1, (), 350),
        (GEMMA3, 128, 4, (), 328),
        (GEMMA3, 512, 4, (), 346),
        (GEMMA3, 2048, 4, (), 395),
    ],
)
def test_within_a_tenth_of_the_measured_figure(
    metadata: dict[str, Any], context: int, parallel: int, flags: tuple[str, ...], measured: int
) -> None:
    assert estimate(metadata, context, parallel, *flags) == pytest.approx(measured, rel=0.1)


def test_an_encoder_keeps_no_cache() -> None:
    assert estimate(MINILM, 512, 4, mode=Mode.EMBEDDING) == pytest.approx(63, rel=0.1)


@pytest.mark.parametrize(
    ("metadata", "context", "flags", "measured"),
    [(MINILM, 512, (), 128), (SMOLLM2, 1024, ("--pooling", "mean"), 533), (SMOLLM2, 1024, ("-ub", "64"), 172)],
)
def test_in_embedding_mode_every_token_has_its_logits(
    metadata: dict[str, Any], context: int, flags: tuple[str, ...], measured: int
) -> None:
    """Measured after an input as long as the context."""
    run = spec(bundle(metadata), *flags, mode=Mode.EMBEDDING, context=context, parallel=1)
    assert required(run).ram / MIB == pytest.approx(measured, rel=0.12)


def test_without_flash_attention_the_scores_of_all_heads_are_there() -> None:
    """Measured after 4,096 tokens in batches of 64: 17 MiB more than after the load, and 1 MiB for each sequence."""
    run = spec(bundle(SMOLLM2), "-fa", "off", "-b", "64", "-ub", "64", context=4096, parallel=1)
    assert memory.growth(run, args.effective(run)).ram / MIB == pytest.approx(17, rel=0.1)


def test_the_prompt_cache_is_counted_before_it_is_used() -> None:
    run = spec(bundle(SMOLLM2), context=512, parallel=1)
    cached = replace(run, flags=("--cache-ram", "256"))
    assert required(cached).ram - required(run).ram == 256 * MIB
    assert memory.growth(run, args.effective(cached)).ram > 256 * MIB


def test_a_draft_model_is_counted_once_more_without_the_process() -> None:
    run = spec(bundle(SMOLLM2))
    alone, both = required(run).ram, required(replace(run, draft=bundle(SMOLLM2))).ram
    grown = memory.growth(run, args.effective(run)).ram
    assert both - alone == alone - 19 * MIB - grown + MASK


def test_its_cache_is_not_of_the_models_types() -> None:
    run = spec(bundle(SMOLLM2), "-ctk", "q8_0", "-ctv", "q8_0")
    both = required(replace(run, draft=bundle(SMOLLM2)))
    assert (
        both.ram - required(run).ram
        == required(spec(bundle(SMOLLM2))).ram - 19 * MIB - memory.growth(run, args.effective(run)).ram + MASK
    )


def test_the_states_that_a_draft_model_goes_back_to() -> None:
    run = spec(bundle(GEMMA3), parallel=1)
    alone, both = (memory.growth(replace(run, draft=draft), args.effective(run)).ram for draft in (None, run.bundle))
    assert both - alone == checkpoints(Header(header(GEMMA3)), Shape(2048, 1), 3) + MASK


def test_the_models_own_heads_are_counted_with_their_cache() -> None:
    """One layer's cache in 16 bits, whatever type the model's has; the vocabulary once more; and for each token of a
    batch the state that they read. Their weights are in the file."""
    run = spec(bundle(GLM), "-ctk", "q8_0", "-ctv", "q8_0", context=4096, parallel=2)
    cache, states = 2 * 4096 * 2 * 128 * 2, 2048 * 4 * 1024
    beside = 1000 * memory._PER_WORD + states + 2 * MASK
    assert required(replace(run, mtp=True)).ram - required(run).ram == cache + beside


def test_recurrent_states_that_heads_may_take_back_are_counted() -> None:
    run = spec(bundle(QWEN), parallel=2)
    drafted = replace(run, mtp=True)
    state = (3 * (256 + 2 * 2 * 128) + 128 * 256) * 4
    beside = memory.drafts_size(drafted, Shape(2048, 2)) + 2048 * 4 * 1024 + MASK
    for tokens in (None, 5):
        found = required(replace(drafted, draft_tokens=tokens)).ram - required(run).ram
        assert found == 2 * 3 * (tokens or 3) * state + beside


def test_a_head_is_counted_with_the_states_of_three_layers() -> None:
    run = spec(bundle(SMOLLM2))
    as_a_model = {name.replace("eagle3", "qwen2"): value for name, value in EAGLE.items()}
    as_a_model["general.architecture"] = "qwen2"
    small = replace(bundle(EAGLE), header=header(as_a_model))
    head, model = (required(replace(run, draft=draft)).ram for draft in (bundle(EAGLE), small))
    assert head - model == 3 * 2048 * 4 * 576
    assert model - required(run).ram == (1 << 20) + 4 * 2048 * 2 * 192 * 2 + 1000 * memory._PER_WORD + MASK


def test_the_weights_are_what_runners_of_one_model_share() -> None:
    run = spec(bundle(SMOLLM2))
    assert required(run).shared == run.bundle.size
    assert required(replace(run, flags=("--load-mode", "none"))).shared == 0


def test_an_engine_that_is_a_python_holds_more() -> None:
    run = spec(bundle(SMOLLM2))
    assert required(run, EngineKind.WHEEL).ram - required(run).ram == 23 * MIB


def test_checkpoints_are_copies_of_the_layers_that_slide() -> None:
    """7.5 MiB for 512 tokens in 15 layers of one sequence."""
    gemma = Header(header(GEMMA3))
    assert checkpoints(gemma, Shape(512, 1), 1) == 7.5 * MIB
    assert checkpoints(gemma, Shape(512, 4), 3) == 4 * 3 * 7.5 * MIB
    assert checkpoints(gemma, Shape(8192, 1, swa_full=True), 3) == 0
    assert checkpoints(Header(header(SMOLLM2)), Shape(512, 1), 3) == 0


@given(
    metadata=st.sampled_from([SMOLLM2, GEMMA3]),
    context=st.integers(256, 1 << 17),
    parallel=st.integers(1, 16),
    more=st.integers(1, 1 << 15),
    mode=st.sampled_from([Mode.COMPLETION, Mode.EMBEDDING]),
)
def test_more_is_never_counted_as_less(
    metadata: dict[str, Any], context: int, parallel: int, more: int, mode: Mode
) -> None:
    run = spec(bundle(metadata), mode=mode, context=context, parallel=parallel)
    least = required(run)
    assert least.ram >= required(replace(run, flags=("-ctk", "q8_0"))).ram
    for larger in (replace(run, context_size=context + more), replace(run, parallel=parallel + 1)):
        assert required(larger).ram >= least.ram
    assert least.shared <= least.ram


def test_cache_is_llama_cpps_own_figure() -> None:
    """What llama-fit-params prints as context: 45 MiB, and 24 + 15 for the layers that slide."""
    assert kv_cache(Header(header(SMOLLM2)), Shape(2048, 1)) == 45 * MIB
    assert kv_cache(Header(header(GEMMA3)), Shape(8192, 1)) == 39 * MIB
    assert kv_cache(Header(header(GEMMA3)), Shape(2048, 4)) == 84 * MIB
    assert kv_cache(Header(header(GEMMA3)), Shape(8192, 1, swa_full=True)) == 144 * MIB


def test_a_pattern_in_the_file_wins() -> None:
    one_full = GEMMA3 | {"gemma3.attention.sliding_window_pattern": [False, *[True] * 17]}
    assert kv_cache(Header(header(one_full)), Shape(8192, 1)) == (8 + 17) * MIB


def test_heads_of_each_layer_are_counted() -> None:
    half = SMOLLM2 | {"llama.attention.head_count_kv": [3] * 15 + [0] * 15}
    assert kv_cache(Header(header(half)), Shape(2048, 1)) == 45 * MIB / 2


def test_recurrent_layers_keep_a_state_for_each_sequence() -> None:
    mamba = {
        "general.architecture": "mamba",
        "mamba.block_count": 2,
        "mamba.embedding_length": 768,
        "mamba.ssm.conv_kernel": 4,
        "mamba.ssm.inner_size": 1536,
        "mamba.ssm.state_size": 16,
    }
    model = header(mamba, ("blk.0.ssm_conv1d.weight", "blk.1.ssm_conv1d.weight"))
    per_sequence = 2 * (3 * 1536 + 16 * 1536) * 4
    assert kv_cache(Header(model), Shape(512, 1)) == per_sequence
    assert kv_cache(Header(model), Shape(1 << 20, 4)) == 4 * per_sequence


def test_layers_that_use_the_cache_of_others_have_none() -> None:
    gemma3n = SMOLLM2 | {"llama.attention.shared_kv_layers": 10}
    assert kv_cache(Header(header(gemma3n)), Shape(2048, 1)) == 30 * MIB


def test_a_header_that_says_nothing_still_gives_a_figure() -> None:
    empty = bundle(SMOLLM2 | {"llama.block_count": 0, "llama.attention.head_count": 0, "llama.embedding_length": 0})
    assert required(spec(empty)).ram >= empty.size


def test_a_model_that_nobody_configured_gets_the_sequences_that_its_memory_is_worth() -> None:
    """Up to four, as long as their caches take no more than the weights, or than 1 GiB."""
    assert memory.default_parallel(bundle(SMOLLM2), 8192) == 4  # 720 MiB
    wide = SMOLLM2 | {"llama.attention.head_count_kv": 9}  # 540 MiB for each
    assert memory.default_parallel(bundle(wide), 8192) == 1
    assert memory.default_parallel(bundle(wide), 4096) == 2
    assert memory.default_parallel(replace(bundle(wide), size=5 << 30), 8192) == 4
    assert memory.default_parallel(bundle(MINILM), 512) == 4


def test_a_model_that_nobody_configured_gets_the_window_that_its_memory_is_worth() -> None:
    """As long as its cache takes no more than half of the weights."""
    small = bundle(SMOLLM2)
    assert memory.default_context(replace(small, context_length=2048)) == 2048
    assert memory.default_context(replace(small, context_length=131_072)) == 8192  # 180 MiB beside 92
    completes = frozenset({Mode.COMPLETION})
    large = replace(random_bundle(EIGHT_BILLION), context_length=131_072, capabilities=completes)
    assert memory.default_context(large) == 16_384  # 2 GiB beside 4.2
    assert memory.default_context(replace(large, capabilities=frozenset({Mode.EMBEDDING}))) == 8192
    narrow = replace(large.header, metadata={**large.header.metadata, "llama.attention.head_count_kv": 1})
    assert memory.default_context(replace(large, header=narrow, context_length=20_000)) == 20_000
    assert memory.default_context(replace(large, header=narrow, context_length=1 << 20)) == 131_072


def test_a_run_that_may_grow_keeps_as_many_prompts_as_it_could_have_sequences() -> None:
    run = replace(spec(bundle(SMOLLM2), context=8192, parallel=1), grows=True)
    assert memory.cache_of_other_prompts(run) == 3 * 180 * MIB
    assert memory.cache_of_other_prompts(replace(run, parallel=4)) == 0
    assert memory.cache_of_other_prompts(replace(run, grows=False)) == 0


# By NVIDIA's driver and the kernel on an H200, in MiB (docs/memory.md): main memory, and the device's.
@pytest.mark.parametrize(
    ("sizes", "context", "parallel", "layers", "measured"),
    [
        (ONE_BILLION, 8192, 1, 17, (508, 1576)),
        (ONE_BILLION, 8192, 4, 17, (509, 2344)),
        (ONE_BILLION, 8192, 1, 8, (1088, 1144)),
        (EIGHT_BILLION, 8192, 1, 33, (662, 5756)),
        (EIGHT_BILLION, 8192, 4, 33, (663, 8828)),
        (EIGHT_BILLION, 32_768, 1, 33, (688, 8852)),
    ],
)
def test_what_a_run_on_a_device_holds_there_and_of_main_memory(
    sizes: Sizes, context: int, parallel: int, layers: int, measured: tuple[int, int]
) -> None:
    flags = ("--n-gpu-layers", str(layers), "--split-mode", "none", "--main-gpu", "0")
    found = required(spec(random_bundle(sizes), *flags, context=context, parallel=parallel))
    assert (found.ram / MIB, found.vram[0] / MIB) == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(("context", "measured"), [(8192, (104, 120)), (32_768, (200, 216))])
def test_devices_that_share_all_layers_hold_several_batches(context: int, measured: tuple[int, int]) -> None:
    """By the log of llama.cpp b10434 with two Vulkan devices, which left the output to the processor: the "compute
    buffer size" of each."""
    flags = ("--n-gpu-layers", "17", "--split-mode", "layer", "--tensor-split", "9,8")
    run = spec(random_bundle(ONE_BILLION), *flags, context=context, parallel=1)
    parts = memory.tensor_sizes(run.bundle, Shape(context, 1))
    layers = [weights + cache for weights, cache in zip(parts.layers, parts.caches, strict=True)]
    logits = 512 * 4 * ONE_BILLION.vocabulary
    held = (sum(layers[:9]), sum(layers[9:]) + parts.output + logits)
    buffers = [(size - held[i] - memory.PER_DEVICE) / MIB for i, size in enumerate(required(run).vram)]
    assert buffers == pytest.approx(measured, abs=5)


HOSTILE = [
    {"llama.block_count": 10**9},
    {"llama.block_count": 2**63 - 1},
    {"llama.block_count": True},
    {"llama.block_count": "30"},
    {"llama.block_count": -1},
    {"llama.embedding_length": 2**63},
    {"llama.context_length": True},
    {"llama.context_length": 2**40},
    {"llama.attention.head_count": 2**40},
    {"llama.attention.head_count_kv": [3, "3"] * 15},
    {"llama.vocab_size": None, "tokenizer.ggml.tokens.length": "many"},
]


@pytest.mark.parametrize("entries", HOSTILE, ids=str)
async def test_no_estimate_works_with_figures_that_llama_cpp_cannot_read(
    entries: dict[str, Any], make_backend: MakeBackend
) -> None:
    """It says so, and takes no memory for it."""
    backend, run = make_backend(), spec(bundle(SMOLLM2 | entries))
    tracemalloc.start()
    for estimate in (backend.required_memory, lambda each: backend.variants(each, RequiredMemory(1 << 40, (1 << 40,)))):
        with pytest.raises(InvalidModel, match="invalid model: its header says"):
            await estimate(run)
    assert tracemalloc.get_traced_memory()[1] < 50 * MIB
    tracemalloc.stop()


async def test_an_estimate_of_the_largest_table_is_made_elsewhere(make_backend: MakeBackend) -> None:
    """The event loop goes on meanwhile: it turns more often than an estimate on it would let it."""
    names = tuple(f"blk.{number % 512}.attn_k.{number}" for number in range(1 << 16))
    large = replace(bundle(SMOLLM2), header=header(SMOLLM2 | {"llama.block_count": 512}, names))
    estimates = asyncio.create_task(make_backend().variants(spec(large), RequiredMemory(1 << 40)))
    turns = 0
    while not estimates.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(estimates.result()) == 3
    assert turns > 10


def test_experts_that_stay_in_main_memory_are_counted_there() -> None:
    tensors = [Tensor(f"blk.{i}.ffn_up_exps.weight", (1,), "F16", 100 * MIB) for i in range(30)]
    tensors += [Tensor(f"blk.{i}.attn_k.weight", (1,), "F16", MIB) for i in range(30)]
    model = replace(bundle(SMOLLM2), header=ModelHeader(SMOLLM2, tuple(tensors)), size=3030 * MIB)
    device = ("--n-gpu-layers", "all", "--split-mode", "none", "--main-gpu", "0")
    whole, some, none = (required(spec(model, *device, *more)) for more in ((), ("--n-cpu-moe", "10"), ("--cpu-moe",)))
    assert whole.vram[0] - some.vram[0] == some.ram - whole.ram == 1000 * MIB
    assert whole.vram[0] - none.vram[0] == none.ram - whole.ram == 3000 * MIB
