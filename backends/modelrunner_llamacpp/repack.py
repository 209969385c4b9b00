"""Weights that llama.cpp rearranges for the processor's vector units, into memory of their own. Where the file is
mapped, these weights are in memory twice.

Source: ggml_repack_get_optimal_repack_type in ggml/src/ggml-cpu/repack.cpp."""

import platform
from collections.abc import Iterable
from pathlib import Path

from modelrunner.sdk import Tensor

# For each feature of a processor the types that it applies to, with the divisor of a matrix's rows.
_ROWS = {
    "avx2": {"Q4_0": 8, "Q4_K": 8, "IQ4_NL": 8, "MXFP4": 8},
    "avx512f": {"Q2_K": 8},
    "asimddp": {"Q4_0": 4, "Q4_K": 8, "Q5_K": 8, "Q6_K": 8, "IQ4_NL": 4, "MXFP4": 4, "Q8_0": 4},
}
_EMBEDDING = "token_embd.weight"


def features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns the relevant features of this processor, by Linux's names. Every Mac with Apple's own processor has dot
    products."""
    try:
        rows = cpuinfo.read_text("utf-8", "replace").splitlines()
    except OSError:
        return frozenset({"asimddp"} if platform.machine() == "arm64" else ())
    listed = next((row for row in rows if row.startswith(("flags", "Features"))), "")
    return frozenset(listed.split()) & _ROWS.keys()


def most(tensors: Iterable[Tensor], with_features: Iterable[str]) -> bool:
    """Returns True if more than half of all weights are rearranged. Then reading them takes less memory than mapping
    them, even if two runners of the model would share the mapping."""
    tensors = tuple(tensors)
    return 2 * size(tensors, with_features) > sum(tensor.size for tensor in tensors)


def size(tensors: Iterable[Tensor], with_features: Iterable[str]) -> int:
    """Returns the bytes of the rearranged matrices. The embedding is one of them only where it is the output, too."""
    tensors = tuple(tensors)
    rows = {kind: least for feature in with_features for kind, least in _ROWS[feature].items()}
    tied = not any(tensor.name == "output.weight" for tensor in tensors)
    return sum(
        tensor.size
        for tensor in tensors
        if tensor.dtype in rows
        and len(tensor.shape) > 1
        and tensor.shape[1] % rows[tensor.dtype] == 0
        and (tensor.name != _EMBEDDING or tied)
    )
