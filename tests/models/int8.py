"""A Llama in safetensors with weights of 8 bits, one scale for each row, and activations quantized as they come: the
format "int-quantized" of compressed-tensors (W8A8), which vLLM computes on GPUs and on the CPU."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tests.models import safetensors

_EIGHT_BITS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
_QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _EIGHT_BITS | {"strategy": "channel", "dynamic": False},
            "input_activations": _EIGHT_BITS | {"strategy": "token", "dynamic": True},
        }
    },
}


def convert(model: Path, folder: Path) -> Path:
    """Writes the Llama in the folder `model` to the new folder `folder`."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "header", "config.json"))
    tensors: dict[str, np.ndarray] = {}
    for name, array in safetensors.read(model / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = array
            continue
        scale = np.abs(array).max(axis=1, keepdims=True) / 127
        tensors[name] = np.round(array / scale).astype(np.int8)
        tensors[f"{name}_scale"] = scale
    safetensors.write(folder / "model.safetensors", tensors, "BF16")
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": _QUANTIZATION}))
    return folder
