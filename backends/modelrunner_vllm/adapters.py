"""LoRA adapters of a run. vLLM applies one of them to each request: the first, or the one that the request names in its
field `adapter`."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from modelrunner.sdk import Adapter, BadRequest, Mode, RunSpec

BASE = "modelrunner-base"
"""The name of the model without an adapter, where the model's own names stand for its first adapter. No request can use
it."""
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank


def names(spec: RunSpec) -> dict[str, str]:
    """Returns vLLM's names for the adapters, by their own names. An answer carries the name of its adapter: the first
    one has the model's."""
    model = spec.bundle.name
    return {adapter.name: f"{model}+{adapter.name}" if n else model for n, adapter in enumerate(spec.bundle.adapters)}


def words(spec: RunSpec, folder: Path) -> Iterator[str]:
    """Yields the words of the command line. `folder` takes the adapters whose scale is not 1. Raises `BadRequest`."""
    if not spec.bundle.adapters:
        return
    rank = max(map(_rank, spec.bundle.adapters))
    yield from ("--enable-lora", "--max-loras", str(len(spec.bundle.adapters)), "--max-lora-rank", str(rank))
    places = {adapter.name: _scaled(adapter, folder) for adapter in spec.bundle.adapters}
    yield from ("--lora-modules", *(json.dumps({"name": n, "path": str(places[a])}) for a, n in names(spec).items()))


def check(spec: RunSpec) -> None:
    """Raises `BadRequest` for adapters that vLLM does not take."""
    if spec.bundle.adapters and spec.mode is not Mode.COMPLETION:
        raise BadRequest(f"vllm applies LoRA adapters to completions only, not to {spec.mode}", param="lora")
    for adapter in spec.bundle.adapters:
        _rank(adapter)


def _rank(adapter: Adapter) -> int:
    """Returns the smallest rank of vLLM's list that is large enough."""
    rank = _config(adapter)["r"]
    enough = next((known for known in _RANKS if known >= rank), None)
    if enough is None:
        raise BadRequest(
            f"the LoRA adapter {adapter.name} has the rank {rank}; vLLM takes at most {_RANKS[-1]}", param="lora"
        )
    return enough


def _scaled(adapter: Adapter, folder: Path) -> Path:
    """Returns the folder of the adapter. If its scale is not 1, it is a copy whose `lora_alpha` is multiplied by the
    scale; vLLM divides `lora_alpha` by the rank (vllm/lora/peft_helper.py)."""
    if adapter.scale == 1:
        return adapter.path
    config = dict(_config(adapter))
    copy = folder / f"lora-{adapter.name}"
    copy.mkdir(mode=0o700)
    (copy / _CONFIG).write_text(json.dumps(config | {"lora_alpha": config["lora_alpha"] * adapter.scale}))
    os.symlink(adapter.path.absolute() / _WEIGHTS, copy / _WEIGHTS)
    return copy


def _config(adapter: Adapter) -> Mapping[str, Any]:
    try:
        config = json.loads((adapter.path / _CONFIG).read_bytes())
        numbers = [config[key] for key in ("r", "lora_alpha")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadRequest(f"the LoRA adapter {adapter.path} cannot be read: {error!r}", param="lora") from None
    if not all(isinstance(number, int | float) for number in numbers):
        raise BadRequest(f"`r` and `lora_alpha` of {adapter.path / _CONFIG} are not both numbers", param="lora")
    return dict(config)
