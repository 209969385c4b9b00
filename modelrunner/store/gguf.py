"""Reads the header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): metadata and tensor
table, never the weights.

The file may be hostile. Every count is checked against the rest of the file before anything is read or allocated,
memory and time are bounded whatever the file says, and every fault is an `InvalidModel`. The limits lie far above any
real model's."""

import struct
from pathlib import Path
from typing import Any

from modelrunner.errors import BadRequest, InvalidModel
from modelrunner.store.files import open_regular
from modelrunner.store.ggml import TENSOR_TYPES
from modelrunner.store.window import U64, Window
from modelrunner.types import ModelHeader, Tensor

LONGEST_KEPT_ARRAY = 4096  # entries; ModelHeader says how longer ones appear
LONGEST_KEPT_STRING = 1 << 20
_MAX_KEPT = 16 << 20  # bytes of all strings and arrays that are kept
_ENTRY_SIZE = 32  # bytes that an entry of a list takes in Python
_MAX_KEYS = 1 << 14
_MAX_TENSORS = 1 << 16
_MAX_STRINGS = 4 << 20  # entries of all arrays of strings: the largest vocabularies have 0.3 million, merges as many
_MAX_KEY = (1 << 16) - 1
_MAX_TENSOR_NAME = 128
_MAX_DIMENSIONS = 4

_U32 = struct.Struct("<I")
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    code: struct.Struct("<" + letter)
    for code, letter in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "B",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}


def read_header(path: Path) -> ModelHeader:
    """Reads the header. Takes about 0.1 µs per vocabulary entry and 3 µs per tensor. Raises `InvalidModel`, also for a
    file that cannot be opened."""
    try:
        with open_regular(path) as file:
            return _Parser(Window(file)).parse()
    except (OSError, BadRequest) as error:
        raise InvalidModel(f"the file cannot be read ({error})") from error


def read_strings(path: Path, key: str) -> list[bytes]:
    """Returns the entries of a long array of strings, such as the vocabulary, that `read_header` leaves out; [] if
    there is no such array. Takes about 0.5 µs per entry. Raises `InvalidModel`."""
    try:
        with open_regular(path) as file:
            parser = _Parser(Window(file), wanted=key)
            parser.parse()
            return parser.strings
    except (OSError, BadRequest) as error:
        raise InvalidModel(f"the file cannot be read ({error})") from error


class _Parser:
    """Parses a header. `strings` has those of the array `wanted`, as bytes."""

    def __init__(self, window: Window, wanted: str = "") -> None:
        self._window = window
        self._wanted = wanted
        self.strings: list[bytes] = []
        self._kept = 0
        self._seen_strings = 0

    def parse(self) -> ModelHeader:
        tensors, keys = self._preamble()
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            self._entry(metadata)
        alignment = _alignment(metadata)
        table = [self._tensor() for _ in range(tensors)]
        if len({tensor.name for tensor, _ in table}) != tensors:
            raise InvalidModel("two of its tensors have the same name")
        self._check_data(table, alignment)
        return ModelHeader(metadata, tuple(tensor for tensor, _ in table))

    def _preamble(self) -> tuple[int, int]:
        window = self._window
        magic = window.take(4) if window.size >= 24 else b""
        if magic == b"vers":  # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
            raise InvalidModel("it is a pointer of git-lfs and not the file itself: fetch that with `git lfs pull`")
        if magic != b"GGUF":
            raise InvalidModel("it is not a GGUF file")
        version = window.number(_U32)
        if version & 0xFFFF == 0:
            raise InvalidModel("it was written for big-endian machines; take the little-endian file of this model")
        if version not in (2, 3):
            raise InvalidModel(f"GGUF version {version} is not supported (2 and 3 are)")
        tensors, keys = window.number(U64), window.number(U64)
        self._bound("tensors", tensors, _MAX_TENSORS, 24)
        self._bound("metadata entries", keys, _MAX_KEYS, 13)
        return tensors, keys

    def _bound(self, what: str, count: int, limit: int, least: int) -> None:
        """Raises `InvalidModel` for a count over the limit or the file's size. `least` is the smallest number of bytes
        that an entry takes in the file."""
        if count > limit or count * least > self._window.left:
            raise InvalidModel(f"it claims to have {count} {what}, more than a file of its size or any model has")

    def _string(self, limit: int) -> str | int:
        """Returns the string. For a string over `limit` bytes, skips it and returns its length."""
        window = self._window
        length: int = window.number(U64)
        if length > limit:
            window.skip(length)
            return length
        self._keep(length)
        # Only the engine needs the exact bytes; the kept text is shown to people.
        return window.take(length).decode("utf-8", "replace")

    def _keep(self, size: int) -> None:
        self._kept += size
        if self._kept > _MAX_KEPT:
            raise InvalidModel(f"its metadata is over {_MAX_KEPT >> 20} MiB")

    def _short_string(self, what: str, limit: int) -> str:
        text = self._string(limit)
        if isinstance(text, int):
            raise InvalidModel(f"a {what} is {text} bytes long")
        return text

    def _entry(self, metadata: dict[str, Any]) -> None:
        key = self._short_string("metadata key", _MAX_KEY)
        if key in metadata or f"{key}.length" in metadata:
            raise InvalidModel(f"it has the metadata key {key[:80]!r} twice")
        code = self._window.number(_U32)
        value = self._array(key) if code == _ARRAY else self._scalar(key, code)
        if code in (_ARRAY, _STRING) and isinstance(value, int):
            metadata[f"{key}.length"] = value
        else:
            metadata[key] = value

    def _scalar(self, key: str, code: int) -> Any:
        if code == _STRING:
            return self._string(LONGEST_KEPT_STRING)
        form = _SCALARS.get(code)
        if form is None:
            raise InvalidModel(f"its metadata entry {key[:80]!r} has the unknown type {code}")
        value = self._window.number(form)
        return bool(value) if code == _BOOL else value

    def _array(self, key: str) -> list[Any] | int:
        """Returns the array. For a long array, skips it and returns its length."""
        code, count = self._window.number(_U32), self._window.number(U64)
        if code == _STRING:
            return self._take_all(count) if key == self._wanted else self._strings(count)
        form = _SCALARS.get(code)
        if form is None:
            raise InvalidModel(f"its metadata entry {key[:80]!r} is an array of the unsupported type {code}")
        self._bound("array entries", count, count, form.size)
        if count > LONGEST_KEPT_ARRAY:
            self._window.skip(count * form.size)
            return int(count)
        self._keep(count * _ENTRY_SIZE)
        return [self._scalar(key, code) for _ in range(count)]

    def _strings(self, count: int) -> list[Any] | int:
        self._seen_strings += count
        self._bound("strings", self._seen_strings, _MAX_STRINGS, 0)
        self._bound("array entries", count, count, U64.size)
        if count > LONGEST_KEPT_ARRAY:
            self._window.skip_strings(count)
            return count
        self._keep(count * _ENTRY_SIZE)
        return [self._short_string("string of an array", LONGEST_KEPT_STRING) for _ in range(count)]

    def _take_all(self, count: int) -> int:
        """Reads all strings of the wanted array, of any length. Returns their number."""
        self._bound("strings", count, _MAX_STRINGS, U64.size)
        for _ in range(count):
            length: int = self._window.number(U64)
            self._keep(length)
            self.strings.append(self._window.take(length))
        return count

    def _tensor(self) -> tuple[Tensor, int]:
        """Returns the tensor and the offset of its data."""
        window = self._window
        name = self._short_string("tensor's name", _MAX_TENSOR_NAME)
        dimensions = window.number(_U32)
        if dimensions > _MAX_DIMENSIONS:
            raise InvalidModel(f"its tensor {name!r} has {dimensions} dimensions")
        shape = struct.unpack(f"<{dimensions}Q", window.take(8 * dimensions))
        code, offset = window.number(_U32), window.number(U64)
        kind = TENSOR_TYPES.get(code)
        if kind is None:
            raise InvalidModel(
                f"its tensor {name!r} has the type {code}, which is unknown here: a newer release may know it"
            )
        elements = 1
        for extent in shape:
            elements *= extent
        if elements == 0 or (shape[0] if shape else 1) % kind.block:
            raise InvalidModel(f"its tensor {name!r} of type {kind.name} cannot have the shape {shape}")
        return Tensor(name, shape, kind.name, elements // kind.block * kind.size), offset

    def _check_data(self, table: list[tuple[Tensor, int]], alignment: int) -> None:
        # Parsers of several engines have read past the end of the file, as in CVE-2026-7482.
        window = self._window
        start = -(-(window.size - window.left) // alignment) * alignment
        room = window.size - start
        for tensor, offset in table:
            if offset % alignment:
                raise InvalidModel(f"its tensor {tensor.name!r} is not aligned to {alignment} bytes")
            if offset + tensor.size > room:
                raise InvalidModel(
                    f"its tensor {tensor.name!r} ends after the end of the file: it is truncated or damaged"
                )
        if sum(tensor.size for tensor, _ in table) > max(room, 0):
            raise InvalidModel("its tensors overlap")


def _alignment(metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise InvalidModel(f"general.alignment is {alignment!r}, not a power of two")
    return alignment
