"""The readers of the model formats, and the format of a set of files."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from modelrunner.store import foreignformats, gguf_model, safetensors_model
from modelrunner.store.describe import Reading
from modelrunner.store.foreignformats import ForeignReader
from modelrunner.store.names import CONFIG, WEIGHTS
from modelrunner.types import ModelFormat, ModelHeader


class Reader(Protocol):
    """A module for one format. `paths` are keyed by the original names of the files, or by those in the bundle."""

    def read(self, paths: Mapping[str, Path]) -> Reading:
        """Returns the description of the model. Raises `InvalidModel` if the files do not make a model,
        `UnsupportedModel`."""

    def context_length(self, header: ModelHeader) -> int | None:
        """Returns the tokens that the model was trained for, None if unknown."""

    def capabilities(self, header: ModelHeader, names: Collection[str]) -> frozenset[str]:
        """Returns the value of `Bundle.capabilities`; `names` are those of the bundle's files."""

    def brings_code(self, paths: Mapping[str, Path]) -> bool:
        """Returns whether an engine would have to run code of the model's own. Reads small files."""


_READERS: dict[ModelFormat, Reader] = {
    ModelFormat.GGUF: gguf_model,
    ModelFormat.SAFETENSORS: safetensors_model,
}


def format_of(names: Iterable[str]) -> ModelFormat:
    """Returns the format. GGUF files may have any name; the files of a safetensors model have fixed names."""
    names = list(names)
    if (foreign := foreignformats.format_of(names)) is not None:
        return foreign.format
    has_weights = any(name.endswith(WEIGHTS) for name in names)
    return ModelFormat.SAFETENSORS if has_weights or CONFIG in names else ModelFormat.GGUF


def reader_of(names: Iterable[str]) -> Reader:
    names = list(names)
    foreign = foreignformats.format_of(names)
    return ForeignReader(foreign) if foreign is not None else _READERS[format_of(names)]
