"""What the headers of a model's files say about it, without touching any file."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from modelrunner.errors import InvalidModel
from modelrunner.store.ggml import FILE_TYPES
from modelrunner.store.manifests import PROJECTOR
from modelrunner.types import ModelFormat, ModelHeader
from modelrunner.units import format_bytes

# Encoders of llama.cpp (llama-arch.cpp): they have no language head, or are trained for embeddings only.
_ENCODERS = frozenset(
    {"bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3"}
)
_ENCODERS |= {"eurobert", "gemma-embedding", "llama-embed", "t5encoder"}
_POOLING_NONE, _POOLING_RANK = 0, 4  # enum llama_pooling_type
_LONGEST_SHOWN = 1024  # characters of a metadata value in the configuration: more is a template or a licence
_MAX_SHARDS = 99_999


def arrange(headers: Mapping[str, ModelHeader]) -> dict[str, str]:
    """Names in the bundle for the files of `headers`, keyed by them in the order of the bundle: the model or its
    shards, then the projector. A file's own name means nothing, what it says inside does. Raises `InvalidModel`."""
    projectors = [name for name, header in headers.items() if _is_projector(header)]
    weights = [name for name in headers if name not in projectors]
    if len(projectors) > 1:
        raise InvalidModel("it has more than one projector file (mmproj)")
    for name in weights:
        kind = str(headers[name].metadata.get("general.type", "model"))
        if kind != "model":
            raise InvalidModel(f"{name!r} is of the type {kind[:40]!r}, not a model")
    if not any(headers[name].tensors for name in weights):
        raise InvalidModel("there is no model file with tensors in it")
    named = _name_weights(weights, headers)
    if not headers[next(iter(named.values()))].architecture:
        raise InvalidModel("it does not say of which architecture it is")
    return named | ({PROJECTOR: projectors[0]} if projectors else {})


def _is_projector(header: ModelHeader) -> bool:
    return header.architecture == "clip" or header.metadata.get("general.type") == "mmproj"


def _name_weights(weights: list[str], headers: Mapping[str, ModelHeader]) -> dict[str, str]:
    counts = {_integer(headers[name], "split.count", 1) for name in weights}
    if counts <= {0, 1}:
        if len(weights) > 1:
            raise InvalidModel(f"it has {len(weights)} model files that are not shards of one model")
        return {"model.gguf": weights[0]}
    by_number = {_integer(headers[name], "split.no", -1): name for name in weights}
    count = counts.pop()
    if counts or count != len(weights) or set(by_number) != set(range(count)) or count > _MAX_SHARDS:
        present = ", ".join(str(number + 1) for number in sorted(by_number))
        raise InvalidModel(f"it is split into {count} files, all of which are needed; these are here: {present}")
    # The engine finds the other shards by this pattern (llama.cpp's llama_split_path).
    return {f"model-{n + 1:05}-of-{count:05}.gguf": by_number[n] for n in range(count)}


def _integer(header: ModelHeader, key: str, default: int) -> int:
    value = header.metadata.get(key, default)
    return value if isinstance(value, int) else default


def merge(headers: Sequence[ModelHeader]) -> ModelHeader:
    """One header for all files of a model in the order of the bundle: the first file's metadata, everybody's
    tensors."""
    return ModelHeader(headers[0].metadata, tuple(tensor for header in headers for tensor in header.tensors))


def configuration(weights: Sequence[ModelHeader], size: int) -> dict[str, Any]:
    """`api.Model.config` of a model with these weight files, `size` in bytes."""
    header = merge(weights)
    config: dict[str, Any] = {
        "format": str(ModelFormat.GGUF),
        "quantization": _quantization(header),
        "parameters": _format_count(sum(math.prod(tensor.shape) for tensor in header.tensors)),
        "architecture": header.architecture,
        "size": format_bytes(size),
        "gguf": {key: _text(value) for key, value in header.metadata.items() if _is_shown(value)},
    }
    length = context_length(header)
    return config | ({"context_size": length} if length else {})


def context_length(header: ModelHeader) -> int | None:
    """Tokens that the model was trained for, None if it does not say."""
    length = _integer(header, f"{header.architecture}.context_length", 0)
    return length if length > 0 else None


def capabilities(header: ModelHeader, names: Iterable[str]) -> frozenset[str]:
    """`names` are those of the bundle's files."""
    pooling = _integer(header, f"{header.architecture}.pooling_type", _POOLING_NONE)
    if pooling == _POOLING_RANK:
        return frozenset({"reranking"})
    if pooling != _POOLING_NONE or header.architecture in _ENCODERS:
        return frozenset({"embedding"})
    return frozenset({"completion", "vision"} if PROJECTOR in names else {"completion"})


def _quantization(header: ModelHeader) -> str:
    """By what the file says, or else by the type that most of its bytes have."""
    named = FILE_TYPES.get(_integer(header, "general.file_type", -1))
    if named:
        return named
    sizes: Counter[str] = Counter()
    for tensor in header.tensors:
        sizes[tensor.dtype] += tensor.size
    return sizes.most_common(1)[0][0]


def _format_count(count: float) -> str:
    """`135M`, `1.71B`: three significant digits."""
    for unit in ("", "K", "M", "B"):
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.4g}T"


def _is_shown(value: Any) -> bool:
    return not isinstance(value, list) and not (isinstance(value, str) and len(value) > _LONGEST_SHOWN)


def _text(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.7g}"  # what single precision holds: 1e-05, not 9.999999747378752e-06
        case _:
            return str(value)
