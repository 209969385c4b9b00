"""What is told about a model, in whatever format it is: its configuration as `GET /models` shows it."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from modelrunner.types import ModelFormat, ModelHeader, Tensor
from modelrunner.units import format_bytes

_LONGEST_SHOWN = 1024  # characters of a metadata value: more is a template or a licence


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read out of a model's files. `files` maps their names in the bundle, in its order, to the names that
    they came under; `config` is `api.Model.config`."""

    files: Mapping[str, str]
    header: ModelHeader
    config: dict[str, Any]


def configuration(
    format: ModelFormat,
    header: ModelHeader,
    *,
    weights: Iterable[Tensor],
    quantization: str,
    size: int,
    context_length: int | None,
) -> dict[str, Any]:
    """`weights` are the tensors of the model itself, without a projector's; `size` is of all files, in bytes."""
    config: dict[str, Any] = {
        "format": str(format),
        "quantization": quantization,
        "parameters": _format_count(sum(math.prod(tensor.shape) for tensor in weights)),
        "architecture": header.architecture,
        "size": format_bytes(size),
        str(format): {key: _text(value) for key, value in header.metadata.items() if _is_shown(value)},
    }
    return config | ({"context_size": context_length} if context_length else {})


def main_type(weights: Iterable[Tensor]) -> str:
    """The type that most of the bytes have."""
    sizes: Counter[str] = Counter()
    for tensor in weights:
        sizes[tensor.dtype] += tensor.size
    return sizes.most_common(1)[0][0]


def integer(header: ModelHeader, key: str, default: int) -> int:
    """The metadata entry `key` if it is a whole number."""
    value = header.metadata.get(key, default)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


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
