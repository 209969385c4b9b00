"""Answers that an engine streams and that a client wants in one piece.

Some engines notice only in a stream that a client has left (`EndpointApi.as_stream`). They are asked for a stream,
and an `Assembly` makes the answer from it that the engine would have sent without the stream.

Source of the events: https://html.spec.whatwg.org/multipage/server-sent-events.html; an event of these families is one
line of data.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from modelrunner.errors import EngineProtocolError
from modelrunner.gateway.calls import JSON
from modelrunner.gateway.engine_errors import EngineRefusal, EngineRefused
from modelrunner.gateway.request.tokens import Tokens
from modelrunner.http.answers import Header

LIMIT = 32 << 20
"""The limit of an answer's content, in bytes as the engine wrote it, that is kept until the answer is complete."""
Event = dict[str, msgspec.Raw]
_event = msgspec.json.Decoder(Event)
UNLIKE = (msgspec.MsgspecError, ValueError, TypeError, AttributeError, LookupError, RecursionError)
"""Raised for an event of an unknown shape: events are JSON without a type."""


def is_null(raw: msgspec.Raw) -> bool:
    return bytes(raw) == b"null"


class EventLines:
    """Extracts the data of each event from a stream of bytes that may be cut anywhere. `unfinished` counts the bytes of
    the last line."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self.unfinished = 0

    def take(self, data: bytes) -> list[bytes]:
        """Returns the data of the events that end in these bytes, without OpenAI's `[DONE]`."""
        if b"\n" not in data:
            self._rest.append(data)
            self.unfinished += len(data)
            return []
        *lines, rest = b"".join((*self._rest, data)).split(b"\n") if self._rest else data.split(b"\n")
        self._rest, self.unfinished = [rest] if rest else [], len(rest)
        events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
        return [event for event in events if event != b"[DONE]"]


class Assembly(ABC):
    """A `Translation` without output before its end. An error in the engine's stream becomes the whole answer: the
    client has no head yet, so it gets the error's status."""

    headers: tuple[Header, ...] = (JSON,)
    whole: ClassVar[bool] = True
    chunk_per_line: ClassVar[bool] = False

    def __init__(self) -> None:
        self._lines = EventLines()
        self._kept = 0  # bytes
        self._refusal: EngineRefusal | None = None

    @property
    def counted(self) -> Tokens | None:
        return None

    def piece(self, data: bytes) -> bytes:
        """Reads the events. Raises `EngineProtocolError` for an answer larger than `LIMIT` or of an unknown shape."""
        for event in self._lines.take(data):
            if self._refusal is None:
                self._read(event)
        if self._kept + self._lines.unfinished > LIMIT:
            raise EngineProtocolError(TOO_LARGE)
        return b""

    def end(self) -> bytes:
        """Returns the client's answer. Raises `EngineRefused` if the stream had an error, and `EngineProtocolError` if
        it ended too early."""
        if self._refusal is not None:
            raise EngineRefused(self._refusal)
        if not self.complete():
            raise EngineProtocolError("the engine's stream ended before its answer was complete")
        try:
            return msgspec.json.encode(self.answer())
        except UNLIKE as error:
            raise EngineProtocolError(f"the engine's stream cannot be put together: {error}") from None

    def _read(self, data: bytes) -> None:
        try:
            event = _event.decode(data)
            if "error" in event and not is_null(event["error"]):
                self._refusal = refusal_of(data)
            else:
                self._kept += self.add(event)
        except UNLIKE as error:
            raise EngineProtocolError(f"the engine's stream cannot be read: {error}") from None

    @abstractmethod
    def add(self, event: Event) -> int:
        """Takes an event, and returns how many bytes of it are kept. Raises any of `UNLIKE` for an event of an unknown
        shape."""

    @abstractmethod
    def complete(self) -> bool: ...

    @abstractmethod
    def answer(self) -> Mapping[str, Any]: ...


LARGEST_BODY = 256 << 20
"""The limit of an answer that is not streamed (embeddings, rankings), in bytes."""
BODY_TOO_LARGE = "the engine's answer is too large: ask for less at once"
_Decoded = TypeVar("_Decoded")


class WholeBody(ABC):
    """A `Translation` of an answer that the engine gives in one piece."""

    whole: bool = True
    chunk_per_line: bool = False
    counted: Tokens | None = None

    def __init__(self, headers: tuple[Header, ...]) -> None:
        self.headers = (JSON, *headers)
        self._body = bytearray()

    def piece(self, data: bytes) -> bytes:
        """Keeps the bytes. Raises `EngineProtocolError` for an answer that is too large."""
        self._body += data
        if len(self._body) > LARGEST_BODY:
            raise EngineProtocolError(BODY_TOO_LARGE)
        return b""

    def decoded(self, kind: type[_Decoded]) -> _Decoded:
        """Decodes the whole body. Raises `EngineProtocolError`."""
        try:
            return msgspec.json.decode(self._body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineProtocolError(f"the engine's answer cannot be read: {error}") from None

    @abstractmethod
    def end(self) -> bytes: ...


def refusal_of(data: bytes) -> EngineRefusal:
    """Returns the error that an engine put in its stream, from the `data` of its event."""
    details = msgspec.json.decode(data)["error"]
    code = details.get("code") if isinstance(details, dict) else None
    refusal = EngineRefusal(code if isinstance(code, int) and 400 <= code < 600 else 500)
    refusal.add(data)
    return refusal


TOO_LARGE = f"the engine's answer has more than {LIMIT >> 20} MiB: ask for it as a stream"


class TextPieces(list[str]):
    """A text that comes in pieces."""


def grow(fields: dict[str, Any], name: str, piece: str) -> None:
    """Adds a piece to the text `name`, which may be missing, null, or already whole."""
    text = fields.get(name)
    if not isinstance(text, TextPieces):
        fields[name] = text = TextPieces([text] if isinstance(text, str) else [])
    text.append(piece)


def finished(value: Any) -> Any:
    """Returns `value` with every `TextPieces` in it joined."""
    match value:
        case TextPieces():
            return "".join(value)
        case dict():
            return {name: finished(inner) for name, inner in value.items()}
        case list():
            return [finished(inner) for inner in value]
        case _:
            return value
