"""The bytes of a response's head."""

from http import HTTPStatus
from time import time
from wsgiref.handlers import format_date_time

from modelrunner.proxy.render import Header

_STATUS_LINES = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in HTTPStatus}

_VARY: tuple[Header, ...] = ((b"Vary", b"Origin"),)


def response_head(status: int, headers: list[Header], length: int | None, *, http_1_0: bool, keep_alive: bool) -> bytes:
    """With its empty line. A `length` of None means chunks, or for HTTP/1.0 a body until the end of the connection."""
    lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status, _date()]
    lines += [b"%b: %b\r\n" % header for header in headers]
    if length is not None:
        lines.append(b"Content-Length: %d\r\n" % length)
    elif not http_1_0:
        lines.append(b"Transfer-Encoding: chunked\r\n")
    if not keep_alive:
        lines.append(b"Connection: close\r\n\r\n")
    elif http_1_0:
        lines.append(b"Connection: keep-alive\r\n\r\n")
    else:
        lines.append(b"\r\n")
    return b"".join(lines)


def cors(origin: str | None) -> tuple[Header, ...]:
    """What a browser asks of an answer to an allowed `origin`."""
    if origin is None:
        return _VARY
    return (
        *_VARY,
        (b"Access-Control-Allow-Origin", origin.encode("latin-1")),
        (b"Access-Control-Expose-Headers", b"X-Request-ID, Server-Timing, Retry-After"),
    )


class _Clock:
    """The Date header, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def __call__(self) -> bytes:
        now = int(time())
        if now != self._second:
            self._second = now
            self._line = b"Date: %b\r\n" % format_date_time(now).encode()
        return self._line


_date = _Clock()
