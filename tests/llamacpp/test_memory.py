"""The estimate against what was measured: proportional set sizes of loaded engines, in MiB."""

from typing import Any

import pytest

from modelrunner import Mode
from modelrunner_llamacpp import args, memory
from modelrunner_llamacpp.memory import MIB, Header, Shape, kv_cache
from tests.llamacpp.models import GEMMA3, MINILM, SMOLLM2, bundle, header, spec


def estimate(metadata: dict[str, Any], context: int, parallel: int, *flags: str, mode: Mode = Mode.COMPLETION) -> float:
    run = spec(bundle(metadata), *flags, mode=mode, context=context, parallel=parallel)
    return memory.required(run.bundle, None, args.effective(run)).ram / MIB


@pytest.mark.parametrize(
    ("metadata", "context", "parallel", "flags", "measured"),
    [
        (SMOLLM2, 512, 1, (), 134),
        (SMOLLM2, 512, 4, (), 134),
        (SMOLLM2, 2048, 1, (), 169),
        (SMOLLM2, 2048, 4, (), 167),
        (SMOLLM2, 8192, 1, (), 304),
        (SMOLLM2, 8192, 4, (), 303),
        (SMOLLM2, 8192, 4, ("-ctk", "q8_0", "-ctv", "q8_0"), 219),
        (SMOLLM2, 512, 4, ("--no-kv-unified",), 146),
        (SMOLLM2, 2048, 4, ("--no-kv-unified",), 169),
        (SMOLLM2, 8192, 4, ("--no-kv-unified",), 304),
        (GEMMA3, 512, 1, (), 318),
        (GEMMA3, 512, 4, (), 316),
        (GEMMA3, 2048, 1, (), 327),
        (GEMMA3, 2048, 4, (), 344),
        (GEMMA3, 8192, 1, (), 350),
        (GEMMA3, 8192, 4, (), 369),
        (GEMMA3, 8192, 4, ("-ctk", "q8_0", "-ctv", "q8_0"), 341),
        (GEMMA3, 512, 4, ("--no-kv-unified",), 328),
        (GEMMA3, 2048, 4, ("--no-kv-unified",), 346),
        (GEMMA3, 8192, 4, ("--no-kv-unified",), 395),
    ],
)
def test_within_a_tenth_of_the_measured_figure(
    metadata: dict[str, Any], context: int, parallel: int, flags: tuple[str, ...], measured: int
) -> None:
    assert estimate(metadata, context, parallel, *flags) == pytest.approx(measured, rel=0.1)


def test_an_encoder_keeps_no_cache() -> None:
    assert estimate(MINILM, 512, 4, mode=Mode.EMBEDDING) == pytest.approx(71, rel=0.1)


def test_a_wide_batch_of_a_causal_model_costs_its_logits() -> None:
    """Measured 702 MiB with a batch of 2048, every token an output."""
    wide = estimate(SMOLLM2, 2048, 4, "--pooling", "mean", mode=Mode.EMBEDDING)
    narrow = estimate(SMOLLM2, 2048, 4, mode=Mode.EMBEDDING)
    assert wide - narrow > 1536 * 49152 * 4 / MIB


def test_the_prompt_cache_is_counted() -> None:
    assert estimate(SMOLLM2, 512, 1, "--cache-ram", "256") - estimate(SMOLLM2, 512, 1) == 256


def test_a_draft_model_is_counted_once_more_without_the_process() -> None:
    run = spec(bundle(SMOLLM2), draft=bundle(SMOLLM2))
    alone = memory.required(run.bundle, None, args.effective(run)).ram
    both = memory.required(run.bundle, run.draft, args.effective(run)).ram
    assert both == 2 * alone - 19 * MIB


def test_cache_is_llama_cpps_own_figure() -> None:
    """What llama-fit-params prints as context: 45 MiB, and 24 + 15 for the layers that slide."""
    assert kv_cache(Header(header(SMOLLM2)), Shape(2048, 1)) == 45 * MIB
    assert kv_cache(Header(header(GEMMA3)), Shape(8192, 1)) == 39 * MIB
    assert kv_cache(Header(header(GEMMA3)), Shape(8192, 4, unified=False)) == 84 * MIB
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


def test_latent_attention_keeps_the_compressed_keys() -> None:
    deepseek = {
        "general.architecture": "deepseek2",
        "deepseek2.block_count": 27,
        "deepseek2.embedding_length": 2048,
        "deepseek2.attention.head_count": 16,
        "deepseek2.attention.kv_lora_rank": 512,
        "deepseek2.rope.dimension_count": 64,
    }
    assert kv_cache(Header(header(deepseek)), Shape(4096, 1)) == 27 * 4096 * 576 * 2


def test_a_header_that_says_nothing_still_gives_a_figure() -> None:
    empty = bundle(SMOLLM2 | {"llama.block_count": 0, "llama.attention.head_count": 0, "llama.embedding_length": 0})
    run = spec(empty)
    assert memory.required(run.bundle, None, args.effective(run)).ram >= run.bundle.size
