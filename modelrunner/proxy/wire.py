"""The bytes of a response's head, and the type that every answer's headers have."""

from functools import lru_cache
from http import HTTPStatus
from time import time
from wsgiref.handlers import format_date_time

Header = tuple[bytes, bytes]
"""Name and value of one header field of an answer."""

_STATUS_LINES = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}

_EXPOSED = b"X-Request-ID, Server-Timing, Retry-After, X-Modelrunner-Variant, X-Modelrunner-Ignored"
_VARY: tuple[Header, ...] = ((b"Vary", b"Origin"),)
_CHUNKED = b"Transfer-Encoding: chunked\r\n"


def response_head(
    status: int, headers: tuple[Header, ...], own: bytes, length: int | None, http_1_0: bool, keep_alive: bool
) -> bytes:
    """The head of an answer, with its empty line. `headers` are fields that many answers share, `own` the lines of
    this answer alone. `length` is that of the body in bytes; None means chunks, or for HTTP/1.0 a body that ends with
    the connection."""
    body = b"Content-Length: %d\r\n" % length if length is not None else b"" if http_1_0 else _CHUNKED
    return b"%b%b%b%b\r\n" % (_start(status, headers, http_1_0, keep_alive), _date(int(time())), own, body)


@lru_cache(maxsize=256)
def _start(status: int, headers: tuple[Header, ...], http_1_0: bool, keep_alive: bool) -> bytes:
    lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status]
    lines += [b"%b: %b\r\n" % header for header in headers]
    if not keep_alive:
        lines.append(b"Connection: close\r\n")
    elif http_1_0:
        lines.append(b"Connection: keep-alive\r\n")
    return b"".join(lines)


def cors(origin: str | None) -> tuple[Header, ...]:
    """The CORS fields of an answer to an allowed `origin`; None for a client that is no web page."""
    if origin is None:
        return _VARY
    return (
        *_VARY,
        (b"Access-Control-Allow-Origin", origin.encode("latin-1")),
        (
            b"Access-Control-Expose-Headers",
            _EXPOSED,
        ),
    )


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return b"Date: %b\r\n" % format_date_time(second).encode()
