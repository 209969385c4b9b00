"""Weights that are held twice: llama.cpp's own figure of its CPU_REPACK buffer, and what follows from it."""

from dataclasses import replace
from pathlib import Path

import pytest

from modelrunner.types import Bundle, Tensor
from modelrunner_llamacpp import args, memory, repack
from modelrunner_llamacpp.engines import EngineKind
from modelrunner_llamacpp.memory import MIB
from tests.llamacpp.models import SMOLLM2, bundle, spec
from tests.llamacpp.test_engines import MakeBackend, make_backend, managed

__all__ = ["make_backend"]

AVX2 = frozenset({"avx2"})


def quantized(kind: str, *, tied: bool = True) -> Bundle:
    """8 MiB of an embedding, 2 MiB in each of two matrices, and a norm."""
    tensors = [
        Tensor("token_embd.weight", (1024, 8192), kind, 8 * MIB),
        Tensor("blk.0.attn_k.weight", (1024, 512), kind, 2 * MIB),
        Tensor("blk.0.ffn_up_exps.weight", (1024, 64, 8), kind, 2 * MIB),
        Tensor("blk.0.attn_norm.weight", (1024,), "F32", 4096),
        Tensor("blk.0.odd.weight", (1024, 3), kind, 4096),
    ]
    if not tied:
        tensors.append(Tensor("output.weight", (1024, 8192), "F16", 16 * MIB))
    model = bundle(SMOLLM2)
    return replace(model, header=replace(model.header, tensors=tuple(tensors)))


@pytest.mark.parametrize(
    ("kind", "features", "expected"),
    [
        ("Q4_K", {"avx2"}, 4),
        ("Q4_0", {"avx2", "avx512f"}, 4),
        ("Q2_K", {"avx2"}, 0),
        ("Q2_K", {"avx2", "avx512f"}, 4),
        ("Q6_K", {"avx2"}, 0),
        ("Q6_K", {"asimddp"}, 4),
        ("F16", {"avx2"}, 0),
        ("Q4_K", set(), 0),
    ],
)
def test_matrices_of_types_that_the_processor_has_kernels_for(kind: str, features: set[str], expected: int) -> None:
    assert repack.size(quantized(kind, tied=False).header.tensors, features) == expected * MIB


def test_an_embedding_that_is_the_output_too() -> None:
    assert repack.size(quantized("Q4_K").header.tensors, AVX2) == 12 * MIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx avx2 avx512f avx512_vnni\n", {"avx2", "avx512f"}),
        ("processor : 0\nFeatures\t: fp asimd asimddp i8mm\n", {"asimddp"}),
        ("flags : fpu sse2\n", set()),
    ],
)
def test_the_processor_is_asked(text: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert repack.features(tmp_path / "cpuinfo") == expected


def test_they_count_twice_as_long_as_the_file_is_mapped() -> None:
    model = quantized("Q4_K", tied=False)

    def needed(*flags: str) -> tuple[int, int]:
        run = spec(model, *flags)
        found = memory.required(run, EngineKind.NATIVE, args.effective(run), AVX2)
        return found.ram, found.shared

    ram, shared = needed()
    assert shared == memory.weights(model)
    assert needed("--no-repack") == (ram - 4 * MIB, shared)
    assert needed("--no-mmap") == (ram - 4 * MIB, 0)


def test_where_they_are_the_most_the_file_is_read_and_not_mapped() -> None:
    model = quantized("Q4_K")
    assert repack.most(model.header.tensors, AVX2)
    assert not repack.most(quantized("Q4_K", tied=False).header.tensors, AVX2)

    def load_mode(*flags: str) -> str | None:
        return args.effective(spec(model, *flags), rearranged=True).get("--load-mode")

    assert load_mode() == "none"
    assert load_mode("--no-repack") is None
    assert load_mode("--load-mode", "mmap") == "mmap"
    assert "--load-mode" not in args.effective(spec(model))


async def test_of_managed_engines_without_devices(make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may not know the flag, or hold the weights elsewhere."""
    monkeypatch.setattr(repack, "features", lambda: AVX2)
    backend, run = make_backend(), spec(quantized("Q4_0"))
    assert (await backend.required_memory(run)).shared == memory.weights(run.bundle)
    managed(backend.context, EngineKind.WHEEL, "2026.1")
    assert (await backend.required_memory(run)).shared == 0


def test_those_of_a_draft_model_too() -> None:
    model = quantized("Q4_K", tied=False)
    run = replace(spec(model), draft=model)
    options = args.effective(run)
    both = memory.required(run, EngineKind.NATIVE, options, AVX2)
    assert both.ram - memory.required(run, EngineKind.NATIVE, options).ram == 8 * MIB
