"""A format of models that a backend brings."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from modelrunner.types import ModelFormat

_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,60}")


@dataclass(frozen=True, slots=True)
class FormatReading:
    """The description of a model's files."""

    metadata: Mapping[str, Any]
    """Texts, numbers and lists of them about the model, for `modelrunner show` and the backend (`spec.bundle.header`).
    `voices` are the names that a request for speech may choose."""
    capabilities: frozenset[str]
    """A mode that needs no known capability needs the one of its own name."""
    context_length: int | None = None
    """The tokens that the model was trained for, None if that means nothing here."""
    parameters: int = 0
    """The weights, 0 if they were not counted."""
    quantization: str = ""
    """The type of most weights, as lists show it."""


@dataclass(frozen=True, slots=True)
class FileFormat:
    """A format by the names of its files. A pattern with a folder (`*/config.json`) is for files of folders beside the
    weights; there is none deeper. Other files are left out."""

    format: ModelFormat
    weights: str
    """A pattern (`*.voice`) for the file by which the format is known, and which engines open."""
    read: Callable[[Mapping[str, Path]], FormatReading]
    """Reads the files, by name. Raises `InvalidModel` if they make no model. It may be called on any thread."""
    others: tuple[str, ...] = ()
    """Patterns for the other files of such a model."""

    def chosen(self, names: Iterable[str]) -> list[str]:
        """Returns the names of a model's files, the weights first; none if there are no weights, or several."""
        names = list(names)
        weights = [name for name in names if _matches(name, self.weights)]
        if len(weights) != 1:
            return []
        others = {name for name in names for pattern in self.others if _matches(name, pattern)}
        return [*weights, *sorted(others.difference(weights))]

    def has(self, name: str) -> bool:
        """Returns whether a file of this name can belong to such a model."""
        return any(_matches(name, pattern) for pattern in (self.weights, *self.others))


def _matches(name: str, pattern: str) -> bool:
    """Returns whether the name and its folder, if the pattern has one, match. A folder's name cannot lead elsewhere."""
    (folder, _, file), (place, _, wanted) = name.rpartition("/"), pattern.rpartition("/")
    if not fnmatchcase(file, wanted) or bool(folder) != bool(place):
        return False
    return not place or (_FOLDER.fullmatch(folder) is not None and fnmatchcase(folder, place))
