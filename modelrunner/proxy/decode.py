"""What the proxy must know of a request's body, learned without building the rest of it. The body itself goes to the
engine byte for byte, so both must read the same model from it: what two JSON readers may take differently is refused.
"""

import codecs
import re
from collections.abc import Iterator

import msgspec

from modelrunner.errors import BadRequest
from modelrunner.schema import wrong_field


class Fields(msgspec.Struct, frozen=True, gc=False):
    """`stream` and `keep_alive` are None where the body does not have them."""

    model: str
    stream: bool | None = None
    keep_alive: str | int | float | None = None


_decoder = msgspec.json.Decoder(Fields)
_DIGITS_ONLY = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))
_LONGEST_NUMBER = b"0" * 309  # the digits of the largest double
_NUMBER_OR_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"|([0-9]{309})', re.DOTALL)
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\],]', re.DOTALL)
_MOST_TOKENS = 1_000_000  # half a second; only a body that says `"model"` more than once is looked at this way


def decode(body: bytes) -> Fields:
    """Raises `BadRequest` for anything but one JSON object with one `model`, of bounded depth, numbers that a double
    can hold, and text that is Unicode."""
    try:
        fields = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _unlike_schema(error) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except (RecursionError, UnicodeDecodeError):
        raise BadRequest("the body is not JSON that can be read: nested too deep, or not UTF-8") from None
    if not body.isascii():
        _check_utf8(body)
    # A run of 309 digits cannot hide between the bytes 308, 617, ...: few bodies have a digit in one of those places.
    places = body[len(_LONGEST_NUMBER) - 1 :: len(_LONGEST_NUMBER)]
    if places.translate(None, b"0123456789") != places and _LONGEST_NUMBER in body.translate(_DIGITS_ONLY):
        _check_numbers(body)
    # A key may be written with escapes: \u0064 to \u006f are the letters of "model".
    if body.count(b'"model"') != 1 or (b"\\" in body and b"\\u006" in body):
        _check_one_model(body)
    return fields


def _unlike_schema(error: msgspec.ValidationError) -> BadRequest:
    wrong = wrong_field(error)
    return wrong if wrong.param else BadRequest("the body must be a JSON object")


def _check_utf8(body: bytes) -> None:
    """In pieces: a decoded copy of the whole could take four times its size."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(body), 1 << 16):
            decoder.decode(body[start : start + (1 << 16)])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise BadRequest("the body is not UTF-8") from None


def _check_numbers(body: bytes) -> None:
    if any(found[1] for found in _NUMBER_OR_STRING.finditer(body)):
        raise BadRequest("the body has a number that is too large")


def _check_one_model(body: bytes) -> None:
    keys = [key for key in _top_level_keys(body) if key == b'"model"' or (b"\\" in key and _unescaped(key) == "model")]
    if keys != [b'"model"']:
        raise BadRequest("`model` must be given once, and written plainly", param="model")


def _unescaped(key: bytes) -> str:
    return msgspec.json.decode(key, type=str)


def _top_level_keys(body: bytes) -> Iterator[bytes]:
    """Of a body that is known to be a valid JSON object."""
    depth, key_follows = 0, False
    for count, token in enumerate(_TOKEN.finditer(body)):
        if count > _MOST_TOKENS:
            raise BadRequest("the body is too intricate to make sure of its `model`", param="model")
        text = token[0]
        if text in b"{[":
            depth += 1
            key_follows = depth == 1
        elif text in b"}]":
            depth -= 1
        elif text == b",":
            key_follows = depth == 1
        elif key_follows:
            key_follows = False
            yield text
