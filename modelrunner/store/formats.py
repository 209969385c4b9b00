"""What the store asks of a format, and which format a set of files has."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from modelrunner.store import gguf_model, safetensors_model
from modelrunner.store.describe import Reading
from modelrunner.store.names import CONFIG, WEIGHTS
from modelrunner.types import ModelFormat, ModelHeader


class Reader(Protocol):
    """A module for one format. `paths` are by the names that the files came under, or by those in the bundle."""

    def read(self, paths: Mapping[str, Path]) -> Reading:
        """Raises `InvalidModel` if the files are no model together, `UnsupportedModel`."""

    def context_length(self, header: ModelHeader) -> int | None:
        """Tokens that the model was trained for, None if it does not say."""

    def capabilities(self, header: ModelHeader, names: Collection[str]) -> frozenset[str]:
        """What `Bundle.capabilities` says; `names` are those of the bundle's files."""

    def brings_code(self, paths: Mapping[str, Path]) -> bool:
        """Whether an engine would have to run code of the model's own. Reads small files."""


_READERS: dict[ModelFormat, Reader] = {
    ModelFormat.GGUF: gguf_model,
    ModelFormat.SAFETENSORS: safetensors_model,
}


def format_of(names: Iterable[str]) -> ModelFormat:
    """GGUF files may have any name; those of a safetensors model have their names for a reason."""
    folder = any(name == CONFIG or name.endswith(WEIGHTS) for name in names)
    return ModelFormat.SAFETENSORS if folder else ModelFormat.GGUF


def reader_of(names: Iterable[str]) -> Reader:
    return _READERS[format_of(names)]
