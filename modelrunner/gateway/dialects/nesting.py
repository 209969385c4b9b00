"""Decodes deeply nested JSON with room on the stack, so that callers deeper in the stack can decode and encode it
again.

The interpreter's recursion limit counts the frames of the caller, too. Without room, a body of a depth that just passed
would fail in a later step, which cannot tell the client."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_ROOM = 100  # levels by which later callers may be deeper, or nest a value deeper
_SURELY_SHALLOW = 200
"""The most brackets of a text that needs no room."""


def decode_with_room(decode: Callable[[bytes], T], data: bytes) -> T:
    """Returns `decode(data)`. Raises what that raises, and `RecursionError` for data that is nested so deep that there
    is no room left."""
    if data.count(b"[") + data.count(b"{") <= _SURELY_SHALLOW:
        return decode(data)
    return _lower(decode, data, _ROOM)


def _lower(decode: Callable[[bytes], T], data: bytes, levels: int) -> T:
    """Each level is a call from C and one from Python, whichever of them an interpreter counts."""
    if levels == 0:
        return decode(data)
    return next(_lower(decode, data, left) for left in (levels - 1,))
