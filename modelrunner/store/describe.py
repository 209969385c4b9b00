"""Describes a model of any format: its configuration as `GET /models` shows it."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelrunner import chattemplates
from modelrunner.errors import InvalidModel
from modelrunner.types import ModelFormat, ModelHeader, Tensor
from modelrunner.units import format_bytes

MOST_LAYERS = 4096
_LONGEST_SHOWN = 1024  # characters of a metadata value: longer ones are templates or licences
_MOST_SHOWN = 1 << 16  # characters of all metadata
_LONGEST_ARCHITECTURE = 100  # characters
TEMPLATES = "tokenizer.chat_template"
"""The metadata entry of a chat template, in every format; further ones of a model have names behind a dot."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The description of a model's files. `files` maps their names in the bundle, in its order, to their original
    names; `config` is `StoredModel.config`."""

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
    """Returns the configuration. `weights` are the tensors of the model itself, without a projector's; `size` is that
    of all files, in bytes."""
    config: dict[str, Any] = {
        "format": str(format),
        "quantization": quantization,
        "parameters": format_count(sum(math.prod(tensor.shape) for tensor in weights)),
        "architecture": header.architecture,
        "size": format_bytes(size),
        str(format): _shown(header.metadata),
    }
    return config | ({"context_size": context_length} if context_length else {})


def main_type(weights: Iterable[Tensor]) -> str:
    """Returns the type of most of the bytes."""
    sizes: Counter[str] = Counter()
    for tensor in weights:
        sizes[tensor.dtype] += tensor.size
    return sizes.most_common(1)[0][0]


def integer(header: ModelHeader, key: str, default: int) -> int:
    """Returns the metadata entry `key` if it is a whole number (a boolean is not), else `default`."""
    value = header.metadata.get(key, default)
    return value if type(value) is int else default


def check_architecture(header: ModelHeader) -> None:
    """Raises `InvalidModel` for a model without the name of an architecture, or with an invalid name."""
    if not header.architecture:
        raise InvalidModel("its architecture is missing")
    if len(header.architecture) > _LONGEST_ARCHITECTURE:
        raise InvalidModel(f"the name of its architecture has {len(header.architecture)} characters")


def check_layers(header: ModelHeader, key: str) -> None:
    """Raises `InvalidModel` for an impossible number of layers: estimates take time and memory for each layer."""
    if integer(header, key, 0) > MOST_LAYERS:
        raise InvalidModel(f"it claims to have {integer(header, key, 0)} layers ({key}), more than any model has")


def check_template(name: str, size: int) -> None:
    """Raises `InvalidModel` for a chat template of a `size`, in bytes, that would keep an engine busy before each
    answer."""
    if size > chattemplates.LARGEST:
        raise InvalidModel(
            f"its chat template ({name}) has {size} bytes; the largest allowed is {chattemplates.LARGEST}"
        )


def read_template(name: str, path: Path) -> str:
    """Returns the text of a chat template's file. Raises `InvalidModel` for one that is too large, `OSError`."""
    check_template(name, path.stat().st_size)
    return path.read_text("utf-8", "replace")


def abilities(header: ModelHeader) -> frozenset[str]:
    """Returns the capabilities that a generative model has by its chat templates."""
    templates = [text for key, text in header.metadata.items() if key.startswith(TEMPLATES) and isinstance(text, str)]
    return frozenset().union(*map(chattemplates.abilities, templates))


def format_count(count: float) -> str:
    """Returns `135M` or `1.71B`: three significant digits."""
    for unit in ("", "K", "M", "B"):
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.4g}T"


def _shown(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the short values, up to a limit for all of them."""
    shown: dict[str, str] = {}
    room = _MOST_SHOWN
    for key, value in metadata.items():
        if not isinstance(value, list) and len(text := _text(value)) <= _LONGEST_SHOWN:
            room -= len(key) + len(text)
            if room < 0:
                break
            shown[key] = text
    return shown


def _text(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.7g}"  # the digits of single precision: 1e-05, not 9.999999747378752e-06
        case _:
            return str(value)
