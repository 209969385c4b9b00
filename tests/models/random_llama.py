"""A Llama of random weights in GGUF, a few hundred kilobytes: every letter of ASCII is a token, its chat template takes
the parts of a message, and what it says means nothing. The weights are the same every time."""

from pathlib import Path

import gguf
import numpy as np

WIDTH = 64
_INNER, _LAYERS, _HEADS, _CONTEXT = 128, 2, 2, 4096
_TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""


def write(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("random")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(_INNER)
    writer.add_block_count(_LAYERS)
    writer.add_head_count(_HEADS)
    writer.add_rope_dimension_count(WIDTH // _HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    words = _add_vocabulary(writer)
    random = np.random.default_rng(1)
    for name, shape in _shapes(len(words)).items():
        matrix = random.normal(0, 0.3, shape).astype(np.float16)
        writer.add_tensor(name, matrix if len(shape) > 1 else np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter) -> list[str]:
    """A byte that cannot be printed has a character of its own, as in GPT-2. Without those beyond ASCII, whatever the
    model says is a text."""
    hidden = (*range(0x21), 0x7F)
    letters = [chr(256 + hidden.index(byte)) if byte in hidden else chr(byte) for byte in range(128)]
    words = [*letters, "th", "<|im_start|>", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(words) - 2) + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(["t h"])  # llama.cpp wants one at least
    writer.add_bos_token_id(len(words) - 2)
    writer.add_eos_token_id(len(words) - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_TEMPLATE)
    return words


def _shapes(words: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (words, WIDTH),
        "output_norm.weight": (WIDTH,),
        "output.weight": (words, WIDTH),
    }
    for number in range(_LAYERS):
        block = f"blk.{number}"
        shapes |= {f"{block}.{norm}.weight": (WIDTH,) for norm in ("attn_norm", "ffn_norm")}
        shapes |= {f"{block}.attn_{part}.weight": (WIDTH, WIDTH) for part in ("q", "k", "v", "output")}
        shapes |= {f"{block}.ffn_{part}.weight": (_INNER, WIDTH) for part in ("gate", "up")}
        shapes[f"{block}.ffn_down.weight"] = (WIDTH, _INNER)
    return shapes
