"""The table `llamacpp` of a model's configuration: settings for llama.cpp alone."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from modelrunner_llamacpp.settings import Size

DeviceNumber = Annotated[int, Field(ge=0, le=127)]  # llama.cpp's most devices: 128


class LlamaCppOptions(BaseModel):
    """The settings are all optional. Their names may be written with dashes.

    - `reasoning_budget` is the number of tokens that a model may think, 0 for none, -1 for no limit.
    - `devices` are the numbers of the GPUs to use, as the engine counts them. Without it the engine uses all.
    - `main_device` is filled first and holds the projector. Without it, it is the first of `devices`.
    - `prompt_cache` is the bytes of main memory for prompts of finished requests. It replaces the backend's setting.
    - `save_slots` keeps long prompts on disk when the model is unloaded.
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
