"""A BERT of random weights, a few hundred kilobytes: an encoder for llama.cpp's embedding and reranking modes."""

from pathlib import Path

import numpy as np

_WIDTH, _INNER, _LAYERS = 32, 64, 2
_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁cat", "▁dog", "▁word", "▁the", "▁sleeps"]


def write_tiny_bert(path: Path, context: int = 512, *, reranks: bool = False) -> None:
    """An embedding model that pools the mean, or a reranker with one score."""
    import gguf

    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(context)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(_INNER)
    writer.add_block_count(_LAYERS)
    writer.add_head_count(2)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK if reranks else gguf.PoolingType.MEAN)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")
    writer.add_token_list(_WORDS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 5 + [gguf.TokenType.NORMAL] * (len(_WORDS) - 5))
    writer.add_token_type_count(2)
    for name, number in {"pad": 0, "unk": 1, "bos": 2, "eos": 3, "sep": 3, "mask": 4}.items():
        getattr(writer, f"add_{name}_token_id")(number)
    random = np.random.default_rng(1)
    for tensor, shape in _tensors(context, reranks).items():
        norm = "norm" in tensor and tensor.endswith("weight")
        data = np.ones(shape) if norm else random.normal(0, 0.3, shape)
        writer.add_tensor(tensor, data.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(context: int, reranks: bool) -> dict[str, tuple[int, ...]]:
    wide = (_WIDTH,)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(_WORDS), _WIDTH),
        "token_types.weight": (2, _WIDTH),
        "position_embd.weight": (context, _WIDTH),
        "token_embd_norm.weight": wide,
        "token_embd_norm.bias": wide,
    }
    for layer in range(_LAYERS):
        block = f"blk.{layer}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes |= {f"{block}.{name}.weight": (_WIDTH, _WIDTH), f"{block}.{name}.bias": wide}
        for name in ("attn_output_norm", "layer_output_norm"):
            shapes |= {f"{block}.{name}.weight": wide, f"{block}.{name}.bias": wide}
        shapes |= {f"{block}.ffn_up.weight": (_INNER, _WIDTH), f"{block}.ffn_up.bias": (_INNER,)}
        shapes |= {f"{block}.ffn_down.weight": (_WIDTH, _INNER), f"{block}.ffn_down.bias": wide}
    if reranks:
        shapes |= {"cls.weight": (_WIDTH, _WIDTH), "cls.bias": wide}
        shapes |= {"cls.output.weight": (1, _WIDTH), "cls.output.bias": (1,)}
    return shapes
