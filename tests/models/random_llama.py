"""A Llama of random weights in GGUF: every letter of ASCII is a token, its chat template takes the parts of a message,
and what it says means nothing. The weights are the same every time. By default it has a few hundred kilobytes; with
other `Sizes` it takes the memory and the time of a model that people use."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

WIDTH = 64
_TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
_BLOCK = 32  # weights of a Q4_0 block: two bytes of scale, then half a byte for each weight


@dataclass(frozen=True, slots=True)
class Sizes:
    """The figures of the model. `vocabulary` adds words that no text has; with `quantized`, matrices are Q4_0, else
    they are F16."""

    width: int = WIDTH
    inner: int = 128
    layers: int = 2
    heads: int = 2
    kv_heads: int = 2
    context: int = 4096
    vocabulary: int = 0
    quantized: bool = False


def write(path: Path, sizes: Sizes = Sizes()) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("random")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0 if sizes.quantized else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(sizes.context)
    writer.add_embedding_length(sizes.width)
    writer.add_feed_forward_length(sizes.inner)
    writer.add_block_count(sizes.layers)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_rope_dimension_count(sizes.width // sizes.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    words = add_vocabulary(writer, sizes.vocabulary)
    tensors = _tensors(shapes(len(words), sizes), sizes)
    for name, tensor in tensors:
        kind = gguf.GGMLQuantizationType.Q4_0 if tensor.dtype == np.uint8 else None
        writer.add_tensor_info(name, tensor.shape, tensor.dtype, tensor.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor in tensors:  # one at a time is in memory; as it is, numpy would write it element by element
        writer.write_tensor_data(np.ascontiguousarray(tensor))
    writer.close()
    return path


def _tensors(wanted: Mapping[str, tuple[int, ...]], sizes: Sizes) -> list[tuple[str, np.ndarray]]:
    random = np.random.default_rng(1)

    def made(shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return _blocks(shape) if sizes.quantized else random.normal(0, 0.3, shape).astype(np.float16)

    return [(name, made(shape)) for name, shape in wanted.items()]


def _blocks(shape: tuple[int, ...]) -> np.ndarray:
    """Returns one row of random blocks for every row of the matrix: random numbers for all would take minutes."""
    rows, columns = shape
    blocks = np.random.default_rng(columns).integers(0, 256, (columns // _BLOCK, 2 + _BLOCK // 2), np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return np.broadcast_to(blocks.reshape(1, -1), (rows, blocks.size))


def add_vocabulary(writer: gguf.GGUFWriter, wanted: int = 0) -> list[str]:
    """A byte that cannot be printed has a character of its own, as in GPT-2. Without those beyond ASCII, whatever the
    model says is a text."""
    hidden = (*range(0x21), 0x7F)
    letters = [chr(256 + hidden.index(byte)) if byte in hidden else chr(byte) for byte in range(128)]
    known = [*letters, "th", "<|im_start|>", "<|im_end|>"]
    words = [*known, *(f"<{number}>" for number in range(wanted - len(known)))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    types = [gguf.TokenType.NORMAL] * len(words)
    types[len(known) - 2 : len(known)] = [gguf.TokenType.CONTROL] * 2
    writer.add_token_types(types)
    writer.add_token_merges(["t h"])  # llama.cpp wants one at least
    writer.add_bos_token_id(len(known) - 2)
    writer.add_eos_token_id(len(known) - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_TEMPLATE)
    return words


def shapes(words: int, sizes: Sizes) -> Mapping[str, tuple[int, ...]]:
    width, inner, keys = sizes.width, sizes.inner, sizes.width // sizes.heads * sizes.kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (words, width),
        "output_norm.weight": (width,),
        "output.weight": (words, width),
    }
    for number in range(sizes.layers):
        block = f"blk.{number}"
        shapes |= {f"{block}.{norm}.weight": (width,) for norm in ("attn_norm", "ffn_norm")}
        shapes |= {f"{block}.attn_{part}.weight": (width, width) for part in ("q", "output")}
        shapes |= {f"{block}.attn_{part}.weight": (keys, width) for part in ("k", "v")}
        shapes |= {f"{block}.ffn_{part}.weight": (inner, width) for part in ("gate", "up")}
        shapes[f"{block}.ffn_down.weight"] = (width, inner)
    return shapes
