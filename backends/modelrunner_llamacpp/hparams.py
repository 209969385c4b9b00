"""Reads a model's header as llama.cpp does: the kind of memory that each layer keeps. Pure.

Sources: load_hparams and create_memory of llama-model.cpp, and load_arch_hparams of every file in src/models."""

import re
from functools import cached_property
from typing import Any

from modelrunner.sdk import InvalidModel, ModelHeader

_MOST_LAYERS = 512  # LLAMA_MAX_LAYERS
_MOST = (1 << 32) - 1  # llama.cpp reads these figures as 32-bit numbers
# Architectures without a cache: encoders and diffusion models (create_memory).
_CACHELESS = frozenset(
    {"bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert"}
    | {"gemma-embedding", "wavtokenizer-dec", "dream", "llada", "llada-moe", "rnd1"}
)
# The architectures with layers that slide. Every so many layers one sees the whole context, where the file does not say
# it (load_swa_pattern); with 0 none does. Others have no such layers, whatever window their file names (phi3, qwen2).
_SWA_PERIOD = {"afmoe": 4, "cohere2": 4, "cohere2moe": 4, "exaone-moe": 4, "exaone4": 4, "gemma2": 2,
               "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "laguna": 4, "lfm2": 0, "llama4": 4, "mellum": 4,
               "muse-glimmer": 4, "olmo2": 4, "plamo3": 8, "smallthinker": 4}  # fmt: skip
_DENSE_FIRST = frozenset({"cohere2moe", "laguna", "smallthinker"})
_WINDOW = {"llama4": 8192, "smallthinker": 4096}  # regardless of the file, unless it says 0
_ATTENTION = re.compile(r"blk\.(\d{1,4})\.attn_(?:k|qkv|kv_a_mqa|kv)\.weight")
_RECURRENT = re.compile(r"blk\.(\d{1,4})\.(?:ssm_conv1d\w*|ssm_out|shortconv\.conv|time_mix_receptance)\.weight")
_BOTH = "falcon-h1"  # every layer has attention and a recurrent state


class Header:
    """The figures of a model's header, by their names without the architecture. A figure that llama.cpp cannot read
    raises `InvalidModel` at every use, so that no estimate works with it."""

    def __init__(self, header: ModelHeader) -> None:
        self._header = header
        self.architecture = header.architecture
        self.layers = self.integer("block_count")
        if self.layers > _MOST_LAYERS:
            raise InvalidModel(f"its header says {self.layers} layers, and llama.cpp loads {_MOST_LAYERS} at most")
        self.integer("context_length")
        self.embedding = self.integer("embedding_length")
        self.width = self.integer("embedding_length_out") or self.embedding  # of the states after the last layer

    def get(self, name: str) -> Any:
        return self._header.metadata.get(f"{self.architecture}.{name}")

    def integer(self, name: str, default: int = 0, layer: int = 0) -> int:
        """Returns a figure. If the file lists one for each layer, it is that of `layer`. Raises `InvalidModel`."""
        value = self.get(name)
        if isinstance(value, list | tuple):
            value = value[layer] if layer < len(value) else None
        return default if value is None else _checked(f"{self.architecture}.{name}", value)

    def integers(self, name: str) -> list[int]:
        """Returns the figures of a list, none if there is no list. Raises `InvalidModel`."""
        value = self.get(name)
        name = f"{self.architecture}.{name}"
        return [_checked(name, each) for each in value] if isinstance(value, list | tuple) else []

    @property
    def vocabulary(self) -> int:
        words = "tokenizer.ggml.tokens.length"
        return self.integer("vocab_size", _checked(words, self._header.metadata.get(words, 0)))

    @property
    def causal(self) -> bool:
        return self.get("attention.causal") is not False

    @property
    def has_cache(self) -> bool:
        return self.architecture not in _CACHELESS

    @property
    def window(self) -> int:
        """Returns the tokens that a sliding layer sees, 0 where no layer slides."""
        if self.architecture == "exaone4" and self.layers != 64:
            return 0
        fixed = _WINDOW.get(self.architecture, 0)
        said = self.integer("attention.sliding_window", fixed)
        return fixed or said if said else 0

    def slides(self, layer: int) -> bool:
        """Returns True for a layer that sees only a window of the context."""
        pattern = self.get("attention.sliding_window_pattern")
        if self.window == 0:
            return False
        if isinstance(pattern, list | tuple):
            return layer < len(pattern) and bool(pattern[layer])
        period = _SWA_PERIOD.get(self.architecture)
        if not period:
            return period == 0
        if isinstance(pattern, int):
            period = pattern
        return period == 0 or layer % period != (0 if self.architecture in _DENSE_FIRST else period - 1)

    @property
    def heads(self) -> range:
        """Returns the last layers that only predict further tokens (MTP)."""
        return range(self.layers - min(self.integer("nextn_predict_layers"), self.layers), self.layers)

    @property
    def predicts(self) -> bool:
        """Returns True if the weights of the last head are there: files can leave out what their header names."""
        return bool(self.heads) and self._has(f"blk.{self.layers - 1}.nextn.eh_proj.weight")

    @property
    def drafter(self) -> str:
        """Returns the kind of drafts that the model makes for another one, as llama.cpp's `--spec-type` names it. Heads
        of another model are a file of their own architecture, or one without the layers before the heads."""
        if self.architecture == "eagle3":
            return "draft-eagle3"
        whole = self.heads.start > 0 and self._has("blk.0.attn_norm.weight")
        return "draft-mtp" if self.predicts and not whole else "draft-simple"

    def attention(self) -> set[int]:
        """Returns the layers that have keys and values of their own; the last layers may use those of others."""
        own = min(self._computed(), self.layers - self.integer("attention.shared_kv_layers"))
        layers = set(self._attending) or set(range(self.layers))
        if self.architecture != _BOTH:
            layers -= self.recurrent()
        return {layer for layer in layers if layer < own}

    def recurrent(self) -> set[int]:
        """Returns the layers that keep a state for each sequence instead of keys and values."""
        listed, every = self.get("attention.recurrent_layers"), self.integer("full_attention_interval")
        if isinstance(listed, list | tuple):
            layers = frozenset(layer for layer, recurrent in enumerate(listed) if recurrent)
        elif every:
            layers = frozenset(layer for layer in range(self.layers) if (layer + 1) % every)
        else:
            layers = self._recurring
        return {layer for layer in layers if layer < self._computed()}

    def _computed(self) -> int:
        """Returns the number of layers without `heads`, unless all are."""
        return self.heads.start or self.layers

    @cached_property
    def _attending(self) -> frozenset[int]:
        return self._with(_ATTENTION)

    @cached_property
    def _recurring(self) -> frozenset[int]:
        return self._with(_RECURRENT)

    def _has(self, name: str) -> bool:
        return any(tensor.name == name for tensor in self._header.tensors)

    def _with(self, tensor: re.Pattern[str]) -> frozenset[int]:
        names = (tensor.fullmatch(entry.name) for entry in self._header.tensors)
        return frozenset(int(match[1]) for match in names if match)


def _checked(name: str, value: Any) -> int:
    """Raises `InvalidModel` unless it is a whole number that fits into 32 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise InvalidModel(f"its header says {str(value)[:40]!r} for {name[:80]}, which is no whole number of 32 bits")
    return value
