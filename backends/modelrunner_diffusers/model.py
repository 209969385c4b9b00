"""Reads a diffusion model as diffusers keeps it: `model_index.json`, which names the parts, and a folder for each
part with its configuration and its weights in safetensors (huggingface/diffusers,
src/diffusers/pipelines/pipeline_utils.py).
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelrunner.sdk import FileFormat, FormatReading, InvalidModel, ModelFormat, read_object

DIFFUSERS = ModelFormat("diffusers")
_INDEX = "model_index.json"
_PIPELINES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "LatentConsistencyModelPipeline")
_LIBRARIES = ("diffusers", "transformers", "stable_diffusion")
"""Where the classes of the parts may come from. The last one is diffusers' own name for its check of pictures."""
_KINDS = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL"}
"""The parts whose activations are estimated (memory.py)."""
_NEEDED = ("unet", "vae", "text_encoder", "tokenizer", "scheduler")
_WEIGHTLESS = ("tokenizer", "scheduler", "feature_extractor")
_LONGEST = 1 << 20
"""Bytes of a configuration."""
_LONGEST_HEADER = 32 << 20
_MOST_CHANNELS, _MOST_LEVELS, _LARGEST_SAMPLE = 1 << 14, 8, 1024


def read(files: Mapping[str, Path]) -> FormatReading:
    """Reads the descriptions, and the headers of the weights. Raises `InvalidModel` for files that make no model that
    draws from a text."""
    index = _config(files, _INDEX)
    pipeline = index.get("_class_name")
    if pipeline not in _PIPELINES:
        raise InvalidModel(f"its pipeline is {str(pipeline)[:60]!r}; {', '.join(_PIPELINES)} are known")
    parts = _parts(index)
    for name in parts:
        present = {file.partition("/")[2] for file in files if file.startswith(f"{name}/")}
        has_weights = any(file.endswith(".safetensors") for file in present)
        if not present or (not has_weights and not name.startswith(_WEIGHTLESS)):
            raise InvalidModel(f"its part {name} has no {'weights in safetensors' if present else 'files'}")
    unet, vae = (_config(files, f"{name}/config.json") for name in _KINDS)
    scale = 1 << (len(_channels(vae, "vae")) - 1)
    sample = unet.get("sample_size")
    if type(sample) is not int or not 0 < sample <= _LARGEST_SAMPLE:
        raise InvalidModel(f"unet/config.json names no sample_size from 1 to {_LARGEST_SAMPLE}")
    counts: dict[str, int] = {}
    for name, file in files.items():
        if name.endswith(".safetensors"):
            _count(file, name, counts)
    total = sum(counts.values())
    return FormatReading(
        {
            "general.architecture": pipeline,
            "parameters": total,
            "side": sample * scale,
            "scale": scale,
            "unet_channels": _channels(unet, "unet"),
            "unet_layers": _number(unet, "layers_per_block"),
            "vae_channels": _channels(vae, "vae"),
        },
        frozenset({"image-generation"}),
        parameters=total,
        quantization=max(counts, key=lambda kind: counts[kind]),
    )


def _parts(index: Mapping[str, Any]) -> list[str]:
    """Returns the names of the parts that the model has. Raises `InvalidModel` for one of a foreign library: the engine
    would import it."""
    parts = []
    for name, value in index.items():
        match value:
            case [None, None]:
                continue
            case [str(library), str(kind)]:
                if library not in _LIBRARIES:
                    raise InvalidModel(f"its part {name[:60]} is of {library[:60]!r}, which is code of somebody else")
                if kind != _KINDS.get(name, kind):
                    raise InvalidModel(f"its {name} is of the kind {kind[:60]!r}; {_KINDS[name]} is known")
                parts.append(name)
    if missing := [name for name in _NEEDED if name not in parts]:
        raise InvalidModel(f"{_INDEX} names no {missing[0]}")
    return parts


def _channels(config: Mapping[str, Any], name: str) -> list[int]:
    channels = config.get("block_out_channels")
    if not isinstance(channels, list) or not 0 < len(channels) <= _MOST_LEVELS:
        raise InvalidModel(f"{name}/config.json has no list of block_out_channels")
    if not all(type(each) is int and 0 < each <= _MOST_CHANNELS for each in channels):
        raise InvalidModel(f"{name}/config.json has impossible block_out_channels")
    return channels


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if type(value) is int and 0 < value <= 64 else 2


def _count(file: Path, name: str, counts: dict[str, int]) -> None:
    """Adds the weights of a file by their types. Raises `InvalidModel`, also for a cut file
    (https://huggingface.co/docs/safetensors, "Format")."""
    with file.open("rb") as opened:
        start, size = opened.read(8), file.stat().st_size
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(_LONGEST_HEADER, size - 8):
            raise InvalidModel(f"{name} is no file in safetensors")
        try:
            header: Any = json.loads(opened.read(length))
            for key, tensor in header.items():
                if key != "__metadata__":
                    kind, count = tensor["dtype"], math.prod(map(int, tensor["shape"]))
                    counts[kind] = counts.get(kind, 0) + count
                    if count < 0 or 8 + length + tensor["data_offsets"][1] > size:
                        raise InvalidModel(f"{name} is cut: it ends in {key[:80]!r}")
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            raise InvalidModel(f"{name} is no file in safetensors") from None


def _config(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    if name not in files:
        raise InvalidModel(f"{name} is missing beside {_INDEX}")
    return read_object(files[name], _LONGEST, name)


_NAMES = ("model", "diffusion_pytorch_model")
FORMAT = FileFormat(
    DIFFUSERS,
    _INDEX,
    read,
    (
        *("*/config.json", "*/*_config.json", "*/model.safetensors.index.json", "*/*_model.safetensors.index.json"),
        *(f"*/{name}.safetensors" for name in _NAMES),
        *(f"*/{name}-?????-of-?????.safetensors" for name in _NAMES),
        *("*/vocab.json", "*/merges.txt", "*/tokenizer.json", "*/special_tokens_map.json"),
    ),
)
"""The weights of a part in another precision (`*.fp16.safetensors`) are left out: the processor computes in 32 bits."""
