"""A request's head: parsed by llhttp, with the checks that llhttp leaves out. What passes here has one meaning only."""

import re

import httptools

from modelrunner.errors import BadRequest, HeadersTooLarge, MethodNotAllowed, NotImplementedHere, UpgradeRefused
from modelrunner.proxy.pipeline import HEADERS

_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/1\.([01])\r\n")
_ABSOLUTE = re.compile(r"http://([^/?#]*)(/[^#]*)?", re.IGNORECASE)
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"))
_REFUSED = frozenset(("CONNECT", "TRACE"))
_WANTED = {name.encode(): name for name in HEADERS}


def check_method(method: str) -> None:
    """Raises `MethodNotAllowed` or `NotImplementedHere` for what no route here takes."""
    if method in _REFUSED:
        raise MethodNotAllowed(f"{method} is not taken here")
    if method not in _METHODS:
        raise NotImplementedHere(f"the method {method[:40]} is not known here")


class RequestHead:
    """`path` is without a query; `authority` is the host of an absolute request target. `length` is the
    Content-Length, -1 if there is none. Raises `ModelRunnerError`."""

    def __init__(self, data: bytes, most_headers: int) -> None:
        line = _LINE.match(data)
        if line is None:
            raise BadRequest("the request line is not HTTP/1.1")
        self.method = line[1].decode()
        check_method(self.method)
        self.http_1_0 = line[3] == b"0"
        self.authority: str | None = None
        self.path = self._path(line[2].decode("ascii"))
        self.length = -1
        self.chunked = False
        self._fields: dict[str, str] = {}
        self.get = self._fields.get
        self._left = most_headers
        self._parse(data)

    def _path(self, target: str) -> str:
        if not target.startswith("/") and not (target == "*" and self.method == "OPTIONS"):
            found = _ABSOLUTE.fullmatch(target)
            if found is None:
                raise BadRequest("the request target is neither a path nor an http:// URL")
            self.authority, target = found[1], found[2] or "/"
        if "#" in target:
            raise BadRequest("the request target has a fragment")
        return target.partition("?")[0]

    def _parse(self, data: bytes) -> None:
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
        if "upgrade" in self._fields:
            raise UpgradeRefused("this server speaks HTTP/1.1 and nothing else on a connection")
        if "host" not in self._fields and not self.http_1_0:
            raise BadRequest("the request has no Host")
        if self.chunked and self.http_1_0:
            raise BadRequest("HTTP/1.0 has no transfer encodings")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._left -= 1
        if self._left < 0:
            raise HeadersTooLarge("the request has too many headers")
        lower = name.lower()
        wanted = _WANTED.get(lower)
        if wanted is not None:
            if wanted in self._fields:
                raise BadRequest(f"the header {wanted} is given twice")
            self._fields[wanted] = value.decode("latin-1")
        elif lower == b"content-length":
            self.length = int(value)
        elif lower == b"transfer-encoding":
            self.chunked = True
