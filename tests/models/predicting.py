"""Models of random weights in GGUF that draft, a few hundred kilobytes each: a GLM whose last layer predicts a further
token (MTP), and a head (EAGLE-3) for a model of `random_llama`."""

from pathlib import Path

import gguf
import numpy as np

from tests.models import random_llama

_WIDTH, _INNER, _HEADS, _LAYERS, _EXPERTS = 64, 128, 2, 3, 2
_LAST = f"blk.{_LAYERS - 1}"


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "glm4moe")
    writer.add_name("predicting")
    writer.add_context_length(65_536)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_INNER)
    writer.add_expert_feed_forward_length(_INNER)
    writer.add_block_count(_LAYERS)
    writer.add_nextn_predict_layers(1)
    writer.add_leading_dense_block_count(_LAYERS - 1)
    writer.add_expert_count(_EXPERTS)
    writer.add_expert_used_count(1)
    writer.add_expert_shared_count(0)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    return _finished(writer, _shapes(len(random_llama.add_vocabulary(writer))), path)


def write_head(path: Path) -> Path:
    """A head that reads the first, the second and the last layer of a model with the default `Sizes`."""
    sizes = random_llama.Sizes()
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_name("head")
    writer.add_context_length(sizes.context)
    writer.add_embedding_length(sizes.width)
    writer.add_feed_forward_length(sizes.inner)
    writer.add_block_count(1)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_rope_dimension_count(sizes.width // sizes.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array("eagle3.target_layers", [0, 1, sizes.layers])
    writer.add_uint32("eagle3.target_hidden_size", sizes.width)
    words = random_llama.add_vocabulary(writer)
    shapes = dict(random_llama.shapes(len(words), random_llama.Sizes(layers=1)))
    shapes |= {f"blk.0.attn_{part}.weight": (sizes.width, 2 * sizes.width) for part in ("q", "k", "v")}
    shapes |= {"blk.0.attn_norm_2.weight": (sizes.width,), "fc.weight": (sizes.width, 3 * sizes.width)}
    return _finished(writer, shapes, path)


def _finished(writer: gguf.GGUFWriter, shapes: dict[str, tuple[int, ...]], path: Path) -> Path:
    random = np.random.default_rng(1)
    for name, shape in shapes.items():
        kind = np.float32 if len(shape) == 1 or name.endswith("gate_inp.weight") else np.float16
        writer.add_tensor(name, (np.ones(shape) if len(shape) == 1 else random.normal(0, 0.3, shape)).astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(words: int) -> dict[str, tuple[int, ...]]:
    sizes = random_llama.Sizes(_WIDTH, _INNER, _LAYERS, _HEADS, _HEADS)
    found = {
        name.replace("ffn_norm", "post_attention_norm"): shape
        for name, shape in random_llama.shapes(words, sizes).items()
    }
    for part in ("gate", "up", "down"):
        rows, columns = found.pop(f"{_LAST}.ffn_{part}.weight")
        found[f"{_LAST}.ffn_{part}_exps.weight"] = (_EXPERTS, rows, columns)
    return found | {
        f"{_LAST}.ffn_gate_inp.weight": (_EXPERTS, _WIDTH),
        f"{_LAST}.exp_probs_b.bias": (_EXPERTS,),
        f"{_LAST}.nextn.eh_proj.weight": (_WIDTH, 2 * _WIDTH),
        **{f"{_LAST}.nextn.{norm}.weight": (_WIDTH,) for norm in ("enorm", "hnorm", "shared_head_norm")},
    }
