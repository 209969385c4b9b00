"""The head of an engine's answer as HTTP/1.1, and heads that differ only in their Content-Length.

llhttp accepts what HTTP allows, except where a client could read the answer in two ways: a repeated field that the
client gets, or a head above `HEAD_LIMIT`. Such an answer becomes 502."""

from functools import lru_cache

import httptools

from modelrunner.errors import EngineProtocolError
from modelrunner.http.responsebodies import (
    Body,
    ChunkedBody,
    ChunkedBodyAsSent,
    CloseDelimitedBody,
    SizedBody,
)

HEAD_LIMIT = 64 << 10
"""The limit of an answer's head, in bytes."""
_MOST_DIGITS = 15
NO_HEAD = (b"\n", b"\n")
"""Parts that no head has."""
_HANDED_ON_ONCE = (b"content-type", b"content-language", b"retry-after")


def part_length(head: bytes) -> tuple[bytes, bytes, int | None]:
    """Splits a head around the digits of its Content-Length. Returns the parts before and after them, and the length in
    bytes; the head, b"" and None if it has no Content-Length in the usual form. One peer usually sends the same parts,
    so checked heads are cached by their parts."""
    name, separator, rest = head.partition(b"\r\nContent-Length: ")
    if not separator:
        name, separator, rest = head.partition(b"\r\ncontent-length: ")
    digits, line_end, after = rest.partition(b"\r\n")
    if not digits.isdigit() or len(digits) > _MOST_DIGITS:
        return head, b"", None
    return name + separator, line_end + after, int(digits)


def with_length(before: bytes, after: bytes) -> bytes:
    """Joins the two parts of `part_length`, with a length of 1 between them."""
    return before + b"1" + after if after else before


def same_head(data: bytes, before: bytes, after: bytes) -> tuple[int, int]:
    """Compares the head at the start of `data` with the parts of another head, which `part_length` returned. Returns
    its Content-Length and its size, both in bytes, if the parts are the same; else (-1, 0)."""
    if data.startswith(before):
        start = len(before)
        end = data.find(b"\r", start, start + _MOST_DIGITS + 1)
        digits = data[start:end]
        if end > 0 and digits.isdigit() and data.startswith(after, end):
            return int(digits), end + len(after)
    return -1, 0


class ResponseHead:
    """A complete head. `fields` have names in lower case, and lack Content-Length: that is `length` in bytes, None for
    a body of unknown length. `kind` is the media type without its parameters, b"" without one. Raises
    `EngineProtocolError`."""

    def __init__(self, data: bytes) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        parser = httptools.HttpResponseParser(self)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            raise EngineProtocolError("the engine switched protocols unasked") from None
        except httptools.HttpParserError as error:
            raise EngineProtocolError(f"the engine's answer is not HTTP: {error}") from None
        self.status: int = parser.get_status_code()
        self.keep_alive: bool = parser.should_keep_alive()
        values = dict(self._headers)
        if any(sum(name == single for name, _ in self._headers) > 1 for single in _HANDED_ON_ONCE):
            raise EngineProtocolError("the engine's answer has one header in two lines")
        self.kind = values.get(b"content-type", b"").partition(b";")[0].strip().lower()
        self.fields = tuple(field for field in self._headers if field[0] != b"content-length")
        self.chunked = b"transfer-encoding" in values
        if values.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            raise EngineProtocolError("the engine's answer has a transfer encoding other than chunked")
        self.length: int | None = int(values[b"content-length"]) if b"content-length" in values else None
        if self.status in (204, 304):
            self.length = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def body(self, length: int | None, *, splice: bool) -> Body:
        """Makes a reader for a body of this length. With `splice`, the reader returns a body of unknown length in
        chunks."""
        if length is not None:
            return SizedBody(length)
        if not self.chunked:
            return CloseDelimitedBody(splice, self.kind)
        return ChunkedBodyAsSent() if splice else ChunkedBody()


class ResponseHeads:
    """Reads the heads of one engine's answers. A head that repeats the last one, with any Content-Length, is recognized
    without parsing; older ones are cached."""

    def __init__(self) -> None:
        self._before, self._after = NO_HEAD
        self._last: ResponseHead | None = None

    def read(self, data: bytes) -> tuple[ResponseHead | None, int | None, int]:
        """Returns the head at the start of `data`, the length of its body in bytes or None if that is unknown, and the
        size of the head in bytes. An incomplete head is None. Raises `EngineProtocolError`."""
        size, end = same_head(data, self._before, self._after)
        if end:
            return self._last, size, end
        end = data.find(b"\r\n\r\n") + 4
        if end > HEAD_LIMIT or (end < 4 and len(data) > HEAD_LIMIT):
            raise EngineProtocolError("the head of the engine's answer is too large")
        if end < 4:
            return None, None, 0
        before, after, length = part_length(data[:end])
        head = _parsed(before, after)
        if length is None or head.length != 1:  # 1 stands for any length
            return head, head.length, end
        self._before, self._after, self._last = before, after, head
        return head, length, end


@lru_cache(maxsize=256)
def _parsed(before: bytes, after: bytes) -> ResponseHead:
    return ResponseHead(with_length(before, after))
