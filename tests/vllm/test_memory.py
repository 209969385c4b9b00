"""Bytes from the headers and the options."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from modelrunner.backend import BackendContext
from modelrunner.errors import BadRequest, InvalidModel
from modelrunner.types import Adapter, Mode, RequiredMemory, Tensor, Variant
from modelrunner_vllm import VllmBackend, memory
from modelrunner_vllm.engines import EngineKind
from tests.vllm.models import MINILM, MINILM_ELEMENTS, SMOLLM2, SMOLLM2_ELEMENTS, bundle, spec

MIB, GIB = 1 << 20, 1 << 30
TOKEN = 2 * 30 * 3 * 64 * 2  # keys and values of SmolLM2: 23,040 bytes; vLLM said 300,000,000 bytes are 12,928 tokens


def test_the_cache_is_one_context_in_blocks_and_one_begun_block_for_each_sequence() -> None:
    assert memory.kv_cache(spec(context=2048, parallel=4), EngineKind.CPU) == (16 + 4 + 1) * 128 * TOKEN
    assert memory.kv_cache(spec(context=2048, parallel=4), EngineKind.CUDA) == (128 + 4 + 1) * 16 * TOKEN
    larger = spec(None, "--block-size", "32", context=2048, parallel=4)
    assert memory.kv_cache(larger, EngineKind.CUDA) == 69 * 32 * TOKEN


def test_what_the_options_say_about_the_cache() -> None:
    whole = memory.kv_cache(spec(), EngineKind.CUDA)
    assert whole is not None
    assert memory.kv_cache(spec(options={"kv-cache-size": GIB}), EngineKind.CUDA) == GIB
    assert memory.kv_cache(spec(options={"gpu-memory-utilization": 0.4}), EngineKind.CUDA) is None
    assert memory.kv_cache(spec(options={"kv-cache-dtype": "fp8"}), EngineKind.CUDA) == whole // 2
    assert memory.kv_cache(spec(options={"dtype": "float32"}), EngineKind.CUDA) == whole * 2
    assert memory.kv_cache(spec(options={"tensor-parallel-size": 2}), EngineKind.CUDA) == whole // 2


def test_an_encoder_keeps_none_but_says_so_with_a_figure() -> None:
    assert memory.kv_cache(spec(bundle(MINILM), mode=Mode.EMBEDDING), EngineKind.CPU) == MIB


def test_compressed_keys_and_hybrid_layers() -> None:
    latent = SMOLLM2 | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert memory.kv_cache(spec(bundle(latent), context=128, parallel=1), EngineKind.CPU) == 3 * 128 * 30 * 576 * 2
    hybrid = SMOLLM2 | {"layer_types": ["linear_attention"] * 20 + ["full_attention"] * 10}
    of_all, of_ten = (memory.kv_cache(spec(bundle(header)), EngineKind.CPU) for header in (SMOLLM2, hybrid))
    assert of_all == 3 * (of_ten or 0)


def test_weights_by_type() -> None:
    packed = Tensor("q.qweight", (1000, 100), "I32", 400_000)
    scales = Tensor("q.scales", (1000,), "F16", 2000)
    model = bundle(SMOLLM2, packed, scales, Tensor("embed", (5000, 10), "F32", 200_000))
    run = memory.Shape.of(spec(model), EngineKind.CPU)
    assert memory.weights(model, run.options) == 400_000 + 2000 + 100_000
    wide = memory.Shape.of(spec(model, options={"dtype": "float32"}), EngineKind.CPU)
    assert memory.weights(model, wide.options) == 400_000 + 4000 + 200_000


@pytest.mark.parametrize(
    ("model", "run", "measured"),
    [
        # PSS of all processes of a ready engine, vLLM 0.32.0 on the CPU.
        (bundle(), {"context": 2048, "parallel": 16, "options": {"kv-cache-size": 300_000_000}}, 2348 * MIB),
        (bundle(), {"context": 8192, "parallel": 16}, 2335 * MIB),
        (
            bundle(MINILM, Tensor("all", (MINILM_ELEMENTS,), "F32", 4 * MINILM_ELEMENTS)),
            {"context": 256, "parallel": 16, "mode": Mode.EMBEDDING},
            1613 * MIB,
        ),
    ],
)
def test_near_what_was_measured(model: object, run: dict[str, object], measured: int) -> None:
    estimate = memory.required(spec(model, **run), EngineKind.CPU)  # type: ignore[arg-type]
    assert estimate.vram == ()
    assert estimate.ram == pytest.approx(measured, rel=0.12)


def test_on_gpus_each_holds_its_part() -> None:
    one = memory.required(spec(), EngineKind.CUDA)
    two = memory.required(spec(options={"tensor-parallel-size": 2}), EngineKind.CUDA)
    assert len(one.vram) == 1
    assert len(two.vram) == 2
    assert two.vram[0] == two.vram[1] < one.vram[0]
    assert one.vram[0] > 2 * SMOLLM2_ELEMENTS + (memory.kv_cache(spec(), EngineKind.CUDA) or 0)
    assert two.ram > one.ram


def test_two_models_share_a_device_on_purpose() -> None:
    """vLLM starts only where its share is free: that of each is what it needs, so both together are less than all."""
    needed, card = memory.required(spec(), EngineKind.CUDA).vram[0], 4 * GIB
    share = memory.share(spec(), EngineKind.CUDA, (card, card))
    assert share == pytest.approx(needed / card, abs=1e-4)
    assert needed < card // 2
    assert memory.share(spec(), EngineKind.CUDA, (card, 2 * card)) == pytest.approx(needed / card / 2, abs=1e-4)
    assert memory.share(spec(), EngineKind.CUDA, (1 << 60,))
    assert memory.share(spec(), EngineKind.CUDA, (1,)) == 1
    assert memory.share(spec(), EngineKind.CUDA, ()) is None
    assert memory.share(spec(), EngineKind.CPU, (card,)) is None
    assert memory.share(spec(options={"gpu-memory-utilization": 0.5}), EngineKind.CUDA, (card,)) is None


def test_a_share_that_somebody_chose_is_all_counted() -> None:
    cards = (40 * GIB, 80 * GIB)
    half = spec(options={"gpu-memory-utilization": 0.5})
    found = memory.placed(half, EngineKind.CUDA, 2, ("0", "1"), cards)
    assert [variant.memory.vram for variant in found] == [(20 * GIB, 0), (0, 40 * GIB)]
    both = spec(options={"gpu-memory-utilization": 0.5, "tensor-parallel-size": 2})
    assert [v.memory.vram for v in memory.placed(both, EngineKind.CUDA, 2, ("0", "1"), cards)] == [(20 * GIB, 40 * GIB)]


@pytest.mark.parametrize(
    ("options", "param"),
    [({"devices": [2]}, "vllm.devices"), ({"tensor-parallel-size": 3}, "vllm.tensor-parallel-size")],
)
def test_devices_that_are_not_there(options: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequest, match="vLLM has 2 here") as refused:
        memory.placed(spec(options=options), EngineKind.CUDA, 2, ("0", "1"))
    assert refused.value.param == param


def test_weights_that_are_offloaded_lie_in_main_memory() -> None:
    whole, some, everything = (
        memory.required(spec(None, "--cpu-offload-gb", size), EngineKind.CUDA) for size in ("0", "0.1", "1000")
    )
    assert some.ram - whole.ram == whole.vram[0] - some.vram[0] == int(0.1 * GIB)
    assert everything.ram - whole.ram == whole.vram[0] - everything.vram[0] < GIB


def test_adapters_and_drafts_are_counted_and_rays_workers_are_not() -> None:
    alone = memory.required(spec(), EngineKind.CPU)
    adapted = replace(bundle(), adapters=(Adapter("style", Path("/a"), 1.0, 5 * MIB),))
    assert memory.required(spec(adapted), EngineKind.CPU).ram == alone.ram + 5 * MIB
    assert memory.required(spec(draft=bundle()), EngineKind.CPU).ram > alone.ram + 2 * SMOLLM2_ELEMENTS
    elsewhere = {"executor": "ray", "ray-address": "head:6379", "tensor-parallel-size": 2}
    ray = memory.required(spec(options=elsewhere), EngineKind.CPU)
    assert ray.ram < alone.ram
    assert replace(ray, ram=0).vram == ()


def test_the_models_own_heads_are_counted_with_their_cache() -> None:
    """As one layer more for each head, and what drafting computes; their weights are in the files."""
    run = spec(bundle(SMOLLM2 | {"num_nextn_predict_layers": 3}))
    alone, drafted = (memory.kv_cache(replace(run, mtp=mtp), EngineKind.CPU) or 0 for mtp in (False, True))
    assert drafted * 10 == alone * 11  # 30 layers and 3
    more = memory.required(replace(run, mtp=True), EngineKind.CPU).ram - memory.required(run, EngineKind.CPU).ram
    assert more > drafted - alone


@pytest.mark.parametrize("value", [True, "30", -1, 2**63])
@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "num_key_value_heads", "vocab_size"])
def test_no_estimate_works_with_a_figure_that_is_none(name: str, value: object) -> None:
    with pytest.raises(InvalidModel, match=f"its config.json says .* for {name}"):
        memory.required(spec(bundle(SMOLLM2 | {name: value})), EngineKind.CPU)


def shared(
    pipeline: int, tensor: int, devices: int, more: Mapping[str, object] = MappingProxyType({})
) -> list[Variant]:
    sizes = {"executor": "ray", "pipeline-parallel-size": pipeline, "tensor-parallel-size": tensor}
    names = [str(number) for number in range(devices)]
    return memory.placed(spec(options={**sizes, **more}), EngineKind.CUDA, devices, names)


def test_stages_are_dealt_out_to_hosts_and_a_host_that_has_them_all_needs_no_ray() -> None:
    found = shared(4, 2, 8)
    assert [(v.hosts, v.rank, v.memory.devices) for v in found] == [
        (1, 0, tuple(range(8))),
        (2, 1, (0, 1, 2, 3)),
        (2, 1, (4, 5, 6, 7)),
        *[(4, 2, (first, first + 1)) for first in (0, 2, 4, 6)],
    ]
    alone, half, *_ = found
    assert (alone.spec.options["executor"], half.spec.options["executor"]) == ("mp", "ray")
    assert half.part.vram == half.memory.vram
    assert half.memory.ram + half.part.ram == alone.memory.ram, "the server is once"
    assert "CUDA_VISIBLE_DEVICES" not in half.spec.environment, "Ray sets it for its workers"
    chosen = {"devices": [0, 2, 3, 5]}
    assert [v.memory.devices for v in shared(2, 2, 3, chosen)] == [(0, 2)]


def test_a_host_without_the_devices_of_one_stage_has_no_part_of_it() -> None:
    assert [v.hosts for v in shared(2, 1, 1)] == [2]
    for pipeline, tensor, devices in ((2, 2, 1), (1, 2, 1), (2, 1, 0)):
        with pytest.raises(BadRequest, match=f"{pipeline * tensor} workers need a device each, and no part"):
            shared(pipeline, tensor, devices)


async def test_a_machine_without_gpus_plans_for_hosts_that_have_them(tmp_path: Path) -> None:
    backend = VllmBackend(BackendContext(tmp_path / "engines", tmp_path, tmp_path, {"build": "cpu"}))
    run = spec(options={"executor": "ray", "pipeline-parallel-size": 2})
    there = await backend.variants(run, RequiredMemory(64 * GIB, (24 * GIB,)))
    assert [(variant.hosts, variant.memory.devices) for variant in there] == [(2, (0,))]
    with pytest.raises(BadRequest, match="executor ray needs GPUs"):
        await backend.variants(run, RequiredMemory(64 * GIB))


def test_a_cluster_by_its_address_places_by_itself() -> None:
    [variant] = shared(2, 1, 1, {"ray-address": "head:6379"})
    assert (variant.hosts, variant.memory.vram) == (1, ())
