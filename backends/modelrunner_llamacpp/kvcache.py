"""The sizes of llama.cpp's KV cache and recurrent states, from a model's header and the options of a run. Pure.

Sources: llama-kv-cache.cpp, llama-kv-cache-iswa.cpp, llama-kv-cache-dsa.cpp, llama-memory-recurrent.cpp,
llama-hparams.cpp and llama-context.cpp of llama.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from modelrunner_llamacpp.hparams import Header

_CELL_PAD = 256
DEFAULT_BATCH, DEFAULT_UBATCH = 2048, 512
# The bytes of one element, also of block formats (ggml.c: type_size / block size).
_TYPE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_0": 22 / 32, "q5_1": 24 / 32,
               "q4_0": 18 / 32, "q4_1": 20 / 32, "iq4_nl": 18 / 32}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """The options of a run that decide its memory. There are `parallel` sequences of `context` tokens, each with a
    cache of its own. `ubatch` is the number of tokens of one computation. Without `flash` attention values lie
    transposed, and all layers are as wide as the widest. A recurrent state is there once more for each of `rollback`
    tokens that may be taken back."""

    context: int
    parallel: int
    ubatch: int = DEFAULT_UBATCH
    type_k: str = "f16"
    type_v: str = "f16"
    swa_full: bool = False
    flash: bool = True
    rollback: int = 0

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "Shape":
        parallel = int(options["--parallel"])
        context = -(-int(options["--ctx-size"]) // parallel)
        batch = int(options.get("--batch-size", DEFAULT_BATCH))
        return cls(
            context=context,
            parallel=parallel,
            ubatch=min(int(options.get("--ubatch-size", DEFAULT_UBATCH)), batch, context * parallel),
            type_k=options.get("--cache-type-k", "f16"),
            type_v=options.get("--cache-type-v", "f16"),
            swa_full=options.get("--swa-full") == "on",
            flash=options.get("--flash-attn") != "off",
        )


def kv_cache(header: Header, shape: Shape) -> int:
    """Returns the bytes of all layers together."""
    return sum(by_layer(header, shape).values())


def by_layer(header: Header, shape: Shape) -> dict[int, int]:
    """Returns the bytes of each layer that has an attention cache or a recurrent state."""
    if not header.has_cache:
        return {}
    sizes = {layer: _attention_bytes(header, shape, layer) for layer in sorted(header.attention())}
    for layer in header.recurrent():
        sizes[layer] = sizes.get(layer, 0) + shape.parallel * (1 + shape.rollback) * _state_bytes(header)
    return sizes


def of_heads(header: Header, shape: Shape) -> int:
    """Returns the bytes of the cache of the layers that predict further tokens: a plain one of their own (create_memory
    of llama-model.cpp with LLAMA_CONTEXT_TYPE_MTP)."""
    return sum(_attention_bytes(header, shape, layer) for layer in header.heads)


def checkpoints(header: Header, shape: Shape, count: int) -> int:
    """Returns the bytes of `count` checkpoints for each sequence. A checkpoint copies the parts of a sequence that
    cannot be rolled back: the tokens in its sliding layers, and its recurrent states."""
    if not header.has_cache:
        return 0
    cells = shape.parallel * min(shape.context, header.window + shape.ubatch)
    sliding = [i for i in header.attention() if header.slides(i) and not shape.swa_full]
    copied = cells * sum(_cell_bytes(header, shape, i) for i in sliding)
    return count * int(copied + len(header.recurrent()) * shape.parallel * _state_bytes(header))


def _attention_bytes(header: Header, shape: Shape, layer: int) -> int:
    """Returns the bytes of all cells of one layer, and of the index where attention is sparse."""
    cells = _cells(header, shape, layer)
    return int(cells * _cell_bytes(header, shape, layer) + _full(shape) * _index_bytes(header, shape, layer))


def _index_bytes(header: Header, shape: Shape, layer: int) -> float:
    """Returns the bytes that one token adds to an indexer (DSA): a key; where keys are pooled, also its gate and the
    pooled key; for MiniMax-M3 also values, though nothing reads them."""
    if header.slides(layer) or not header.integer("attention.indexer.types", 1, layer):
        return 0.0
    keys = header.integer("attention.indexer.key_length") * (3 if header.integer("attention.indexer.kpool") else 1)
    values = header.integer("attention.value_length", keys) if header.architecture == "minimax-m3" else 0
    return keys * _TYPE_BYTES[shape.type_k] + values * _TYPE_BYTES[shape.type_v]


def _cells(header: Header, shape: Shape, layer: int) -> int:
    if shape.swa_full or not header.slides(layer):
        return _full(shape)
    return min(_full(shape), _padded(header.window + shape.ubatch) * shape.parallel)


def _full(shape: Shape) -> int:
    """Returns the cells for the whole context of all sequences."""
    return _padded(shape.context) * shape.parallel


def _padded(cells: int) -> int:
    return -(-cells // _CELL_PAD) * _CELL_PAD


def _cell_bytes(header: Header, shape: Shape, layer: int) -> float:
    """Returns the bytes of one token's keys and values in one layer. Multi-head latent attention (DeepSeek) has only
    keys, which are compressed and hold the values."""
    latent = header.integer("attention.key_length_mla") and header.integer("attention.value_length_mla")
    layers = [layer] if shape.flash else range(header.layers)
    values = 0 if latent else max((_width(header, "value", i) for i in layers), default=0)
    return _width(header, "key", layer) * _TYPE_BYTES[shape.type_k] + values * _TYPE_BYTES[shape.type_v]


def _width(header: Header, what: str, layer: int) -> int:
    """Returns the number of elements of one token's keys or values."""
    heads = header.integer("attention.head_count", 1, layer)
    kv_heads = header.integer("attention.head_count_kv", heads, layer)
    length = header.integer(
        f"attention.{what}_length", header.embedding // (header.integer("attention.head_count") or 1)
    )
    if header.slides(layer):
        length = header.integer(f"attention.{what}_length_swa", length)
    return kv_heads * length


def _state_bytes(header: Header) -> int:
    """Returns the bytes of one sequence's state in one recurrent layer, in 32-bit floats (n_embd_r and n_embd_s of
    llama-hparams.cpp)."""
    heads, kernel = header.integer("attention.head_count"), max(header.integer("ssm.conv_kernel") - 1, 0)
    if head := header.integer("wkv.head_size"):  # RWKV
        return header.embedding * (head + header.integer("token_shift_count", 2)) * 4
    if length := header.integer("shortconv.l_cache"):  # LFM2
        return header.embedding * (length - 1) * 4
    if head := header.integer("kda.head_dim"):  # Kimi's delta attention
        return (3 * (kernel or 3) * heads * head + heads * head * head) * 4
    state, inner = header.integer("ssm.state_size"), header.integer("ssm.inner_size")
    if not inner:  # lightning attention (MiniMax-01)
        return heads * header.integer("attention.key_length", header.embedding // (heads or 1)) ** 2 * 4
    return (kernel * (inner + 2 * header.integer("ssm.group_count") * state) + state * inner) * 4
