"""Reads a Whisper model as CTranslate2 keeps it: `model.bin`, `config.json`, `tokenizer.json` and a vocabulary.

The layout of `model.bin` is that of version 6 of the format (OpenNMT/CTranslate2,
python/ctranslate2/specs/model_spec.py, `ModelSpec._serialize`): little-endian; a version, the name of the
specification, a revision, then each variable with its name, its shape, the number of its type, its size in bytes and
its content, then aliases of variables.
"""

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from modelrunner.sdk import FileFormat, FormatReading, InvalidModel, ModelFormat, read_object

CTRANSLATE2 = ModelFormat("ctranslate2")
_WEIGHTS, _CONFIG, _TOKENIZER = "model.bin", "config.json", "tokenizer.json"
_VERSION = 6
_SPECIFICATION = "WhisperSpec"
_TYPES = {0: "float32", 1: "int8", 2: "int16", 3: "int32", 4: "float16", 5: "bfloat16"}
_LAYER = re.compile(r"decoder/layer_\d+/self_attention/layer_norm/gamma")
_SHOWN = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_MOST_VARIABLES = 1 << 14
_MOST_DIMENSIONS = 8
_LONGEST_CONFIG = 1 << 20
_MULTILINGUAL = 51865
"""The entries of the vocabulary from which on a model knows languages beside English (openai/whisper, whisper/model.py,
`is_multilingual`)."""


@dataclass(frozen=True, slots=True)
class _Variable:
    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def read(files: Mapping[str, Path]) -> FormatReading:
    """Reads the description. Raises `InvalidModel` for files that make no Whisper model."""
    for name in (_CONFIG, _TOKENIZER):
        if name not in files:
            raise InvalidModel(f"{name} is missing beside {_WEIGHTS}")
    if not any(name.startswith("vocabulary.") for name in files):
        raise InvalidModel(f"the vocabulary (vocabulary.txt or vocabulary.json) is missing beside {_WEIGHTS}")
    read_object(files[_CONFIG], _LONGEST_CONFIG, _CONFIG)
    with files[_WEIGHTS].open("rb") as file:
        variables = {variable.name: variable for variable in _variables(file)}
    try:
        embeddings = variables["decoder/embeddings/weight"].shape
        bands = variables["encoder/conv1/weight"].shape[1]
        vocabulary, width = embeddings
    except (KeyError, IndexError, ValueError):
        raise InvalidModel(f"{_WEIGHTS} lacks the weights of a Whisper model") from None
    # What CTranslate2 turns into the type of computation: the matrices of linear layers and embeddings.
    matrices = sum(v.count for v in variables.values() if v.name.endswith("weight") and len(v.shape) == 2)
    total = sum(v.count for v in variables.values())
    languages, kind = vocabulary >= _MULTILINGUAL, variables["decoder/embeddings/weight"].type
    return FormatReading(
        {
            "general.architecture": "whisper",
            "parameters": total,
            "matrices": matrices,
            "width": width,
            "bands": bands,
            "vocabulary": vocabulary,
            "layers": sum(bool(_LAYER.fullmatch(name)) for name in variables),
            "multilingual": languages,
        },
        frozenset({"transcription"}),
        parameters=total,
        quantization=_SHOWN.get(kind, kind.upper()),
    )


def _variables(file: IO[bytes]) -> Iterator[_Variable]:
    """Yields the variables of a `model.bin` without their contents. Raises `InvalidModel`, also for a cut file."""
    size = file.seek(0, 2)
    file.seek(0)
    if _numbers(file, "I") != (_VERSION,):
        raise InvalidModel(f"{_WEIGHTS} is no model of CTranslate2 (version {_VERSION} of its format)")
    if (specification := _text(file)) != _SPECIFICATION:
        raise InvalidModel(f"{_WEIGHTS} is a model of CTranslate2, but no Whisper model ({specification[:40]!r})")
    _, count = _numbers(file, "II")
    if count > _MOST_VARIABLES:
        raise InvalidModel(f"{_WEIGHTS} claims to have {count} variables")
    for _ in range(count):
        name, (dimensions,) = _text(file), _numbers(file, "B")
        if dimensions > _MOST_DIMENSIONS:
            raise InvalidModel(f"{_WEIGHTS} has a variable with {dimensions} dimensions")
        shape = _numbers(file, f"{dimensions}I")
        type, length = _numbers(file, "BI")
        if file.tell() + length > size:
            raise InvalidModel(f"{_WEIGHTS} is cut: it ends in the variable {name[:80]!r}")
        file.seek(length, 1)
        yield _Variable(name, shape, _TYPES.get(type, "unknown"))
    _numbers(file, "I")


def _numbers(file: IO[bytes], form: str) -> tuple[int, ...]:
    length = struct.calcsize(f"<{form}")
    data = file.read(length)
    if len(data) < length:
        raise InvalidModel(f"{_WEIGHTS} is cut")
    return struct.unpack(f"<{form}", data)


def _text(file: IO[bytes]) -> str:
    (length,) = _numbers(file, "H")
    return file.read(length).rstrip(b"\0").decode("utf-8", "replace")


FORMAT = FileFormat(
    CTRANSLATE2,
    _WEIGHTS,
    read,
    (_CONFIG, _TOKENIZER, "vocabulary.txt", "vocabulary.json", "preprocessor_config.json"),
)
