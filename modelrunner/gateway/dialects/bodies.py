"""JSON bodies that name a model. The gateway decodes the few fields that it needs; the body itself goes to the engine
byte for byte. Both must read the same model from it, so a body that two JSON readers may read differently is
refused."""

import codecs
import re
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from typing import Any, ClassVar

import msgspec

from modelrunner.engine.runner import Runner
from modelrunner.errors import BadRequest
from modelrunner.gateway.calls import Dialect, Fields, Inference, Translation
from modelrunner.gateway.dialects.assembly import Assembly
from modelrunner.gateway.dialects.nesting import decode_with_room
from modelrunner.gateway.dialects.normalize import lenient, normalized
from modelrunner.gateway.engine_request import EngineRequest
from modelrunner.schema import wrong_field

_SLICE = 1 << 20  # bytes that one search covers: a search blocks every other thread
_MODEL = b'"model"'
_OURS = b'"modelrunner_'
_BEGINNING = b'"model'  # of both
_DIGITS_ONLY = bytes(0x30 if 0x30 <= byte <= 0x39 else 0x20 for byte in range(256))
_LONGEST = 309  # the digits of the largest double
_LAST_DIGIT = _LONGEST - 1
_NUMBER = b"0" * _LONGEST
_NUMBER_OR_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"|([0-9]{309})|[0-9]++', re.DOTALL)
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\],]', re.DOTALL)
# Up to the next bracket outside of a text. A long way takes several matches, so that other threads have their turn.
_TO_BRACKET = re.compile(rb'(?:[^"{\[]++|"(?:[^"\\]++|\\.)*+"?+){0,9999}+([{\[])?+', re.DOTALL)
_MOST_VALUES = 100_000
"""Objects and lists of a body: each takes microseconds of the event loop, and hundreds of bytes."""
_MOST_TOKENS = 1_000_000  # a search takes half a second; it is done only for a body with several `"model"`


class JsonBodies(Dialect):
    """A family whose bodies are JSON objects with a `model`. `decoder` reads its fields from a body."""

    decoder: "ClassVar[msgspec.json.Decoder[Any]]" = msgspec.json.Decoder(Fields)

    def read(self, body: bytes) -> Fields:
        """Returns the fields. Raises `BadRequest` unless the body is one JSON object in UTF-8 with one `model`, bounded
        depth and number of objects and lists, and numbers that fit in a double."""
        small = len(body) <= _SLICE
        _check_values(body)
        try:
            fields: Fields = decode_with_room(self.decoder.decode, body)
        except msgspec.ValidationError as error:
            fields = self._leniently_decoded(body, error)
        except msgspec.DecodeError as error:
            raise BadRequest(f"the body is not valid JSON: {error}") from None
        except (RecursionError, UnicodeDecodeError):
            raise BadRequest("the body is not valid JSON: it is nested too deep, or not UTF-8") from None
        if not body.isascii():
            _check_utf8(body)
        # A run of 309 digits covers one of the bytes 308, 617, ...: few bodies have a digit at such a place.
        if body[_LAST_DIGIT::_LONGEST].translate(_DIGITS_ONLY).strip():
            _check_numbers(body)
        # Most bodies have one text that begins like `"model"`: it is the key itself, which the decoder has found. The
        # key may be written with escapes: \u0064 to \u006f are its letters. (`in` first takes the searched bytes for an
        # integer and fails, which costs more than the search.)
        twice = body.rfind(_BEGINNING, 0, body.rfind(_BEGINNING)) >= 0 if small else _repeats(body)
        if twice or (small and body.find(b"\\") >= 0 and body.find(b"\\u006") >= 0):
            self._check_names(body)
        if fields.tool_choice:
            fields.check_choice()
        return fields

    def _leniently_decoded(self, body: bytes, error: msgspec.ValidationError) -> Fields:
        """Returns the fields of a body that is only valid if null is absent, or 40.0 is 40. Raises `BadRequest`."""
        try:
            fields: Fields = self.decoder.decode(lenient(body))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            raise _unlike_schema(error) from None
        return fields

    def _check_names(self, body: bytes) -> None:
        """Searches in slices. Raises `BadRequest` unless the body has one `model`, and no unknown field of ours."""
        models = sum(piece.count(_MODEL) for piece in _slices(body, len(_MODEL)))
        if models != 1 or any(b"\\u006" in piece for piece in _slices(body, 5)):
            _check_one_model(body)
        if any(_OURS in piece for piece in _slices(body, len(_OURS))):
            _check_ours(body, self.decoder.type.__struct_fields__)

    def reads(self, ask: Inference, path: str, runner: Runner) -> Collection[str] | None:
        return type(ask.fields).__struct_fields__


class JsonDialect(JsonBodies):
    """A family whose requests go to the engine's endpoint of the same kind. `assembly` makes one answer of an engine's
    stream for a client that wants no stream. `translates` are the fields that the translation of a request reads. The
    field `translates_for` also leads to a translation if the engine's own endpoint does not read it."""

    assembly: ClassVar[type[Assembly]]
    translates: ClassVar[Collection[str]] = ()
    translates_for: ClassVar[str] = ""
    refuses_unread: ClassVar[bool] = True

    def reads(self, ask: Inference, path: str, runner: Runner) -> Collection[str] | None:
        return runner.api.endpoints[path].reads if path == ask.head.route.path else self.translates

    def translated(self, ask: Inference, runner: Runner) -> tuple[EngineRequest, Translation]:
        """As `request`, for an engine that has the call's endpoint `instead` only."""
        raise NotImplementedError

    def request(self, ask: Inference, runner: Runner) -> tuple[EngineRequest, Translation | None]:
        """Returns the client's body, byte for byte but for what `normalized` changes. Members are replaced only if the
        client wrote an alias, the engine refuses the model's name, or the engine is asked for a stream and the client
        did not ask for one."""
        names, path = runner.names, ask.head.route.path
        endpoint = runner.api.endpoints.get(path)
        if ask.head.route.instead is not None and (
            endpoint is None
            or (
                self.translates_for not in (endpoint.reads or self.translates)
                and b'"%b"' % self.translates_for.encode() in ask.body
            )
        ):
            return self.translated(ask, runner)
        request = normalized(path, ask.body)
        replaced: dict[str, Any] = {}
        assembly: Assembly | None = None
        if ask.chosen:
            replaced["model"] = ask.chosen
        if names is not None and ask.fields.model not in names:
            replaced["model"] = names[0]
        if not ask.fields.stream and endpoint is not None and endpoint.as_stream:
            replaced |= endpoint.as_stream
            assembly = self.assembly()
        if replaced:
            request.set(replaced)
        return request, assembly


def _repeats(body: bytes) -> bool:
    """True if a large body has the beginning of our names more than once, or one of their letters as an escape."""
    repeats = 0
    for piece in _slices(body, len(_BEGINNING)):
        at = piece.rfind(_BEGINNING)
        while at >= 0:
            repeats += 1
            at = piece.rfind(_BEGINNING, 0, at)
        if repeats > 1 or (piece.find(b"\\") >= 0 and piece.find(b"\\u006") >= 0):
            return True
    return False


def _slices(body: bytes, length: int) -> Iterable[bytes]:
    """Yields the body in pieces that overlap by `length - 1` bytes, so that each text of `length` bytes is whole in
    exactly one piece."""
    return (body[start : start + _SLICE + length - 1] for start in range(0, len(body), _SLICE))


def _check_values(body: bytes) -> None:
    """Raises `BadRequest` for more than `_MOST_VALUES` objects and lists."""
    if len(body) <= _MOST_VALUES or body.count(b"{") + body.count(b"[") <= _MOST_VALUES:
        return
    brackets = (found for found in _TO_BRACKET.finditer(body) if found.lastindex)
    if next(islice(brackets, _MOST_VALUES, None), None) is not None:
        raise BadRequest(f"the body has more than {_MOST_VALUES:,} objects and lists: ask in several smaller requests")


def _unlike_schema(error: msgspec.ValidationError) -> BadRequest:
    wrong = wrong_field(error)
    return wrong if wrong.param else BadRequest("the body must be a JSON object")


def _check_utf8(body: bytes) -> None:
    """Checks in pieces, since a decoded copy of the whole could take four times its size. Raises `BadRequest`."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(body), 1 << 16):
            decoder.decode(body[start : start + (1 << 16)])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise BadRequest("the body is not UTF-8") from None


def _check_numbers(body: bytes) -> None:
    is_long = any(_NUMBER in piece.translate(_DIGITS_ONLY) for piece in _slices(body, _LONGEST))
    if is_long and any(number[1] for number in _NUMBER_OR_STRING.finditer(body)):
        raise BadRequest("the body has a number that is too large")


def _check_one_model(body: bytes) -> None:
    keys = [key for key in _top_level_keys(body) if key == b'"model"' or (b"\\" in key and _unescaped(key) == "model")]
    if keys != [b'"model"']:
        raise BadRequest("`model` must be given once, and written plainly", param="model")


def _check_ours(body: bytes, known: Collection[str]) -> None:
    """Raises `BadRequest` for an unknown field with the prefix of this daemon, which an engine would ignore
    silently."""
    for key in _top_level_keys(body):
        if key.startswith(_OURS) and (name := _unescaped(key)) not in known:
            name = name[:64]
            raise BadRequest(f"unknown field `{name}`", param=name)


def _unescaped(key: bytes) -> str:
    return msgspec.json.decode(key, type=str)


def _top_level_keys(body: bytes) -> Iterator[bytes]:
    """Yields the keys of the outer object. `body` is known to be a valid JSON object."""
    depth, key_follows = 0, False
    for count, token in enumerate(_TOKEN.finditer(body)):
        if count > _MOST_TOKENS:
            raise BadRequest("the body is too complex for a check of its `model`", param="model")
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
