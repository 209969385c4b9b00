"""A BERT in safetensors to GGUF: an encoder that pools the mean, or a reranker with one score. Names and layout as
llama.cpp reads them (llama-arch.cpp, LLM_ARCH_BERT)."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models import safetensors

_TOP = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.LayerNorm": "token_embd_norm",
}
# A reranker's score is classifier(tanh(pooler(first token))).
_HEAD = {"pooler.dense": "cls", "classifier": "cls.output"}
_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_WHOLE = {"token_types.weight", "position_embd.weight"}  # llama.cpp adds these in full precision


def convert(folder: Path, path: Path) -> None:
    """Writes the model in `folder` (config.json, model.safetensors, tokenizer.json) to `path`, matrices as F16."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name(folder.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    reranks = config["architectures"] == ["BertForSequenceClassification"]
    writer.add_pooling_type(gguf.PoolingType.RANK if reranks else gguf.PoolingType.MEAN)
    _add_vocabulary(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    for name, array in safetensors.read(folder / "model.safetensors").items():
        renamed = _rename(name.removeprefix("bert."), reranks)
        if renamed is not None:
            half = array.ndim == 2 and renamed not in _WHOLE
            writer.add_tensor(renamed, array.astype(np.float16 if half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rename(name: str, reranks: bool) -> str | None:
    """None for a tensor that the converted model has no use for."""
    stem, _, kind = name.rpartition(".")
    table = _TOP | (_HEAD if reranks else {})
    if stem in table:
        return f"{table[stem]}.{kind}"
    if stem.startswith("encoder.layer."):
        number, _, rest = stem.removeprefix("encoder.layer.").partition(".")
        return f"blk.{number}.{_LAYER[rest]}.{kind}"
    return None


def _add_vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    numbers = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    words = sorted(numbers, key=numbers.__getitem__)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("jina-v2-en")  # llama.cpp's name for BERT's own lower-casing
    writer.add_token_list([word if word in special else _marked(word) for word in words])
    kinds = (gguf.TokenType.CONTROL if word in special else gguf.TokenType.NORMAL for word in words)
    writer.add_token_types(list(kinds))
    writer.add_token_type_count(config["type_vocab_size"])
    for word, add in {
        "[PAD]": writer.add_pad_token_id,
        "[UNK]": writer.add_unk_token_id,
        "[CLS]": writer.add_bos_token_id,
        "[SEP]": writer.add_sep_token_id,
        "[MASK]": writer.add_mask_token_id,
    }.items():
        add(numbers[word])
    writer.add_eos_token_id(numbers["[SEP]"])
    # How llama.cpp puts a query and a document together: [CLS] query [SEP] document [SEP].
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.add_add_sep_token(False)


def _marked(word: str) -> str:
    """llama.cpp marks the beginnings of words, where BERT marks what continues one."""
    return word[2:] if word.startswith("##") else f"\N{LOWER ONE EIGHTH BLOCK}{word}"
