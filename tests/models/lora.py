"""LoRA adapters of random weights that are the same every time: they change what a model says to nonsense, or, with the
scale 0, nothing at all."""

import json
from pathlib import Path

import gguf
import numpy as np

from tests.models import safetensors

_RANK = 4
_MODULES = ("q_proj", "v_proj", "o_proj")


def write_peft(folder: Path, model: Path, scale: float) -> Path:
    """Writes a folder as PEFT does. `folder` is made; `model` is a Llama's folder. `scale` is the deviation of the
    second matrices' values, of which PEFT itself starts with 0."""
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


def write_gguf(
    file: Path, width: int = 576, *, architecture: str = "llama", tensor: str = "blk.0.attn_q.weight"
) -> Path:
    """Writes an adapter of rank 2, as llama.cpp's convert_lora_to_gguf.py does, for one square `tensor` of this width.
    SmolLM2's is 576."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0)
    numbers = np.random.default_rng(7)
    for half, shape in (("lora_a", (2, width)), ("lora_b", (width, 2))):
        writer.add_tensor(f"{tensor}.{half}", numbers.normal(0, 5, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
