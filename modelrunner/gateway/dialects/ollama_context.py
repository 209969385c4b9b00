"""The `context` of Ollama's generations: a conversation as numbers, which a client sends back to go on with it.

Ollama's own are the tokens of the conversation. Ours are its texts, three bytes in each number, so that they fit every
client's type of numbers, every engine can go on with them, and nothing is kept here.
"""

import struct
from collections.abc import Sequence

import msgspec

from modelrunner.errors import BadRequest

Turn = tuple[str, str]
"""A role (system, user or assistant) and its text."""
_MARK = b"\x00modelrunner\x00"  # four numbers; no text begins so
_turns = msgspec.json.Decoder(list[Turn])


def context_of(turns: Sequence[Turn]) -> list[int]:
    """Returns the numbers of a conversation, each below 2**24."""
    text = _MARK + msgspec.json.encode(turns)
    text += b" " * (-len(text) % 3)
    wide = bytearray(len(text) // 3 * 4)
    for place in range(3):
        wide[place::4] = text[place::3]
    return list(struct.unpack(f"<{len(wide) // 4}I", wide))


def turns_of(context: Sequence[int]) -> list[Turn]:
    """Returns the conversation. Raises `BadRequest` for numbers of another program."""
    text = bytearray(3 * len(context))
    try:
        wide = struct.pack(f"<{len(context)}I", *context)
        for place in range(3):
            text[place::3] = wide[place::4]
        if text.startswith(_MARK) and not any(wide[3::4]):
            return _turns.decode(bytes(text[len(_MARK) :]))
    except (struct.error, msgspec.DecodeError):
        pass
    raise BadRequest(
        "`context` is not one that an answer of this daemon had: leave it out, and begin the conversation anew",
        param="context",
    )
