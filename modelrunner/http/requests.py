"""A client's request as HTTP/1.1 (RFC 9112): its head, parsed by llhttp with the checks that llhttp leaves out, and its
body while it arrives. An accepted request has one meaning only."""

import re
import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

import httptools

from modelrunner.errors import BadRequest, HeadersTooLarge, MethodNotAllowed, NotImplementedHere

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]"
_LINE = re.compile(rf"({_TOKEN}+) ([!-~]+) HTTP/1\.([01])")
_UNFINISHED_LINE = re.compile(rf"{_TOKEN}{{1,40}}(?: (?:[!-~]+(?: [HTP/1.0]{{0,8}})?)?)?\r?".encode())
_ABSOLUTE = re.compile(r"https?://([^/?#]*)(/[^#]*)?", re.IGNORECASE)
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))
_REFUSED = frozenset(("CONNECT", "TRACE"))
_FRAMING = ("host", "content-length", "transfer-encoding")

NO_SESSIONS = (
    "there are no WebSockets and no realtime sessions here: POST to /v1/chat/completions or /v1/responses with stream "
    "set to true; /v1/audio/transcriptions writes sound down, and it comes as it is made from /v1/audio/speech"
)
"""What is said to a client that asks for a session in both directions."""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\n"
"""The first bytes of a client that speaks HTTP/2 without asking (RFC 9113, 3.4)."""
_EMPTY_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
_GOAWAY = 7
_HTTP_1_1_REQUIRED = 0xD

_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*+|[ \t]*+)")
_TRAILER = re.compile(rf"{_TOKEN}+:[\t\x20-\x7e\x80-\xff]*".encode("latin-1"))
_LONGEST_CHUNK_LINE = 4096
_LARGEST_TRAILER = 16 << 10
_SLOWEST = 500  # bytes per second, on average, after the first `idle` seconds: slow senders are cut off


class RequestLine(NamedTuple):
    """`target` is the path with its query, `path` the path alone; `authority` is the host of an absolute target."""

    method: str
    target: str
    path: str
    authority: str | None
    http_1_0: bool


def check_method(method: str) -> None:
    """Raises `MethodNotAllowed` or `NotImplementedHere` for a method that no route here takes."""
    if method in _REFUSED:
        raise MethodNotAllowed(f"the method {method} is not allowed here")
    if method not in _METHODS:
        raise NotImplementedHere(f"the method {method[:40]} is unknown")


@lru_cache(maxsize=256)
def request_line(line: bytes) -> RequestLine:
    """Parses a request line without its CR LF. Clients repeat the same few lines, so parsed lines are cached. Raises
    `BadRequest`, `MethodNotAllowed`, `NotImplementedHere`."""
    match = _LINE.fullmatch(line.decode("latin-1"))
    if match is None:
        raise BadRequest("the request line is not HTTP/1.1")
    method, target, authority = match[1], match[2], None
    check_method(method)
    if not target.startswith("/") and not (target == "*" and method == "OPTIONS"):
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None:
            raise BadRequest("the request target is neither a path nor a URL of http or https")
        authority, target = absolute[1], absolute[2] or "/"
    if "#" in target:
        raise BadRequest("the request target has a fragment")
    return RequestLine(method, target, target.partition("?")[0], authority, match[3] == "0")


def check_unfinished(data: bytes) -> None:
    """Checks an incomplete head: a client of another protocol (TLS, SSH, redis) is refused at its first bytes. Raises
    `BadRequest`, `MethodNotAllowed`, `NotImplementedHere`."""
    line, ended, _ = data.partition(b"\r\n")
    if ended:
        request_line(line)
    elif data != b"\r" and not _UNFINISHED_LINE.fullmatch(data):
        raise BadRequest("the request line is not HTTP/1.1")
    if data.count(b"\n") != data.count(b"\r\n"):
        raise BadRequest("lines must end in CR LF")


def names_of(fields: Iterable[str]) -> Mapping[bytes, str]:
    """Returns the fields that a `RequestHead` keeps: `fields`, in lower case, and those that frame a request."""
    return {name.encode(): name for name in (*fields, *_FRAMING)}


def path_of(head: bytes) -> str:
    """Returns the path in the first line of a request's head; "" without one, or if it is unsafe in a log."""
    path = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")[2].partition(" ")[0].partition("?")[0]
    return path if path.isprintable() else ""


class RequestHead:
    """A checked head. `get` returns a field of `names` (made by `names_of`) by its name in lower case, or None; no
    field may be repeated. `length` is the Content-Length in bytes, -1 without one. An Upgrade is ignored (RFC 9110,
    7.8), except to a WebSocket, whose client could do nothing with another answer. Raises `BadRequest`,
    `HeadersTooLarge`, `MethodNotAllowed`, `NotImplementedHere`."""

    def __init__(self, data: bytes, most_headers: int, names: Mapping[bytes, str]) -> None:
        self.line = line = request_line(data[: data.find(b"\r\n")])
        self._fields: dict[str, str] = {}
        self.get = get = self._fields.get
        self._left = most_headers
        self._to_websocket = False
        self._names = names
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(data[:-1])
            self.keep_alive: bool = parser.should_keep_alive()  # read before the end, with which the parser forgets it
            parser.feed_data(data[-1:])
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ if isinstance(error.__context__, BadRequest | HeadersTooLarge) else error from None
        except httptools.HttpParserError as error:
            raise BadRequest(f"not a valid HTTP request: {error}") from None
        self.length = int(get("content-length", "-1"))
        self.chunked = "transfer-encoding" in self._fields
        if self._to_websocket and line.method == "GET":
            raise NotImplementedHere(NO_SESSIONS)
        if get("host") is None and not line.http_1_0:
            raise BadRequest("the request has no Host")
        if self.chunked and line.http_1_0:
            raise BadRequest("HTTP/1.0 has no transfer encodings")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._left -= 1
        if self._left < 0:
            raise HeadersTooLarge("the request has too many headers")
        wanted = self._names.get(name.lower())
        if wanted is not None:
            if wanted in self._fields:
                raise BadRequest(f"the header {wanted} is given twice")
            self._fields[wanted] = value.decode("latin-1")
        elif name.lower() == b"upgrade" and value.lower().startswith(b"websocket"):
            self._to_websocket = True


def http2_refusal(reason: str) -> bytes:
    """Returns the frames that end a connection of HTTP/2: the client's library shows `reason`, or asks again in
    HTTP/1.1."""
    goaway = struct.pack(">II", 0, _HTTP_1_1_REQUIRED) + reason.encode()
    return _EMPTY_SETTINGS + struct.pack(">I", len(goaway))[1:] + bytes((_GOAWAY, 0, 0, 0, 0, 0)) + goaway


class RequestBody:
    """The body of one request while it arrives. `length` is in bytes, None for a body in chunks; `size` counts the
    received bytes without chunk framing. `done` is true after the last byte."""

    def __init__(self, length: int | None) -> None:
        self.length = length
        self.size = 0
        self.done = length == 0
        self._chunks = _Chunks() if length is None else None
        self._began = 0.0

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Splits `data` into the body's part, without framing, and the bytes after the body. Trailers are dropped.
        Raises `BadRequest` for malformed chunks."""
        if self._chunks is None:
            assert self.length is not None
            missing = self.length - self.size
            piece, rest = data[:missing], data[missing:]
            self.done = len(piece) == missing
        else:
            piece, rest = self._chunks.take(data)
            self.done = self._chunks.done
        self.size += len(piece)
        return piece, rest

    def deadline(self, now: float, idle: float, longest: float) -> float:
        """Returns the time limit of the body, on the clock of `now`: `idle` seconds after the last piece, or earlier if
        its average rate is too low, or if it takes `longest` seconds in all."""
        self._began = self._began or now
        return min(now + idle, self._began + longest, self._began + idle + self.size / _SLOWEST)


class _Chunks:
    """Decodes a chunked body (RFC 9112, 7.1). llhttp cannot do it: it does not report where a message ends if the next
    one follows in the same bytes."""

    def __init__(self) -> None:
        self.done = False
        self._kept = b""  # an unfinished line
        self._left = 0  # bytes of the chunk
        self._read_line = self._read_size

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        data = self._kept + data
        at, pieces = 0, []
        while at < len(data) and not self.done:
            if self._left:
                piece = data[at : at + self._left]
                pieces.append(piece)
                self._left -= len(piece)
                at += len(piece)
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                if len(data) - at > _LONGEST_CHUNK_LINE or self._is_overrun(data[at : at + 2]):
                    raise BadRequest("the chunks of the body are malformed")
                break
            self._read_line(data[at:end])
            at = end + 2
        self._kept = b"" if self.done else data[at:]
        return b"".join(pieces), data[at:] if self.done else b""

    def _is_overrun(self, data: bytes) -> bool:
        return self._read_line == self._read_chunk_end and not b"\r\n".startswith(data)

    def _read_size(self, line: bytes) -> None:
        match = _CHUNK_SIZE.fullmatch(line)
        if match is None:
            raise BadRequest("the chunks of the body are malformed: a chunk has no size")
        self._left = int(match[1], 16)
        self._trailer = 0
        self._read_line = self._read_chunk_end if self._left else self._read_trailer

    def _read_chunk_end(self, line: bytes) -> None:
        if line:
            raise BadRequest("the chunks of the body are malformed: a chunk is longer than its size")
        self._read_line = self._read_size

    def _read_trailer(self, line: bytes) -> None:
        self._trailer += len(line)
        if line and (self._trailer > _LARGEST_TRAILER or not _TRAILER.fullmatch(line)):
            raise BadRequest("the trailers of the body are too large, or malformed")
        self.done = not line
