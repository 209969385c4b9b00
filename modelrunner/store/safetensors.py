"""Reads the header of a safetensors file (https://github.com/huggingface/safetensors#format): the tensor table, never
the weights.

The file may be hostile: memory and time are bounded whatever its content, violations of the format are refused (holes,
overlaps, bytes after the last tensor, duplicate names), and every fault is an `InvalidModel`.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec

from modelrunner import boundedjson
from modelrunner.errors import BadRequest, InvalidModel
from modelrunner.store.files import open_regular
from modelrunner.store.window import U64, Window
from modelrunner.types import Tensor

# The reference implementation takes 100 MB; the largest files have some ten thousand tensors of 130 bytes each.
_MAX_HEADER = 16 << 20
_MAX_TENSORS = 1 << 16
_MOST_SIGNS = 16 * _MAX_TENSORS  # a tensor of four dimensions has eight commas, four colons and two brackets
_MAX_DIMENSIONS = 32

# Bits of an element (`Dtype` of the reference implementation).
_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64}
_BITS |= {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64}
_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
_BITS |= {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}

_Size = Annotated[int, msgspec.Meta(ge=0)]


class _HeaderEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


def read_tensors(path: Path) -> tuple[Tensor, ...]:
    """Returns the tensors in the order of their data; takes about 2 µs a tensor. Raises `InvalidModel`, also for a file
    that cannot be opened."""
    try:
        with open_regular(path) as file:
            window = Window(file)
            header = _header(window)
            return _table(_members(header), window.left)
    except (OSError, BadRequest) as error:
        raise InvalidModel(f"the file cannot be read ({error})") from error


def _header(window: Window) -> bytes:
    if window.size < U64.size:
        raise InvalidModel("it is not a safetensors file")
    length = window.number(U64)
    if length > _MAX_HEADER:
        raise InvalidModel(f"it claims to have a header of {length} bytes: it is damaged, or not a safetensors file")
    header = window.take(length)
    if not header.startswith(b"{"):
        raise InvalidModel("it is not a safetensors file")
    return header


def _members(header: bytes) -> dict[str, _HeaderEntry]:
    """Returns the tensors by their names."""
    members = boundedjson.decode(header, "its header", _MOST_SIGNS, unique=True)
    if len(members) > _MAX_TENSORS:
        raise InvalidModel("it claims to have more tensors than any model has")
    try:
        msgspec.convert(members.pop("__metadata__", {}), dict[str, str])
        return msgspec.convert(members, dict[str, _HeaderEntry])
    except msgspec.ValidationError as error:
        raise InvalidModel(f"its header is invalid ({str(error)[:100]})") from None


def _table(entries: Mapping[str, _HeaderEntry], room: int) -> tuple[Tensor, ...]:
    tensors, end = [], 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        first, last = entry.data_offsets
        size = _size(name, entry)
        if last - first != size:
            raise InvalidModel(f"its tensor {name[:80]!r} has {last - first} bytes of data, but a shape of {size}")
        if first != end:
            raise InvalidModel(f"there is {'a hole' if first > end else 'an overlap'} before its tensor {name[:80]!r}")
        end = last
        tensors.append(Tensor(name, tuple(entry.shape), entry.dtype, size))
    if end > room:
        raise InvalidModel("its tensors end after the end of the file: it is truncated or damaged")
    if end < room:
        raise InvalidModel(f"it has {room - end} bytes after its last tensor")
    return tuple(tensors)


def _size(name: str, entry: _HeaderEntry) -> int:
    """Returns the size in bytes."""
    bits = _BITS.get(entry.dtype)
    if bits is None:
        raise InvalidModel(
            f"its tensor {name[:80]!r} has the type {entry.dtype[:20]!r}, which is unknown here: a newer release may"
            " know it"
        )
    if len(entry.shape) > _MAX_DIMENSIONS:
        raise InvalidModel(f"its tensor {name[:80]!r} has {len(entry.shape)} dimensions")
    size, rest = divmod(prod(entry.shape) * bits, 8)
    if rest:
        raise InvalidModel(f"its tensor {name[:80]!r} ends within a byte")
    return size
