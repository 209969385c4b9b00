"""A BERT of random weights as a Hugging Face folder, a few hundred kilobytes: an encoder, or a reranker with one score.
The weights are the same every time."""

import json
from pathlib import Path

import numpy as np

from tests.models import safetensors

_WIDTH, _INNER, _LAYERS, _HEADS = 32, 64, 2, 1  # vLLM has no attention for heads below 32 on the CPU
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_WORDS = [*_SPECIAL, "cat", "dog", "word", "the", "sleeps"]


def write(folder: Path, *, reranks: bool = False, context: int = 512) -> Path:
    folder.mkdir(exist_ok=True)
    shapes = _shapes(context, reranks)
    random = np.random.default_rng(1)
    safetensors.write(folder / "model.safetensors", {name: _values(name, shapes[name], random) for name in shapes})
    for name, content in {
        "config.json": _config(context, reranks),
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "model_max_length": context},
    }.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    return folder


def _values(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    if name.endswith("LayerNorm.weight"):
        return np.ones(shape)
    if "token_type" in name:  # llama.cpp takes every token for the first type: so both are the same
        return np.zeros(shape)
    return random.normal(0, 0.3, shape)


def _config(context: int, reranks: bool) -> dict[str, object]:
    labels: dict[str, object] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if reranks else {}
    return labels | {
        "architectures": ["BertForSequenceClassification" if reranks else "BertModel"],
        "model_type": "bert",
        "torch_dtype": "float32",
        "hidden_act": "gelu",
        "hidden_size": _WIDTH,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "max_position_embeddings": context,
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
        "vocab_size": len(_WORDS),
        "pad_token_id": 0,
    }


def _tokenizer() -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True}
    begin, end = ({"SpecialToken": {"id": word, "type_id": 0}} for word in ("[CLS]", "[SEP]"))
    second, end_of_second = {"Sequence": {"id": "B", "type_id": 1}}, {"SpecialToken": {"id": "[SEP]", "type_id": 1}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": word, **flags} for number, word in enumerate(_SPECIAL)],
        "normalizer": normalizer | {"strip_accents": None},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, first, end],
            "pair": [begin, first, end, second, end_of_second],
            "special_tokens": {
                word: {"id": word, "ids": [_WORDS.index(word)], "tokens": [word]} for word in ("[CLS]", "[SEP]")
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {word: number for number, word in enumerate(_WORDS)},
        },
    }


def _shapes(context: int, reranks: bool) -> dict[str, tuple[int, ...]]:
    linear = {
        "attention.self.query": (_WIDTH, _WIDTH),
        "attention.self.key": (_WIDTH, _WIDTH),
        "attention.self.value": (_WIDTH, _WIDTH),
        "attention.output.dense": (_WIDTH, _WIDTH),
        "intermediate.dense": (_INNER, _WIDTH),
        "output.dense": (_WIDTH, _INNER),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (len(_WORDS), _WIDTH),
        "embeddings.token_type_embeddings.weight": (2, _WIDTH),
        "embeddings.position_embeddings.weight": (context, _WIDTH),
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(_LAYERS):
        prefix = f"encoder.layer.{layer}"
        for name, (rows, columns) in linear.items():
            shapes |= {f"{prefix}.{name}.weight": (rows, columns), f"{prefix}.{name}.bias": (rows,)}
        norms += [f"{prefix}.attention.output.LayerNorm", f"{prefix}.output.LayerNorm"]
    shapes |= {f"{norm}.{kind}": (_WIDTH,) for norm in norms for kind in ("weight", "bias")}
    if not reranks:
        return shapes
    shapes |= {"pooler.dense.weight": (_WIDTH, _WIDTH), "pooler.dense.bias": (_WIDTH,)}
    shapes = {f"bert.{name}": shape for name, shape in shapes.items()}
    return shapes | {"classifier.weight": (1, _WIDTH), "classifier.bias": (1,)}
