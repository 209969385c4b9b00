"""Room for JSON that is nested deep: what was decoded once can be decoded and encoded again by callers deeper in the
stack.

The interpreter's limit on recursion counts the frames of the caller, too. A body of a depth that just passed would else
fail in a later step, which knows no client to tell."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_ROOM = 100  # levels that later callers may be deeper, and that they may add around a value
SURELY_SHALLOW = 200
"""Brackets of a text that needs no room."""


def decode_with_room(decode: Callable[[bytes], T], data: bytes) -> T:
    """Returns `decode(data)`. Raises what that raises, and `RecursionError` for data that is nested so deep that there
    is no room left."""
    if data.count(b"[") + data.count(b"{") <= SURELY_SHALLOW:
        return decode(data)
    return _lower(decode, data, _ROOM)


def _lower(decode: Callable[[bytes], T], data: bytes, levels: int) -> T:
    """Each level is a call from C and one from Python, whichever of them an interpreter counts."""
    if levels == 0:
        return decode(data)
    return next(_lower(decode, data, left) for left in (levels - 1,))
