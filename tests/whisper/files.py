"""Files of a Whisper model in CTranslate2's format, as small as can be. No engine can run it."""

import struct
from collections.abc import Mapping, Sequence

FLOAT16 = 4
_BYTES = {1: 1, FLOAT16: 2}
WIDTH, VOCABULARY = 4, 51865
SHAPES: Mapping[str, Sequence[int]] = {
    "decoder/embeddings/weight": (VOCABULARY, WIDTH),
    "encoder/conv1/weight": (WIDTH, 80, 3),
    "decoder/layer_0/self_attention/layer_norm/gamma": (WIDTH,),
    "decoder/layer_1/self_attention/layer_norm/gamma": (WIDTH,),
}


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def weights(
    shapes: Mapping[str, Sequence[int]] = SHAPES, *, specification: str = "WhisperSpec", version: int = 6
) -> bytes:
    """A `model.bin`."""
    data = struct.pack("<I", version) + text(specification) + struct.pack("<II", 3, len(shapes))
    for name, shape in shapes.items():
        count = 1
        for length in shape:
            count *= length
        size = count * _BYTES[FLOAT16]
        data += text(name) + struct.pack(f"<B{len(shape)}IBI", len(shape), *shape, FLOAT16, size) + bytes(size)
    return data + struct.pack("<I", 0)


def model() -> dict[str, bytes]:
    return {
        "model.bin": weights(),
        "config.json": b'{"lang_ids": [1]}',
        "tokenizer.json": b"{}",
        "vocabulary.txt": b"a\nb\n",
    }
