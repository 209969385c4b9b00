"""A model that calls one tool and then says one sentence, as a GGUF file for the real llama.cpp. It has SmolLM2's
vocabulary, so it counts tokens as a small model that people use does, and two words more: a whole call, and the
sentence. Its layer adds nothing, so what it says next depends on the last token alone, and the chat template ends a
prompt with one token before the call, and another before the sentence."""

import json
from pathlib import Path

import gguf
import numpy as np

from tests.models import random_llama
from tests.models.random_llama import Sizes

SENTENCE = "It is done as you asked."
_SIZES = Sizes(layers=1, context=131_072)
_TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}To call a tool, write <tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call><|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if calls and tools and messages[-1].role != "tool" %}{{ "\\n" }}{% endif %}{% endif -%}"""
_SAYS, _CALLS = "Ċ", "ĊĊ"  # the last token of a prompt: one line feed, or two


def write(path: Path, vocabulary: Path, call: tuple[str, dict[str, str]] | None) -> Path:
    """`vocabulary` is the file of SmolLM2; the model calls `call`, a tool's name and its arguments, in a conversation
    with tools whose last message is no result."""
    fields = gguf.GGUFReader(vocabulary).fields
    name, arguments = call or ("", {})
    called = f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    tokens = [*fields["tokenizer.ggml.tokens"].contents(), called, SENTENCE]
    own = [gguf.TokenType.USER_DEFINED] * 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(_SIZES.context)
    writer.add_embedding_length(_SIZES.width)
    writer.add_feed_forward_length(_SIZES.inner)
    writer.add_block_count(_SIZES.layers)
    writer.add_head_count(_SIZES.heads)
    writer.add_head_count_kv(_SIZES.kv_heads)
    writer.add_rope_dimension_count(_SIZES.width // _SIZES.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([*fields["tokenizer.ggml.token_type"].contents(), *own])
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(end := 2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{%- set calls = " + ("true" if call else "false") + " %}" + _TEMPLATE)
    tensors = {
        tensor: np.zeros(shape, np.float32) for tensor, shape in random_llama.shapes(len(tokens), _SIZES).items()
    }
    for norm in (tensor for tensor in tensors if "norm" in tensor):
        tensors[norm] += 1
    words = np.random.default_rng(1).normal(0, 1, tensors["token_embd.weight"].shape).astype(np.float32)
    tensors["token_embd.weight"] = words
    follows = {_SAYS: len(tokens) - 1, _CALLS: len(tokens) - 2, called: end, SENTENCE: end}
    for before, after in follows.items():
        tensors["output.weight"][after] += words[tokens.index(before)]
    for tensor, values in tensors.items():
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
