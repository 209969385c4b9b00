"""A LoRA adapter as PEFT writes it (adapter_config.json and adapter_model.safetensors), of random weights that are the
same every time: it changes what a model says to nonsense, or, with the scale 0, nothing at all."""

import json
from pathlib import Path

import numpy as np

from tests.models import safetensors

_RANK = 4
_MODULES = ("q_proj", "v_proj", "o_proj")


def write(folder: Path, model: Path, scale: float) -> Path:
    """`folder` is made; `model` is a Llama's folder. `scale` is the deviation of the second matrices' values, of which
    PEFT itself starts with 0."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(1)
    tensors = {}
    for name, matrix in safetensors.read(model / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.endswith(_MODULES):
            rows, columns = matrix.shape
            prefix = f"base_model.model.{stem}"
            tensors[f"{prefix}.lora_A.weight"] = random.normal(0, 1 / np.sqrt(columns), (_RANK, columns))
            tensors[f"{prefix}.lora_B.weight"] = random.normal(0, 1, (rows, _RANK)) * scale
    safetensors.write(folder / "adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": _RANK, "lora_alpha": _RANK, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": list(_MODULES)}))
    return folder
