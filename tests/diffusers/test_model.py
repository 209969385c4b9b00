"""The files of a diffusion model."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from modelrunner.sdk import InvalidModel
from modelrunner_diffusers.model import FORMAT, read

INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "safety_checker": [None, None],
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
UNET = {"sample_size": 64, "block_out_channels": [320, 640], "layers_per_block": 2}
_HEADER = json.dumps({"a": {"dtype": "F16", "shape": [2, 5], "data_offsets": [0, 20]}}).encode()
WEIGHTS = struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(20)


def model(folder: Path, changed: dict[str, Any]) -> dict[str, Path]:
    files: dict[str, Any] = {
        "model_index.json": INDEX,
        "scheduler/scheduler_config.json": {},
        "text_encoder/config.json": {},
        "text_encoder/model.safetensors": WEIGHTS,
        "tokenizer/vocab.json": {},
        "unet/config.json": UNET,
        "unet/diffusion_pytorch_model.safetensors": WEIGHTS,
        "vae/config.json": {"block_out_channels": [128, 256, 512, 512]},
        "vae/diffusion_pytorch_model.safetensors": WEIGHTS,
    } | changed
    paths = {name: folder / name for name, content in files.items() if content is not None}
    for name, path in paths.items():
        path.parent.mkdir(exist_ok=True)
        content = files[name]
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return paths


def test_what_is_read(tmp_path: Path) -> None:
    reading = read(model(tmp_path, {}))
    assert reading.capabilities == {"image-generation"}
    assert (reading.parameters, reading.quantization) == (30, "F16")
    assert (reading.metadata["side"], reading.metadata["scale"]) == (512, 8)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model_index.json": INDEX | {"_class_name": "FluxPipeline"}}, "its pipeline is 'FluxPipeline'"),
        ({"model_index.json": INDEX | {"unet": ["os", "system"]}}, "is of 'os', which is code of somebody else"),
        ({"model_index.json": INDEX | {"vae": ["diffusers", "VQModel"]}}, "its vae is of the kind 'VQModel'"),
        ({"model_index.json": INDEX | {"vae": [None, None]}}, "names no vae"),
        ({"model_index.json": []}, "is not a JSON object"),
        ({"unet/diffusion_pytorch_model.safetensors": None}, "its part unet has no weights in safetensors"),
        ({"unet/diffusion_pytorch_model.safetensors": WEIGHTS[:-1]}, "is cut"),
        ({"unet/diffusion_pytorch_model.safetensors": b"PK"}, "is no file in safetensors"),
        ({"unet/config.json": None}, "unet/config.json is missing"),
        ({"unet/config.json": UNET | {"sample_size": 10**9}}, "no sample_size from 1 to"),
        ({"unet/config.json": UNET | {"block_out_channels": [10**9]}}, "impossible block_out_channels"),
        ({"tokenizer/vocab.json": None}, "its part tokenizer has no files"),
    ],
)
def test_other_files_are_refused_with_the_reason(tmp_path: Path, changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidModel, match=reason):
        read(model(tmp_path, changed))


def test_the_files_of_a_model_are_chosen_from_others(tmp_path: Path) -> None:
    own = sorted(model(tmp_path, {}))
    others = ["README.md", "v1-5.safetensors", "unet/diffusion_pytorch_model.fp16.safetensors", "unet/model.bin"]
    others += [
        "../config.json",
        "unet/../config.json",
        "/etc/config.json",
        "unet/deeper/config.json",
        "a.b/config.json",
    ]
    chosen = FORMAT.chosen([*others, *own])
    assert (chosen[0], sorted(chosen)) == ("model_index.json", own)
    assert not any(map(FORMAT.has, others))
