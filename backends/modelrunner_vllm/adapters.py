"""LoRA adapters: folders that the daemon's operator put in one place (`adapters` of the settings). A request can name
one of them, and no other file on this machine."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from modelrunner.sdk import BadRequest

_WEIGHTS = "adapter_model.safetensors"
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank takes


@dataclass(frozen=True, slots=True)
class Adapter:
    """`rank` is the smallest rank of vLLM's list that is large enough; `size` is bytes of the weights."""

    name: str
    folder: Path
    rank: int
    size: int


def find_adapters(root: Path | None, names: Iterable[str]) -> tuple[Adapter, ...]:
    """Returns the adapters of these names. Raises `BadRequest` for a missing one, and for one that is no adapter in
    safetensors."""
    return tuple(_adapter(root, name) for name in names)


def _adapter(root: Path | None, name: str) -> Adapter:
    if root is None:
        raise _bad("lora-adapters need `adapters`, a folder of them, in [backends.vllm] of the configuration")
    folder = root.expanduser() / name
    try:
        rank = int(json.loads((folder / "adapter_config.json").read_bytes())["r"])
        size = (folder / _WEIGHTS).stat().st_size
    except FileNotFoundError:
        raise _bad(
            f"there is no LoRA adapter {name!r} in {root}: a folder with adapter_config.json and {_WEIGHTS}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        raise _bad(f"the LoRA adapter {name!r} cannot be read: its adapter_config.json has no rank `r`") from None
    enough = next((known for known in _RANKS if known >= rank), None)
    if enough is None or rank < 1:
        raise _bad(f"the LoRA adapter {name!r} has the rank {rank}; vLLM takes 1 to {_RANKS[-1]}")
    return Adapter(name, folder, enough, size)


def _bad(message: str) -> BadRequest:
    return BadRequest(message, param="vllm.lora-adapters")
