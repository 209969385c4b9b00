"""The formats that backends bring, as the store reads them. They are known from the start of the daemon on."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from modelrunner.errors import InvalidModel, ModelRunnerError
from modelrunner.modelformat import FileFormat
from modelrunner.store import describe
from modelrunner.store.names import WEIGHTS
from modelrunner.types import ModelFormat, ModelHeader

_CAPABILITIES, _CONTEXT = "modelrunner.capabilities", "modelrunner.context_length"
_formats: dict[ModelFormat, FileFormat] = {}


def register(format: FileFormat) -> None:
    """Adds a format, or replaces the one of that name."""
    _formats[format.format] = format


def format_of(names: Iterable[str]) -> FileFormat | None:
    """Returns the format of a set of files, None if it is none of a backend's. Beside weights in safetensors it is one
    that has some of them."""
    names = list(names)
    choices = [(format, format.chosen(names)) for format in _formats.values()]
    if any(name.endswith(WEIGHTS) for name in names):
        return next((format for format, chosen in choices if any(name.endswith(WEIGHTS) for name in chosen)), None)
    return next((format for format, chosen in choices if chosen), None)


def files_in(names: Iterable[str]) -> list[str]:
    """Returns the files of a model in a backend's format, the weights first; none in another format. They are no code,
    whatever their names are."""
    names = list(names)
    format = format_of(names)
    return format.chosen(names) if format is not None else []


def is_file(name: str) -> bool:
    """Returns whether a file of this name can belong to a model in such a format."""
    return any(format.has(name) for format in _formats.values())


class ForeignReader:
    """The reader of one format, as `formats.Reader`."""

    def __init__(self, format: FileFormat) -> None:
        self._format = format

    def read(self, paths: Mapping[str, Path]) -> describe.Reading:
        name = str(self._format.format)
        try:
            reading = self._format.read(paths)
        except (ModelRunnerError, OSError):
            raise
        except Exception as error:  # of the backend's own code
            raise InvalidModel(f"it cannot be read as {name} ({type(error).__name__}: {error})") from error
        own = {_CAPABILITIES: sorted(reading.capabilities), _CONTEXT: reading.context_length or 0}
        header = ModelHeader({"general.architecture": name, **reading.metadata, **own}, ())
        size = sum(path.stat().st_size for path in paths.values())
        config = describe.configuration(
            self._format.format,
            header,
            weights=(),
            quantization=reading.quantization,
            size=size,
            context_length=self.context_length(header),
        )
        config["parameters"] = describe.format_count(reading.parameters) if reading.parameters else ""
        return describe.Reading({name: name for name in self._format.chosen(paths)}, header, config)

    def context_length(self, header: ModelHeader) -> int | None:
        return describe.integer(header, _CONTEXT, 0) or None

    def capabilities(self, header: ModelHeader, names: Collection[str]) -> frozenset[str]:
        return frozenset(header.metadata.get(_CAPABILITIES, ()))

    def brings_code(self, paths: Mapping[str, Path]) -> bool:
        return False
