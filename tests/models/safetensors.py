"""Reads and writes safetensors files as numpy arrays, apart from the daemon's own parser, which it checks."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

_NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64, "I8": np.int8}


def read(path: Path) -> dict[str, np.ndarray]:
    """All tensors; those of the type BF16 as float32."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        first, last = (8 + length + offset for offset in entry["data_offsets"])
        array = np.frombuffer(data[first:last], _NUMPY[entry["dtype"]]).reshape(entry["shape"])
        found[name] = widened(array) if entry["dtype"] == "BF16" else array
    return found


def write(path: Path, tensors: Mapping[str, np.ndarray], dtype: str = "F32") -> None:
    """All tensors in one type, F32, F16 or BF16, but for those of 8-bit integers, which stay what they are."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    pieces, offset = [], 0
    for name, array in sorted(tensors.items()):
        kind = "I8" if array.dtype == np.int8 else dtype
        data = (narrowed(array) if kind == "BF16" else array.astype(_NUMPY[kind])).tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [offset, offset + len(data)]}
        pieces.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(pieces))


def widened(array: np.ndarray) -> np.ndarray:
    """bfloat16, as 16-bit numbers, to float32, of which it is the upper half."""
    return (array.astype(np.uint32) << 16).view(np.float32)


def narrowed(array: np.ndarray) -> np.ndarray:
    """float32 to bfloat16, rounded to nearest even."""
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
