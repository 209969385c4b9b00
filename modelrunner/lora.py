"""The syntax of LoRA adapters, `PATH[:SCALE]`, and the names of adapters among the files of a model.

An adapter of a GGUF model is a GGUF file; an adapter of a safetensors model is a folder as PEFT writes it. Among the
files of a model the first is `lora-NAME.gguf`, the second has its two files in the folder `lora-NAME/`. A scale other
than 1 follows the name: `lora-NAME@0.5.gguf`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from modelrunner.errors import BadRequest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST = 16  # adapters of one model
_LARGEST_SCALE = 1000.0
_SCALE = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e-?[0-9]+)?", re.ASCII)
_STEM = re.compile(r"lora-([A-Za-z0-9][A-Za-z0-9_.-]{0,63})(?:@(-?[0-9.]{1,12}(?:e-[0-9]{1,3})?))?")
_LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class LoraPath:
    """An adapter on this machine. Its weights count `scale` times."""

    path: Path
    scale: float = 1.0

    @property
    def name(self) -> str:
        """Returns the name of the file or folder, in characters that every file system and every engine accepts."""
        stem = self.path.name.removesuffix(".gguf")
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-._")[:_LONGEST_NAME] or "adapter"

    def files(self, *, folder: bool) -> dict[str, Path]:
        """Returns the adapter's files, by their names among the files of a model. `folder` is True for an adapter of a
        safetensors model."""
        stem = f"lora-{self.name}" if self.scale == 1 else f"lora-{self.name}@{self.scale:g}"
        if not folder:
            return {f"{stem}.gguf": self.path}
        return {f"{stem}/{name}": self.path / name for name in (CONFIG, WEIGHTS)}


def parse(texts: Iterable[str]) -> tuple[LoraPath, ...]:
    """Reads `PATH[:SCALE]` of each adapter of a model. Raises `BadRequest` for a path that is not absolute, a scale
    beyond ±1000, two adapters of one name, and more than 16 of them."""
    paths = []
    for text in texts:
        path, scale = split(text)
        if not path.startswith(("/", "~/")) or "\0" in path:
            raise BadRequest(f"lora takes absolute paths, PATH or PATH:SCALE, not {text!r}", param="lora")
        paths.append(LoraPath(Path(path).expanduser(), scale))
    check(paths)
    return tuple(paths)


def check(adapters: Iterable[LoraPath]) -> None:
    """Raises `BadRequest` for two adapters of one name, and for more than 16."""
    names = [adapter.name.casefold() for adapter in adapters]
    if len(names) > MOST:
        raise BadRequest(f"a model has at most {MOST} LoRA adapters, not {len(names)}", param="lora")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadRequest(f"two LoRA adapters have the name {twice}: rename the file of one of them", param="lora")


def split(text: str) -> tuple[str, float]:
    """Splits `PLACE[:SCALE]`; the text after the last colon is part of the place unless it is a number. The scale has
    six significant digits. Raises `BadRequest` for a scale beyond ±1000."""
    place, colon, number = text.rpartition(":")
    if not colon or not _SCALE.fullmatch(number):
        return text, 1.0
    if abs(scale := float(number)) > _LARGEST_SCALE:
        raise BadRequest(f"the scale of a LoRA adapter must be between -1000 and 1000, not {number}", param="lora")
    return place, float(f"{scale:g}")


def name_and_scale(name: str) -> tuple[str, float] | None:
    """Returns the adapter to which the file `name` of a model belongs, and its scale; None for a file of the model
    itself."""
    stem, slash, file = name.partition("/")
    if slash and file not in (CONFIG, WEIGHTS):
        return None
    if not slash and not name.endswith(".gguf"):
        return None
    match = _STEM.fullmatch(stem if slash else name.removesuffix(".gguf"))
    try:
        return (match[1], float(match[2] or 1)) if match else None
    except ValueError:
        return None
