"""Decodes JSON of files that may be hostile. It is bounded before any value is made, and every fault is an
`InvalidModel`.

Python's own extensions `NaN`, `Infinity` and `-Infinity` are accepted: transformers writes configurations with them."""

import json
from pathlib import Path
from typing import Any

from modelrunner import durable
from modelrunner.errors import InvalidModel

# These signs are counted, also in strings. Each value of a text needs one of them, and under 100 bytes of memory.
_SIGNS = (b"{", b"[", b":", b",")
MOST = 1 << 18
"""The values of a configuration, or of an index: several for each class or tensor."""
_LONGEST_INTEGER = 20  # digits and sign of a number of 64 bits


def read(path: Path, largest: int, most: int = MOST, name: str = "") -> Any:
    """Returns the value in a file of at most `largest` bytes, as `decode` does. `name` stands for the file in messages,
    by default its own name."""
    name = name or path.name
    try:
        with durable.open_regular(path) as file:
            data = file.read(largest + 1)
    except OSError as error:
        raise InvalidModel(f"{name} cannot be read ({error.strerror or error})") from error
    if len(data) > largest:
        raise InvalidModel(f"{name} is over {largest >> 20} MiB")
    return decode(data, name, most)


def read_object(path: Path, largest: int, name: str = "") -> dict[str, Any]:
    """Returns the JSON object in a file, as `read` does. Raises `InvalidModel` for any other value."""
    value = read(path, largest, name=name)
    if not isinstance(value, dict):
        raise InvalidModel(f"{name or path.name} is not a JSON object")
    return value


def decode(data: bytes, what: str, most: int, *, unique: bool = False) -> Any:
    """Returns the value of a text that has at most `most` of each sign that values need. A number beyond 64 bits
    becomes a float. Raises `InvalidModel`, whose message begins with `what`; with `unique` also for a duplicate key."""
    if any(data.count(sign) > most for sign in _SIGNS):
        raise InvalidModel(f"{what} has more entries than allowed ({most})")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_members if unique else None, parse_int=_number)
        if rb"\ud" in data.lower():  # half a surrogate pair, which could not be encoded again
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{what} is not valid JSON ({str(error)[:100]})") from None
    return value


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("it has a key twice")
    return members


def _number(text: str) -> int | float:
    if len(text) <= _LONGEST_INTEGER and -(1 << 63) <= (value := int(text)) < 1 << 64:
        return value
    return float(text)
