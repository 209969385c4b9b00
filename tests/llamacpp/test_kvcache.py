"""The cache of architectures that are not like Llama, against what llama-fit-params says."""

import pytest

from modelrunner.store import Store
from modelrunner.types import Bundle, ModelHeader, RunSpec, Tensor
from modelrunner_llamacpp import LlamaCppBackend
from modelrunner_llamacpp.hparams import Header
from modelrunner_llamacpp.kvcache import Shape, kv_cache
from modelrunner_llamacpp.memory import MIB
from tests.llamacpp import architectures, fitparams
from tests.llamacpp.models import header, spec

LONG = Shape(1 << 16, 1)


def model(architecture: str, tensors: tuple[str, ...] = (), **values: object) -> Header:
    """Of 4 layers with 2 heads of 128, unless `values` say otherwise; `__` stands for a dot."""
    figures = {"block_count": 4, "embedding_length": 256, "attention__head_count": 2} | values
    metadata = {f"{architecture}.{name.replace('__', '.')}": value for name, value in figures.items()}
    entries = tuple(Tensor(name, (1,), "F32", 4) for name in tensors)
    return Header(ModelHeader({"general.architecture": architecture} | metadata, entries))


def full(layers: int) -> int:
    """That many whole layers of `model` in a context of `LONG`."""
    return layers * 64 * MIB


def test_only_architectures_that_slide_make_use_of_a_window() -> None:
    assert kv_cache(model("phi3", attention__sliding_window=1024), LONG) == full(4)
    assert kv_cache(model("qwen2", attention__sliding_window=1024), LONG) == full(4)
    slid = 4 * 1536 * 1024  # 1024 and a batch of 512
    assert kv_cache(model("lfm2", attention__sliding_window=1024), LONG) == slid
    assert kv_cache(model("laguna", attention__sliding_window=1024), LONG) == full(1) + slid * 3 // 4


def test_the_chunks_of_llama_4_are_not_in_its_file() -> None:
    assert kv_cache(model("llama4"), LONG) == full(1) + 3 * (8192 + 512) * 1024
    assert kv_cache(model("llama4", attention__sliding_window=0), LONG) == full(4)


def test_of_exaone_4_only_the_largest_slides() -> None:
    assert kv_cache(model("exaone4", attention__sliding_window=4096), LONG) == full(4)
    large = model("exaone4", attention__sliding_window=4096, block_count=64)
    assert kv_cache(large, LONG) == full(16) + 48 * (4096 + 512) * 1024


@pytest.mark.parametrize("architecture", ["bert", "gemma-embedding", "llada"])
def test_encoders_and_diffusion_models_have_no_cache(architecture: str) -> None:
    assert kv_cache(model(architecture), LONG) == 0


def test_layers_that_predict_further_tokens_have_none() -> None:
    assert kv_cache(model("glm4moe", nextn_predict_layers=1), LONG) == full(3)


def test_layers_with_linear_attention_keep_a_state_and_no_cache() -> None:
    """Though they have a tensor attn_qkv. 3 of 4 layers of convolution and state, in 32-bit floats."""
    fused = tuple(f"blk.{layer}.{name}.weight" for layer in range(3) for name in ("attn_qkv", "ssm_conv1d"))
    shapes = {"ssm__inner_size": 256, "ssm__state_size": 128, "ssm__conv_kernel": 4, "ssm__group_count": 2}
    state = (3 * (256 + 2 * 2 * 128) + 128 * 256) * 4
    told = model("qwen3next", (), full_attention_interval=4, **shapes)
    listed = model("qwen3next", (), attention__recurrent_layers=[True] * 3 + [False], **shapes)
    seen = model("qwen3next", (*fused, "blk.3.attn_k.weight"), **shapes)
    for header_ in (told, listed, seen):
        assert kv_cache(header_, LONG) == full(1) + 3 * state
        assert kv_cache(header_, Shape(1 << 13, 8)) == full(1) + 8 * 3 * state


def test_falcon_h1_has_both_in_every_layer() -> None:
    tensors = tuple(f"blk.{layer}.{name}.weight" for layer in range(4) for name in ("attn_k", "ssm_conv1d"))
    both = model("falcon-h1", tensors, ssm__inner_size=512, ssm__state_size=128, ssm__conv_kernel=4)
    assert kv_cache(both, LONG) == full(4) + 4 * (3 * 512 + 128 * 512) * 4


def test_states_of_delta_and_lightning_attention() -> None:
    kda = model("kimi-linear", attention__recurrent_layers=[1, 1, 1, 0], kda__head_dim=64, ssm__conv_kernel=4)
    assert kv_cache(kda, LONG) == full(1) + 3 * (3 * 3 * 2 * 64 + 2 * 64 * 64) * 4
    lightning = model("minimax-01", full_attention_interval=4)
    assert kv_cache(lightning, LONG) == full(1) + 3 * 2 * 128 * 128 * 4


def test_latent_attention_keeps_compressed_keys_only_where_the_file_was_made_for_it() -> None:
    lengths = {"attention__key_length": 576, "attention__value_length": 512, "attention__head_count_kv": 1}
    latent = {"attention__key_length_mla": 192, "attention__value_length_mla": 128, "attention__kv_lora_rank": 512}
    assert kv_cache(model("deepseek2", (), **lengths, **latent), LONG) == 4 * (1 << 16) * 576 * 2
    old = {"attention__key_length": 192, "attention__value_length": 128, "attention__kv_lora_rank": 512}
    assert kv_cache(model("deepseek2", (), **old), LONG) == 4 * (1 << 16) * 2 * (192 + 128) * 2


def test_sparse_attention_keeps_keys_to_choose_by() -> None:
    index = (1 << 16) * 64 * 2
    assert kv_cache(model("deepseek32", attention__indexer__key_length=64), LONG) == full(4) + 4 * index
    shared = model("deepseek32", attention__indexer__key_length=64, attention__indexer__types=[1, 0, 0, 0])
    assert kv_cache(shared, LONG) == full(4) + index
    pooled = model("glm5-next", attention__indexer__key_length=64, attention__indexer__kpool=4)
    assert kv_cache(pooled, LONG) == full(4) + 4 * 3 * index


def test_without_flash_attention_values_are_as_wide_as_the_widest() -> None:
    """gemma4 has wider heads in the layers that do not slide."""
    uneven = model("llama", attention__head_count_kv=[2, 2, 2, 4])
    assert kv_cache(uneven, LONG) == full(5)
    assert kv_cache(uneven, Shape(1 << 16, 1, flash=False)) == full(5) // 2 + 4 * full(2) // 2


def test_a_batch_is_never_larger_than_the_context() -> None:
    options = {"--ctx-size": "1024", "--parallel": "1", "--ubatch-size": "4096"}
    assert Shape.of(options).ubatch == 1024
    assert Shape.of(options | {"--batch-size": "256"}).ubatch == 256
    assert Shape.of({"--ctx-size": "8192", "--parallel": "1", "--ubatch-size": "4096"}).ubatch == 2048


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """A model of each architecture, laid out by the store."""
    store = Store(tmp_path_factory.mktemp("architectures") / "data")
    for name in architectures.METADATA:
        file = store.partial / f"{name}.gguf"
        architectures.write(file, name)
        store.create({"model.gguf": store.ingest(file)}, f"test/{name}")
    return {name: store.bundle(f"test/{name}") for name in architectures.METADATA}


FLAGS = [
    (),
    ("--swa-full",),
    ("-fa", "on", "-ctk", "q8_0", "-ctv", "q4_0"),
    ("-fa", "off", "-ub", "1024"),
]


@pytest.mark.engine
@pytest.mark.parametrize("real_backend", ["native"], indirect=True)
@pytest.mark.parametrize("architecture", architectures.METADATA)
async def test_llama_fit_params_says_the_same(
    architecture: str, written: dict[str, Bundle], real_backend: LlamaCppBackend
) -> None:
    for flags in FLAGS:
        for context, parallel in ((1 << 16, 1), (1 << 13, 8), (300, 3)):
            await agree(real_backend, spec(written[architecture], *flags, context=context, parallel=parallel))


@pytest.mark.engine
@pytest.mark.parametrize("real_backend", ["native"], indirect=True)
@pytest.mark.parametrize("flags", FLAGS, ids=" ".join)
async def test_and_of_real_models(
    flags: tuple[str, ...], smollm2: Bundle, gemma3: Bundle, real_backend: LlamaCppBackend
) -> None:
    for bundle in (smollm2, gemma3):
        for context in (512, 8192, 32768):
            for parallel in (1, 4):
                await agree(real_backend, spec(bundle, *flags, context=context, parallel=parallel))


async def agree(backend: LlamaCppBackend, run: RunSpec) -> None:
    """llama-fit-params cuts its figures to whole MiB."""
    told, estimate = await fitparams.needed(backend, run), await backend.required_memory(run)
    assert told.ram / MIB == pytest.approx(estimate.ram / MIB, abs=2), (run.flags, run.context_size, run.parallel)


def test_a_header_without_tensors_or_figures_has_no_cache() -> None:
    assert kv_cache(Header(header({"general.architecture": "llama"})), LONG) == 0
