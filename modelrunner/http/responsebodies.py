"""The body of an engine's answer as it comes, and its end.

llhttp checks the chunks. The bytes of a chunked body can pass unchanged, framing included: then llhttp only has to find
the end, and a chunk costs one call. Trailers, and bytes after the end, would let a client read the answer in two ways,
so they are refused. Chunk extensions pass, since a receiver ignores them (RFC 9112, 7.1.1)."""

import re
from typing import Protocol

import httptools

from modelrunner.errors import EngineProtocolError

_END = re.compile(rb"\r\n0+(?:;[\t\x20-\x7e\x80-\xff]*)?\r\n\r\n\Z")
_NOTHING = re.compile(rb"\r\n(?:[^\r\n]*\r?\n?|0+(?:;[^\r\n]*)?\r\n\r?\n?)")
"""Of a chunked body, after a line's end: all that comes before its content, or all of an empty one, or a part of it."""
_LAST_CHUNK = b"0\r\n\r\n"
_USUAL_END = b"\r\n" + _LAST_CHUNK
_SHORT = 64  # bytes: a longer piece contains the whole end of its event, or of the body
TAIL = 1536
"""Bytes that are kept of the end of a body, where an engine reports its token counts."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_LAST_EVENTS = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete", b"response.failed")
"""A part of the last event of a stream: OpenAI's completions, Anthropic's messages, OpenAI's responses."""
_JSON_TOKEN = re.compile(rb'["{}\[\]]|\\.?', re.DOTALL)
_CHUNKED_EVENT_ENDS = (b"\n\n\r\n", b"\r\n\r\n\r\n")


def is_last_event(tail: bytes) -> bool:
    """Returns whether the end of an event stream contains its last event, whole. The stream may be in chunks, and a
    part of the last chunk (`0`) may be here."""
    tail = tail.replace(b"\r\n", b"\n")
    before = tail.rstrip(b"0\n")
    last = before.rpartition(b"\n\n")[2]
    return tail.startswith(b"\n\n", len(before)) and any(mark in last for mark in _LAST_EVENTS)


class Body(Protocol):
    """Reads a body. `done` is true after its last byte. `size` counts the bytes that `take` returned, and `tail` has
    the last of them: at least `TAIL` of a longer body, or the last two pieces of one that passes in chunks, where
    engines send each event in a piece of its own."""

    done: bool
    size: int

    @property
    def tail(self) -> bytes: ...

    def take(self, data: bytes) -> bytes:
        """Returns the bytes that the client gets for `data`, perhaps none. Raises `EngineProtocolError`,
        `httptools.HttpParserError`."""

    def at_event_boundary(self) -> bool:
        """True if the returned bytes end after a whole server-sent event (and chunk), so that another event could
        follow."""


class SizedBody:
    """A body with a Content-Length."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.size, self.tail = 0, b""
        self.done = length == 0

    def take(self, data: bytes) -> bytes:
        self.size += len(data)
        if self.size > self._length:
            raise EngineProtocolError("the engine's answer is longer than it announced")
        self.tail = data[-TAIL:] if len(data) >= TAIL else self.tail[-TAIL:] + data
        self.done = self.size == self._length
        return data

    def at_event_boundary(self) -> bool:
        return False


class CloseDelimitedBody:
    """A body that ends with the connection (RFC 9112, 6.3), returned in chunks with `splice`. The end of the connection
    does not show whether the body is complete, so events and JSON (by `kind`, the media type) must have an end of their
    own."""

    def __init__(self, splice: bool, kind: bytes) -> None:
        self._splice = splice
        self._events = kind == b"text/event-stream"
        self._json = _JsonEnd() if kind == b"application/json" else None
        self.tail = b"\n\n"
        self.size = 0
        self.done = False

    def take(self, data: bytes) -> bytes:
        if not data:
            return b""
        self.size += len(data)
        self.tail = (self.tail + data)[-TAIL:]
        if self._json is not None:
            self._json.take(data)
        return b"%x\r\n%b\r\n" % (len(data), data) if self._splice else data

    def end(self) -> bytes:
        """Returns the last bytes at the end of the connection. Raises `EngineProtocolError` for a cut body."""
        whole = self._json.whole if self._json is not None else not self._events or self._last_event_came()
        if not whole:
            raise EngineProtocolError("the engine closed the connection in the middle of its answer")
        self.done = True
        return _LAST_CHUNK if self._splice else b""

    def _last_event_came(self) -> bool:
        """A single event that is longer than the kept bytes counts as complete."""
        if not self.at_event_boundary():
            return False
        event = self.tail.replace(b"\r\n", b"\n").removesuffix(b"\n\n")
        return is_last_event(self.tail) or (b"\n\n" not in event and len(self.tail) == TAIL)

    def at_event_boundary(self) -> bool:
        return self.tail.endswith(_EVENT_ENDS)


class _JsonEnd:
    """Detects the end of a JSON text that comes in pieces: every bracket is closed."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escape = b""  # a backslash at the end of a piece
        self._begun = False

    def take(self, data: bytes) -> None:
        data, self._escape = self._escape + data, b""
        self._begun = self._begun or not data.isspace()
        for match in _JSON_TOKEN.finditer(data):
            token = match[0]
            if token == b"\\":
                self._escape = token
            elif token == b'"':
                self._in_string = not self._in_string
            elif not self._in_string and len(token) == 1:
                self._depth += 1 if token in b"{[" else -1

    @property
    def whole(self) -> bool:
        return self._begun and not self._depth and not self._in_string


class _ChunkReader:
    """Parses a chunked body with llhttp."""

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


class ChunkedBodyAsSent(_ChunkReader):
    """A chunked body that keeps its framing. It must end with a bare last chunk, so that no byte after it reaches the
    client. Its `tail` is the last two pieces that came; short ones are joined to the piece before."""

    def __init__(self) -> None:
        self.size, self._before, self._last = 0, b"", b"\r\n"
        super().__init__()

    @property
    def tail(self) -> bytes:
        return (self._before + self._last)[-TAIL:]

    def take(self, data: bytes) -> bytes:
        try:  # as `_feed`, without the cost of a call for each chunk
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise EngineProtocolError("the engine sent more than one answer") from error
        self.size += (length := len(data))
        if length > _SHORT:
            self._before, self._last = self._last, data
        else:
            self._last = self._last[-TAIL:] + data
        if self.done:
            self._check_end()
        return data

    def _check_end(self) -> None:
        if not (tail := self.tail).endswith(_USUAL_END) and not _END.search(tail):
            raise EngineProtocolError("the engine's answer has trailers, or bytes after its end")

    def at_event_boundary(self) -> bool:
        tail = self.tail
        return tail == b"\r\n" or (tail.endswith(_CHUNKED_EVENT_ENDS) and self._between_chunks())

    def _between_chunks(self) -> bool:
        """Asks llhttp: only between chunks does a last chunk end the message. The parser cannot be used after this."""
        try:
            self._parser.feed_data(_LAST_CHUNK)
        except httptools.HttpParserError:
            return False
        return self.done


class ChunkedBody(_ChunkReader):
    """A chunked body without its framing."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.size, self.tail = 0, b"\n\n"
        super().__init__()

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def take(self, data: bytes) -> bytes:
        if not data:
            return b""
        self._feed(data)
        out = b"".join(self._pieces)
        self._pieces.clear()
        self.size += len(out)
        self.tail = out if len(out) > TAIL else self.tail[-TAIL:] + out
        return out

    def at_event_boundary(self) -> bool:
        return self.tail.endswith(_EVENT_ENDS)


def is_empty(body: Body) -> bool:
    """Returns whether no byte of its content has come, whatever came of the framing."""
    return _NOTHING.fullmatch(body.tail) is not None if isinstance(body, ChunkedBodyAsSent) else not body.size
