"""Headers of real models, as their files have them, without the files."""

from pathlib import Path

from modelrunner.types import Bundle, Mode, ModelFormat, ModelHeader, RunSpec, Tensor

SMOLLM2 = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.vocab_size": 49152,
    "llama.rope.dimension_count": 64,
}
GEMMA3 = {
    "general.architecture": "gemma3",
    "gemma3.block_count": 18,
    "gemma3.context_length": 32768,
    "gemma3.embedding_length": 640,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.attention.sliding_window": 512,
    "tokenizer.ggml.tokens.length": 262144,
}
MINILM = {
    "general.architecture": "bert",
    "bert.block_count": 6,
    "bert.context_length": 512,
    "bert.embedding_length": 384,
    "bert.feed_forward_length": 1536,
    "bert.attention.head_count": 12,
    "bert.attention.causal": False,
    "bert.pooling_type": 1,
    "tokenizer.ggml.tokens.length": 30522,
}
GLM = {  # three layers, and one that predicts a further token
    "general.architecture": "glm4moe",
    "glm4moe.block_count": 4,
    "glm4moe.nextn_predict_layers": 1,
    "glm4moe.context_length": 8192,
    "glm4moe.embedding_length": 1024,
    "glm4moe.attention.head_count": 8,
    "glm4moe.attention.head_count_kv": 1,
    "glm4moe.vocab_size": 1000,
}
QWEN = {  # three recurrent layers, one with attention, and one that predicts a further token
    "general.architecture": "qwen35",
    "qwen35.block_count": 5,
    "qwen35.nextn_predict_layers": 1,
    "qwen35.full_attention_interval": 4,
    "qwen35.context_length": 8192,
    "qwen35.embedding_length": 1024,
    "qwen35.attention.head_count": 8,
    "qwen35.attention.head_count_kv": 1,
    "qwen35.ssm.inner_size": 256,
    "qwen35.ssm.state_size": 128,
    "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.group_count": 2,
    "qwen35.vocab_size": 1000,
}
EAGLE = {  # a head for a model of the width 576
    "general.architecture": "eagle3",
    "eagle3.block_count": 1,
    "eagle3.target_hidden_size": 576,
    "eagle3.context_length": 8192,
    "eagle3.embedding_length": 576,
    "eagle3.attention.head_count": 9,
    "eagle3.attention.head_count_kv": 3,
    "eagle3.vocab_size": 1000,
}
SIZES = {"llama": 98_362_432, "gemma3": 253_113_024, "bert": 46_000_000} | dict.fromkeys(
    ("glm4moe", "qwen35", "eagle3", "exaone-moe"), 1 << 20
)


JOINS = "blk.3.nextn.eh_proj.weight"  # what GLM's last layer begins with


def header(metadata: dict[str, object], tensors: tuple[str, ...] = ()) -> ModelHeader:
    return ModelHeader(metadata, tuple(Tensor(name, (1,), "F32", 4) for name in tensors))


def bundle(metadata: dict[str, object], folder: Path = Path("/models"), **files: Path) -> Bundle:
    """A bundle of one model file, and of `mmproj` if given."""
    architecture = str(metadata["general.architecture"])
    return Bundle(
        model_id="sha256:" + "a" * 64,
        references=("docker.io/ai/model:latest",),
        format=ModelFormat.GGUF,
        directory=folder,
        files={"model.gguf": folder / "model.gguf"} | {f"{name}.gguf": path for name, path in files.items()},
        header=header(metadata),
        size=SIZES[architecture],
        context_length=None,
        capabilities=frozenset({"completion"}),
    )


def spec(
    model: Bundle, *flags: str, mode: Mode = Mode.COMPLETION, context: int = 2048, parallel: int = 4, **rest: object
) -> RunSpec:
    return RunSpec(model.model_id, model, mode, context, parallel, flags, **rest)  # type: ignore[arg-type]
