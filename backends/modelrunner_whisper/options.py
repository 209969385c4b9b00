"""The table `whisper` of a model's configuration."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field


class WhisperOptions(BaseModel):
    """The settings are all optional.

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
