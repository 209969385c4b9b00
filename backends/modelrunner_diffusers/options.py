"""The table `diffusers` of a model's configuration."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field


class DiffusersOptions(BaseModel):
    """The settings are all optional.

    - `largest` is the side in pixels of the largest square picture. A picture of another shape may have as many pixels.
      Memory is set aside for it. By default it is twice the side that the model was trained for, or less where that
      does not fit.
    - `steps` are the steps of a picture whose request names none. By default the pipeline decides.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    largest: Annotated[int, Field(ge=64, le=8192)] | None = None
    steps: Annotated[int, Field(ge=1, le=150)] | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Returns the options of a run."""
        return cls.model_validate(dict(options))
