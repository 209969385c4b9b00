"""A Llama in GGUF to the folder that Hugging Face's libraries (and so vLLM) read: config.json, model.safetensors in
bfloat16, and a byte-level BPE tokenizer made of the vocabulary that the GGUF carries."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models import safetensors

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = int(gguf.TokenType.CONTROL)


def convert(path: Path, folder: Path) -> None:
    """Writes the model in the GGUF file `path` to the new folder `folder`."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir()
    tensors = {_rename(tensor.name): _weights(tensor, fields) for tensor in reader.tensors}
    safetensors.write(folder / "model.safetensors", tensors, "BF16")
    config = _config(fields, tied="lm_head.weight" not in tensors)
    for name, content in {
        "config.json": config,
        "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id")},
        "tokenizer.json": _tokenizer(fields),
        "tokenizer_config.json": _tokenizer_config(fields),
    }.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def _rename(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, number, part = stem.split(".")
    return f"model.layers.{number}.{_LAYER[part]}.{kind}"


def _weights(tensor: Any, fields: dict[str, Any]) -> np.ndarray:
    array = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist())))
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    for part, key in heads.items():
        if tensor.name.endswith(f".{part}.weight"):
            return _unpaired(array, fields[key])
    return array


def _unpaired(array: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbouring rows of a head, Hugging Face the first half's with the second's."""
    rows, columns = array.shape
    return array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "vocab_size": fields["llama.vocab_size"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """In the format of the `tokenizers` library. The splitting is that of llama.cpp's pre-tokenizer `smollm`: digits
    one by one, then GPT-2's pattern."""
    words, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": words[number], **flags} for number, kind in enumerate(kinds) if kind == _CONTROL
        ],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {word: number for number, word in enumerate(words)},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    words = fields["tokenizer.ggml.tokens"]
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    } | {f"{short}_token": words[fields[f"tokenizer.ggml.{name}_token_id"]] for short, name in named.items()}
