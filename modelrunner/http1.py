"""An engine's answer as HTTP/1.1: its head, and how its body ends.

llhttp reads the head and checks the chunks. The bytes of a chunked body can be handed on as they came, framing and
all: then llhttp only has to find the end, and a proxy's work per chunk is one call.
"""

from functools import lru_cache
from typing import Protocol

import httptools

from modelrunner.errors import EngineProtocolError

_MOST_DIGITS = 15
_END = b"\r\n0\r\n\r\n"
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_CHUNKED_EVENT_ENDS = (b"\n\n\r\n", b"\r\n\r\n\r\n")


def part_length(head: bytes) -> tuple[bytes, bytes, int | None]:
    """What stands before and after the Content-Length of a head, and that length; the head, b"" and None where it has
    none in one of the usual forms. One peer's heads differ in nothing else, so that what is remembered of one, by the
    two parts, holds for the next."""
    before, name, rest = head.partition(b"\r\nContent-Length: ")
    if not name:
        before, name, rest = head.partition(b"\r\ncontent-length: ")
    digits, _, after = rest.partition(b"\r\n")
    if not digits.isdigit() or len(digits) > _MOST_DIGITS:
        return head, b"", None
    return before, after, int(digits)


def with_length(before: bytes, after: bytes) -> bytes:
    """A head of which `part_length` made two parts; if it had a length, with 1 in its place."""
    return before + b"\r\nContent-Length: 1\r\n" + after if after else before


class Body(Protocol):
    """A body being read. `done` after its last byte."""

    done: bool

    def take(self, data: bytes) -> bytes:
        """What to hand on for `data`, perhaps nothing. Raises `EngineProtocolError` or `httptools.HttpParserError`."""

    def at_event_boundary(self) -> bool:
        """Does what was handed on end after a whole server-sent event (and chunk), so that another could follow?"""


class ResponseHead:
    """A complete head. `fields` have names in lower case, all but Content-Length; that is `length`, None for a body of
    unknown length."""

    def __init__(self, data: bytes) -> None:
        self._found: list[tuple[bytes, bytes]] = []
        parser = httptools.HttpResponseParser(self)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise EngineProtocolError("the engine switched protocols unasked") from None
        except httptools.HttpParserError as error:
            raise EngineProtocolError(f"the engine's answer is not HTTP: {error}") from None
        self.status: int = parser.get_status_code()
        self.keep_alive: bool = parser.should_keep_alive()
        values = dict(self._found)
        self.fields = tuple(field for field in self._found if field[0] != b"content-length")
        self.chunked = b"transfer-encoding" in values
        if values.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            raise EngineProtocolError("the engine's answer has a transfer encoding other than chunked")
        self.length: int | None = int(values[b"content-length"]) if b"content-length" in values else None
        if self.status in (204, 304):
            self.length = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._found.append((name.lower(), value))

    def body(self, length: int | None, *, splice: bool) -> Body:
        """How to read a body of this length; with `splice`, one of unknown length is handed on in chunks."""
        if length is not None:
            return Sized(length)
        if not self.chunked:
            return UntilEnd(splice)
        return Spliced() if splice else Decoded()


def response_head(data: bytes) -> tuple[ResponseHead, int | None]:
    """A complete head, and the length of its body, None if that is unknown. An engine's heads are parsed once and
    remembered. Raises `EngineProtocolError`."""
    before, after, length = part_length(data)
    head = _remembered(before, after)
    return head, head.length if length is None or head.length != 1 else length


@lru_cache(maxsize=256)
def _remembered(before: bytes, after: bytes) -> ResponseHead:
    return ResponseHead(with_length(before, after))


class Sized:
    """A body with a Content-Length."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = length == 0

    def take(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise EngineProtocolError("the engine's answer is longer than it announced")
        self.done = self._left == 0
        return data

    def at_event_boundary(self) -> bool:
        return False


class UntilEnd:
    """A body that ends with the connection, handed on in chunks if `splice`."""

    def __init__(self, splice: bool) -> None:
        self._splice = splice
        self._tail = b"\n\n"
        self.done = False

    def take(self, data: bytes) -> bytes:
        if not data:
            return b""
        self._tail = (self._tail + data[-4:])[-4:]
        return b"%x\r\n%b\r\n" % (len(data), data) if self._splice else data

    def end(self) -> bytes:
        self.done = True
        return _END[2:] if self._splice else b""

    def at_event_boundary(self) -> bool:
        return self._tail.endswith(_EVENT_ENDS)


class _ChunkReader:
    """llhttp on a chunked body."""

    def __init__(self) -> None:
        self.done = False
        self._begun = False
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

    def on_message_begin(self) -> None:
        if self._begun:
            raise EngineProtocolError("the engine sent more than one answer")
        self._begun = True

    def on_message_complete(self) -> None:
        self.done = True

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise EngineProtocolError("the engine sent more than one answer") from error


class Spliced(_ChunkReader):
    """A chunked body handed on byte for byte. Its end must be a bare last chunk, so that no byte after it is handed on
    by mistake."""

    def __init__(self) -> None:
        super().__init__()
        self._last = b"\r\n"

    def take(self, data: bytes) -> bytes:
        if not data:
            return b""
        self._feed(data)
        self._last = data if len(data) > 8 else self._last[-8:] + data
        if self.done and not self._last.endswith(_END):
            raise EngineProtocolError("the engine's answer has trailers, or bytes after its end")
        return data

    def at_event_boundary(self) -> bool:
        if self._last == b"\r\n":
            return True
        return self._last.endswith(_CHUNKED_EVENT_ENDS) and self._between_chunks()

    def _between_chunks(self) -> bool:
        """Asks llhttp: only between chunks does a last chunk end the message. The parser is of no use after this."""
        try:
            self._parser.feed_data(b"0\r\n\r\n")
        except httptools.HttpParserError:
            return False
        return self.done


class Decoded(_ChunkReader):
    """A chunked body handed on without its framing."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._tail = b"\n\n"
        super().__init__()

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def take(self, data: bytes) -> bytes:
        if not data:
            return b""
        self._feed(data)
        out = b"".join(self._pieces)
        self._pieces.clear()
        self._tail = (self._tail + out[-4:])[-4:]
        return out

    def at_event_boundary(self) -> bool:
        return self._tail.endswith(_EVENT_ENDS)
