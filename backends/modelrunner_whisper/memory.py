"""The options of a run, and its memory."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from modelrunner.sdk import RequiredMemory, RunSpec

_BYTES = {"int8": 1, "float32": 4}
_PROCESS = 130 << 20
"""Bytes of the interpreter with its libraries and the tokenizer; on some processors 20 MiB more."""
_SOUND = 64 << 20
"""Bytes of the sound that Whisper hears at a time, with its spectrum."""
_POSITIONS, _HEAD = 1500, 64
"""Of the 30 seconds that the encoder hears at once, and the width of a head of attention, for every Whisper model
(openai/whisper, whisper/model.py)."""


class WhisperOptions(BaseModel):
    """The table `whisper` of a model's configuration. The settings are all optional.

    - `compute-type` is the type of the computation: "int8" is the smallest and fastest one on processors.
    - `beam-size` is how many texts are followed at once: 1 is the fastest.
    - `longest` is the longest sound that is taken, in seconds. It bounds the disk that one request may fill: 32 KB for
      each second.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=lambda name: name.replace("_", "-"),
        validate_by_name=True,
        validate_by_alias=True,
    )

    compute_type: Literal["int8", "float32"] = "int8"
    beam_size: Annotated[int, Field(ge=1, le=16)] = 5
    longest: Annotated[int, Field(ge=1, le=7 * 86_400)] = 4 * 3600

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Returns the options of a run."""
        return cls.model_validate(dict(options))


def required(spec: RunSpec) -> RequiredMemory:
    """Estimates the memory of a run that works on all of its sequences."""
    metadata = spec.bundle.header.metadata
    matrices, total = _number(metadata, "matrices"), _number(metadata, "parameters")
    weights = matrices * _BYTES[WhisperOptions.of(spec.options).compute_type] + (total - matrices) * 4
    return RequiredMemory(_PROCESS + weights) + growth(spec)


def growth(spec: RunSpec) -> RequiredMemory:
    """Estimates the part that only requests use: for each sequence its sound, the scores of the attention and the
    activations of the encoder, and the keys and values of the sound for each layer of the decoder."""
    metadata = spec.bundle.header.metadata
    width, layers = _number(metadata, "width"), _number(metadata, "layers")
    scores = width // _HEAD * _POSITIONS**2
    activations = 8 * _POSITIONS * width
    sound = 2 * layers * _POSITIONS * width
    return RequiredMemory(spec.parallel * (_SOUND + 4 * (scores + activations + sound)))


def _number(metadata: Mapping[str, Any], name: str) -> int:
    value = metadata.get(name)
    return value if isinstance(value, int) else 0
