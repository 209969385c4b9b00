"""The table `llamacpp` of a model's configuration: settings for llama.cpp alone."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from modelrunner_llamacpp.settings import Size

DeviceNumber = Annotated[int, Field(ge=0, le=127)]  # llama.cpp's most devices: 128


class LlamaCppOptions(BaseModel):
    """All optional; names may be written with dashes.

    `reasoning_budget`: tokens that a model may think, 0 for none, -1 without a limit.
    `devices`: the numbers of the GPUs to use, as the engine counts them; all where it is empty.
    `main_device`: the one that is filled first, and holds the projector; the first of `devices` if not given.
    `prompt_cache`: bytes of main memory for prompts of finished requests, instead of the backend's own setting.
    `save_slots`: keep long prompts on disk when the model is unloaded.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, alias_generator=lambda name: name.replace("_", "-")
    )

    reasoning_budget: int | None = Field(default=None, ge=-1, le=1 << 24)
    devices: tuple[DeviceNumber, ...] = ()
    main_device: DeviceNumber | None = None
    prompt_cache: Size | None = None
    save_slots: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.devices)) != len(self.devices):
            raise ValueError("devices names one twice")
        if self.main_device is not None and self.devices and self.main_device not in self.devices:
            raise ValueError("main-device is not among devices")
        return self

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Converts `RunSpec.options`."""
        return cls.model_validate(dict(options))
