"""A request's head: parsed by llhttp, with the checks that llhttp leaves out. What passes here has one meaning only."""

import re
from functools import lru_cache
from typing import NamedTuple

import httptools

from modelrunner.errors import BadRequest, HeadersTooLarge, MethodNotAllowed, NotImplementedHere, UpgradeRefused
from modelrunner.proxy.pipeline import HEADERS
from modelrunner.proxy.routes import Route, match

_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/1\.([01])")
_ABSOLUTE = re.compile(r"http://([^/?#]*)(/[^#]*)?", re.IGNORECASE)
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))
_REFUSED = frozenset(("CONNECT", "TRACE"))
_WANTED = {name.encode(): name for name in (*HEADERS, "content-length", "transfer-encoding")}


class RequestLine(NamedTuple):
    """`path` is without a query; `authority` is the host of an absolute target; `route` is set for inference only."""

    method: str
    path: str
    authority: str | None
    http_1_0: bool
    route: Route | None


def check_method(method: str) -> None:
    """Raises `MethodNotAllowed` or `NotImplementedHere` for what no route here takes."""
    if method in _REFUSED:
        raise MethodNotAllowed(f"{method} is not taken here")
    if method not in _METHODS:
        raise NotImplementedHere(f"the method {method[:40]} is not known here")


@lru_cache(maxsize=256)
def request_line(line: bytes) -> RequestLine:
    """Without its CR LF. Clients send the same few lines again and again, so they are remembered. Raises
    `BadRequest`, `MethodNotAllowed`, `NotImplementedHere`."""
    found = _LINE.fullmatch(line.decode("latin-1"))
    if found is None:
        raise BadRequest("the request line is not HTTP/1.1")
    method, target, authority = found[1], found[2], None
    check_method(method)
    if not target.startswith("/") and not (target == "*" and method == "OPTIONS"):
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None:
            raise BadRequest("the request target is neither a path nor an http:// URL")
        authority, target = absolute[1], absolute[2] or "/"
    if "#" in target:
        raise BadRequest("the request target has a fragment")
    path = target.partition("?")[0]
    return RequestLine(method, path, authority, found[3] == "0", match(path) if method == "POST" else None)


class RequestHead:
    """`get` gives a header of `HEADERS` by its name in lower case. `length` is the Content-Length, -1 if there is none.
    Raises `ModelRunnerError`."""

    def __init__(self, data: bytes, most_headers: int) -> None:
        self.line = line = request_line(data[: data.find(b"\r\n")])
        self._fields: dict[str, str] = {}
        self.get = get = self._fields.get
        self._left = most_headers
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # refused below
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ if isinstance(error.__context__, BadRequest | HeadersTooLarge) else error from None
        except httptools.HttpParserError as error:
            raise BadRequest(f"not a valid HTTP request: {error}") from None
        self.keep_alive: bool = parser.should_keep_alive()
        self.length = int(get("content-length", "-1"))
        self.chunked = "transfer-encoding" in self._fields
        if get("upgrade") is not None:
            raise UpgradeRefused("this server speaks HTTP/1.1 and nothing else on a connection")
        if get("host") is None and not line.http_1_0:
            raise BadRequest("the request has no Host")
        if self.chunked and line.http_1_0:
            raise BadRequest("HTTP/1.0 has no transfer encodings")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._left -= 1
        if self._left < 0:
            raise HeadersTooLarge("the request has too many headers")
        wanted = _WANTED.get(name.lower())
        if wanted is not None:
            if wanted in self._fields:
                raise BadRequest(f"the header {wanted} is given twice")
            self._fields[wanted] = value.decode("latin-1")
