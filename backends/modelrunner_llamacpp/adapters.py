"""LoRA adapters: GGUF files that the daemon's operator put in one folder (`adapters` of the settings). A model's
configuration names them, and can name no other file on this machine."""

from collections.abc import Iterable
from pathlib import Path

from modelrunner.sdk import BadRequest

_MAGIC = b"GGUF"


def find_adapters(root: Path | None, names: Iterable[str]) -> tuple[Path, ...]:
    """Returns the adapters' files. Raises `BadRequest` for a missing file, and for one that is no GGUF file."""
    return tuple(_adapter(root, name) for name in names)


def _adapter(root: Path | None, name: str) -> Path:
    if root is None:
        raise _bad('lora-adapters need `adapters`, a folder of them, in [backends."llama.cpp"] of the configuration')
    file = root.expanduser().absolute() / f"{name}.gguf"
    if "," in str(file):
        raise _bad(f"the folder {root} has a comma in its path, which llama.cpp takes for the end of it: rename it")
    try:
        with open(file, "rb") as opened:
            is_gguf = opened.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise _bad(f"there is no LoRA adapter {name!r} in {root}: {file}: {error.strerror}") from None
    if not is_gguf:
        raise _bad(f"the LoRA adapter {file} is no GGUF file: convert it with llama.cpp's convert_lora_to_gguf.py")
    return file


def _bad(message: str) -> BadRequest:
    return BadRequest(message, param="llamacpp.lora-adapters")
