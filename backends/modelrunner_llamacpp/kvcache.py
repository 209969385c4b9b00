"""The sizes of llama.cpp's KV cache and recurrent states, from a model's header and the options of a run. Pure.

Sources: llama-kv-cache.cpp, llama-kv-cache-iswa.cpp, llama-memory-recurrent.cpp and llama-hparams.cpp of llama.cpp.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelrunner import ModelHeader

_CELL_PAD = 256
DEFAULT_UBATCH = 512
# Bytes of one element, block formats included (ggml.c: type_size / block size).
_TYPE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_0": 22 / 32, "q5_1": 24 / 32,
               "q4_0": 18 / 32, "q4_1": 20 / 32, "iq4_nl": 18 / 32}  # fmt: skip
# Every how many layers one has full attention, where the file does not say (load_swa_pattern in src/models).
_SWA_PERIOD = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gemma-embedding": 6, "cohere2": 4, "cohere2moe": 4,
               "llama4": 4, "gpt-oss": 2, "olmo2": 4, "exaone4": 4, "exaone-moe": 4, "afmoe": 4, "plamo3": 8,
               "smallthinker": 4, "modern-bert": 3}  # fmt: skip
_DENSE_FIRST = frozenset({"cohere2moe", "smallthinker", "modern-bert"})
_ATTENTION = re.compile(r"blk\.(\d+)\.attn_(?:k|qkv|kv_a_mqa|kv)\.weight")
_RECURRENT = re.compile(r"blk\.(\d+)\.(?:ssm_conv1d\w*|ssm_out|shortconv\.conv|time_mix_receptance)\.weight")


@dataclass(frozen=True, slots=True)
class Shape:
    """The options of a run that decide its memory. `context` in tokens, shared by `parallel` sequences."""

    context: int
    parallel: int
    ubatch: int = DEFAULT_UBATCH
    type_k: str = "f16"
    type_v: str = "f16"
    unified: bool = True
    swa_full: bool = False

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "Shape":
        return cls(
            context=int(options["--ctx-size"]),
            parallel=int(options["--parallel"]),
            ubatch=int(options.get("--ubatch-size", DEFAULT_UBATCH)),
            type_k=options.get("--cache-type-k", "f16"),
            type_v=options.get("--cache-type-v", "f16"),
            unified=options.get("--kv-unified") != "off",
            swa_full=options.get("--swa-full") == "on",
        )


class Header:
    """A model header's figures, by their names without the architecture."""

    def __init__(self, header: ModelHeader) -> None:
        self._header = header
        self.architecture = header.architecture
        self.layers = self.integer("block_count")
        self.embedding = self.integer("embedding_length")

    def get(self, name: str) -> Any:
        return self._header.metadata.get(f"{self.architecture}.{name}")

    def integer(self, name: str, default: int = 0, layer: int = 0) -> int:
        """Of one layer, where the file lists a value for each."""
        value = self.get(name)
        if isinstance(value, list | tuple):
            value = value[layer] if layer < len(value) else default
        return value if isinstance(value, int) else default

    @property
    def vocabulary(self) -> int:
        return self.integer("vocab_size", int(self._header.metadata.get("tokenizer.ggml.tokens.length", 0)))

    @property
    def causal(self) -> bool:
        return self.get("attention.causal") is not False

    def layers_with(self, tensor: re.Pattern[str]) -> set[int]:
        return {int(match[1]) for entry in self._header.tensors if (match := tensor.fullmatch(entry.name))}


def kv_cache(header: Header, shape: Shape) -> int:
    """Bytes of all layers together."""
    return sum(by_layer(header, shape).values())


def by_layer(header: Header, shape: Shape) -> dict[int, int]:
    """Bytes of each layer that has an attention cache or a recurrent state. An encoder (BERT) keeps neither."""
    if not header.causal:
        return {}
    recurrent = header.layers_with(_RECURRENT)
    attention = header.layers_with(_ATTENTION) or set(range(header.layers)) - recurrent
    own = header.layers - header.integer("attention.shared_kv_layers")  # the last ones use those of others
    found = {i: int(_cells(header, shape, i) * _cell_bytes(header, shape, i)) for i in sorted(attention) if i < own}
    for layer in recurrent:
        found[layer] = found.get(layer, 0) + shape.parallel * _state_bytes(header)
    return found


def checkpoints(header: Header, shape: Shape, count: int) -> int:
    """Bytes of `count` copies for each sequence of what it cannot be rolled back in: the tokens that its sliding layers
    hold, and its recurrent states. All sequences together have no more tokens than the context."""
    if not header.causal:
        return 0
    window = header.integer("attention.sliding_window") + shape.ubatch
    cells = min(shape.context, shape.parallel * window)
    cached, recurrent = by_layer(header, shape), header.layers_with(_RECURRENT)
    sliding = [i for i in cached if i not in recurrent and slides(header, i) and not shape.swa_full]
    copied = cells * sum(_cell_bytes(header, shape, i) for i in sliding)
    return count * int(copied + len(recurrent) * shape.parallel * _state_bytes(header))


def _cells(header: Header, shape: Shape, layer: int) -> int:
    streams = 1 if shape.unified else shape.parallel
    full = _padded(-(-shape.context // streams))
    if shape.swa_full or not slides(header, layer):
        return full * streams
    window = header.integer("attention.sliding_window")
    return min(full, _padded(window * (shape.parallel if shape.unified else 1) + shape.ubatch)) * streams


def _padded(cells: int) -> int:
    return -(-cells // _CELL_PAD) * _CELL_PAD


def slides(header: Header, layer: int) -> bool:
    """True for a layer that sees only a window of the context."""
    pattern = header.get("attention.sliding_window_pattern")
    if header.integer("attention.sliding_window") == 0:
        return False
    if isinstance(pattern, list | tuple):
        return layer < len(pattern) and bool(pattern[layer])
    period = pattern if isinstance(pattern, int) else _SWA_PERIOD.get(header.architecture, 1)
    dense = 0 if header.architecture in _DENSE_FIRST else period - 1
    return period == 0 or layer % period != dense


def _cell_bytes(header: Header, shape: Shape, layer: int) -> float:
    """One token's keys and values in one layer; of multi-head latent attention (DeepSeek) the compressed keys."""
    if rank := header.integer("attention.kv_lora_rank"):
        return (rank + header.integer("rope.dimension_count")) * _TYPE_BYTES[shape.type_k]
    heads = header.integer("attention.head_count", 1, layer) or 1
    kv_heads = header.integer("attention.head_count_kv", heads, layer)
    suffix = "_swa" if slides(header, layer) and header.get("attention.key_length_swa") else ""
    key = header.integer(f"attention.key_length{suffix}", header.embedding // heads)
    value = header.integer(f"attention.value_length{suffix}", header.embedding // heads)
    return kv_heads * (key * _TYPE_BYTES[shape.type_k] + value * _TYPE_BYTES[shape.type_v])


def _state_bytes(header: Header) -> int:
    """One sequence's state in one recurrent layer, in 32-bit floats (n_embd_r and n_embd_s of llama-hparams.cpp)."""
    if head := header.integer("wkv.head_size"):
        return header.embedding * (head + header.integer("token_shift_count", 2)) * 4
    if length := header.integer("shortconv.l_cache"):
        return header.embedding * (length - 1) * 4
    state, inner = header.integer("ssm.state_size"), header.integer("ssm.inner_size")
    convolved = inner + 2 * header.integer("ssm.group_count") * state
    return (max(header.integer("ssm.conv_kernel") - 1, 0) * convolved + state * inner) * 4
