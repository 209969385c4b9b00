"""Headers of real models, as the store reads them from config.json and the safetensors, without the files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelrunner.types import Bundle, Mode, ModelFormat, ModelHeader, RunSpec, Tensor

SMOLLM2: dict[str, Any] = {
    "general.architecture": "LlamaForCausalLM",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
}
MINILM: dict[str, Any] = {
    "general.architecture": "BertModel",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "vocab_size": 30522,
}
SMOLLM2_ELEMENTS, MINILM_ELEMENTS = 134_515_008, 22_713_216


def bundle(
    metadata: Mapping[str, Any] = SMOLLM2,
    *tensors: Tensor,
    folder: Path = Path("/models/smol"),
    files: tuple[str, ...] = ("config.json",),
    references: tuple[str, ...] = ("docker.io/ai/smol:latest",),
) -> Bundle:
    tensors = tensors or (Tensor("all", (SMOLLM2_ELEMENTS,), "BF16", 2 * SMOLLM2_ELEMENTS),)
    return Bundle(
        model_id="sha256:" + "a" * 64,
        references=references,
        format=ModelFormat.SAFETENSORS,
        directory=folder,
        files={name: folder / name for name in files},
        header=ModelHeader(metadata, tensors),
        size=sum(tensor.size for tensor in tensors),
        context_length=metadata.get("max_position_embeddings"),
        capabilities=frozenset({"completion"}),
    )


def spec(
    model: Bundle | None = None,
    *flags: str,
    mode: Mode = Mode.COMPLETION,
    context: int = 2048,
    parallel: int = 4,
    **rest: Any,
) -> RunSpec:
    model = model or bundle()
    return RunSpec(model.model_id, model, mode, context, parallel, flags, **rest)
