"""Model files of several architectures without weights: a header, and a hole where the tensors would be. Names and
shapes as in src/models of llama.cpp."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_E, _HEADS, _FF, _WORDS, _LAYERS = 256, 2, 384, 128, 4
_HEAD = _E // _HEADS
_COMMON = {
    "context_length": 1 << 20,
    "embedding_length": _E,
    "block_count": _LAYERS,
    "feed_forward_length": _FF,
    "attention.head_count": _HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "vocab_size": _WORDS,
}
_MAMBA = {"ssm.inner_size": 512, "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.time_step_rank": 2}
_ALTERNATING = {"attention.head_count_kv": [0, _HEADS] * 2}
METADATA: dict[str, dict[str, Any]] = {
    "gemma3": {"attention.sliding_window": 1024},
    "phi3": {"attention.sliding_window": 1024},  # which llama.cpp does not make use of
    "jamba": _MAMBA | _ALTERNATING,
    "lfm2": {"shortconv.l_cache": 3} | _ALTERNATING,
    "qwen35": _MAMBA
    | {"ssm.inner_size": 256, "ssm.group_count": 2, "full_attention_interval": 2}
    | {"rope.dimension_sections": [32, 32, 32, 32]},
}

Shapes = dict[str, tuple[int, ...]]
_FEED: Shapes = {"ffn_gate.weight": (_E, _FF), "ffn_up.weight": (_E, _FF), "ffn_down.weight": (_FF, _E)}
_OUT: Shapes = {"attn_norm.weight": (_E,), "attn_output.weight": (_E, _E)}
_ATTENTION: Shapes = _OUT | {f"attn_{what}.weight": (_E, _E) for what in "qkv"}
_NORMED: Shapes = _ATTENTION | {f"attn_{what}_norm.weight": (_HEAD,) for what in "qk"}
_FFN_NORM: Shapes = {"ffn_norm.weight": (_E,)}
_POST_NORM: Shapes = {"post_attention_norm.weight": (_E,)}
_MAMBA_LAYER: Shapes = {
    "attn_norm.weight": (_E,),
    "ssm_in.weight": (_E, 1024),
    "ssm_conv1d.weight": (4, 512),
    "ssm_conv1d.bias": (512,),
    "ssm_a": (128, 512),
    "ssm_x.weight": (512, 258),
    "ssm_dt.weight": (2, 512),
    "ssm_dt.bias": (512,),
    "ssm_d": (512,),
    "ssm_out.weight": (512, _E),
    "ssm_dt_norm.weight": (2,),
    "ssm_b_norm.weight": (128,),
    "ssm_c_norm.weight": (128,),
}
_CONVOLUTION: Shapes = {
    "attn_norm.weight": (_E,),
    "shortconv.in_proj.weight": (_E, 3 * _E),
    "shortconv.conv.weight": (3, _E),
    "shortconv.out_proj.weight": (_E, _E),
}
_DELTA_NET: Shapes = {
    "attn_norm.weight": (_E,),
    "attn_qkv.weight": (_E, 3 * _E),
    "attn_gate.weight": (_E, _E),
    "ssm_norm.weight": (128,),
    "ssm_conv1d.weight": (4, 768),
    "ssm_out.weight": (_E, _E),
    "ssm_a": (2,),
    "ssm_dt.bias": (2,),
    "ssm_alpha.weight": (_E, 2),
    "ssm_beta.weight": (_E, 2),
}
_GEMMA = _NORMED | _FEED | _FFN_NORM | _POST_NORM | {"post_ffw_norm.weight": (_E,)}
_PHI = (
    _OUT | _FFN_NORM | {"attn_qkv.weight": (_E, 3 * _E), "ffn_up.weight": (_E, 2 * _FF), "ffn_down.weight": (_FF, _E)}
)
# The tensors of even layers and of odd ones.
_BLOCKS: dict[str, tuple[Shapes, Shapes]] = {
    "gemma3": (_GEMMA, _GEMMA),
    "phi3": (_PHI, _PHI),
    "jamba": (_MAMBA_LAYER | _FEED | _FFN_NORM, _ATTENTION | _FEED | _FFN_NORM),
    "lfm2": (_CONVOLUTION | _FEED | _FFN_NORM, _NORMED | _FEED | _FFN_NORM),
    "qwen35": (_DELTA_NET | _FEED | _POST_NORM, _NORMED | {"attn_q.weight": (_E, 2 * _E)} | _FEED | _POST_NORM),
}


def write(path: Path, architecture: str) -> None:
    """For whoever reads headers and allocates nothing, as llama-fit-params does."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (_COMMON | METADATA[architecture]).items():
        kind = {list: writer.add_array, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        kind(f"{architecture}.{name}", value)  # type: ignore[operator]
    writer.add_tokenizer_model("none")
    tensors = _tensors(architecture)
    for name, shape in tensors.items():
        writer.add_tensor_info(name, list(reversed(shape)), np.dtype(np.float32), 4 * math.prod(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + sum(4 * math.prod(shape) + 32 for shape in tensors.values()))


def _tensors(architecture: str) -> Shapes:
    last = "token_embd_norm" if architecture == "lfm2" else "output_norm"
    blocks = [
        {f"blk.{layer}.{name}": shape for name, shape in _BLOCKS[architecture][layer % 2].items()}
        for layer in range(_LAYERS)
    ]
    found: Shapes = {"token_embd.weight": (_E, _WORDS), f"{last}.weight": (_E,)}
    for block in blocks:
        found |= block
    return found
