"""The options of a run, and its memory at the largest size of its pictures. Weights and activations have 32 bits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from modelrunner.sdk import Bundle, RequiredMemory, RunSpec, Variant

_PROCESS = 400 << 20
"""Bytes of the interpreter with torch, diffusers and transformers."""
_FLOAT = 4
_SIDES = (2, 1.5, 1, 0.75, 0.5)
"""The largest sides that are tried where none is configured, as parts of the side that the model was trained for."""
_STEP = 64


class DiffusersOptions(BaseModel):
    """The table `diffusers` of a model's configuration. The settings are all optional.

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


def largest(spec: RunSpec) -> int:
    """Returns the side in pixels of the largest square picture of a run."""
    configured = DiffusersOptions.of(spec.options).largest
    return configured if configured is not None else _side(spec.bundle, _SIDES[0])


def required(spec: RunSpec) -> RequiredMemory:
    """Estimates the memory of a run that draws its largest pictures."""
    weights = _FLOAT * _number(spec.bundle.header.metadata, "parameters")
    return RequiredMemory(_PROCESS + weights) + growth(spec)


def growth(spec: RunSpec) -> RequiredMemory:
    """Estimates the part that only requests use: the denoiser and the VAE work one after the other."""
    metadata, pixels = spec.bundle.header.metadata, largest(spec) ** 2
    return RequiredMemory(spec.parallel * max(_denoiser(metadata, pixels), _vae(metadata, pixels)))


def _denoiser(metadata: Mapping[str, Any], pixels: int) -> int:
    """For the picture with and without the prompt: what each level keeps for its way up, and at the first level, in the
    feed-forward network, eight times the width."""
    channels, layers = _list(metadata, "unet_channels"), _number(metadata, "unet_layers")
    latent = pixels // _number(metadata, "scale") ** 2
    kept = sum((layers + 1) * width * latent >> 2 * level for level, width in enumerate(channels))
    return 2 * _FLOAT * (kept + 16 * channels[0] * latent)


def _vae(metadata: Mapping[str, Any], pixels: int) -> int:
    """The last level, at the full size: its input with the width of the level before, and copies of it in a block."""
    channels = _list(metadata, "vae_channels")
    before = channels[min(1, len(channels) - 1)]
    return _FLOAT * pixels * (3 * before + 2 * channels[0])


def variants(spec: RunSpec, budget: RequiredMemory) -> list[Variant]:
    """Returns the run, and where no `largest` is configured, runs with smaller pictures."""
    if DiffusersOptions.of(spec.options).largest is not None:
        return [Variant(spec, required(spec))]
    most = largest(spec)
    sizes = []
    for rank, side in enumerate(dict.fromkeys(_side(spec.bundle, part) for part in _SIDES)):
        run = replace(spec, options={**spec.options, "largest": side})
        sizes.append(Variant(run, required(run), f"pictures up to {side}x{side}" if side < most else "", rank))
    return sizes


def _side(bundle: Bundle, part: float) -> int:
    trained = _number(bundle.header.metadata, "side")
    return max(_STEP, min(8192, int(trained * part) // _STEP * _STEP))


def _number(metadata: Mapping[str, Any], name: str) -> int:
    value = metadata.get(name)
    return value if isinstance(value, int) else 1


def _list(metadata: Mapping[str, Any], name: str) -> Sequence[int]:
    value = metadata.get(name)
    return value if isinstance(value, list | tuple) and value else (1,)
