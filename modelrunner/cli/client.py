"""The command line's client of the daemon's HTTP interface: small calls, lines of NDJSON and server-sent events.

It uses http.client because that starts in a quarter of the time of the usual libraries and has blocking reads that
Ctrl-C interrupts (`clientconnections.py`). Every exchange has a connection of its own, so no connection is stale;
closing it tells the daemon to stop the work."""

import http.client
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from modelrunner import wire
from modelrunner.cli.clientconnections import CONNECT_TIMEOUT, PinnedConnection, TcpConnection, UnixConnection
from modelrunner.errors import (
    AnswerBroken,
    BadRequest,
    DaemonUnreachable,
    Forbidden,
    ModelNotFound,
    ModelRunnerError,
    NotFound,
    TimedOut,
)

CALL_TIMEOUT = 30.0
_FINGERPRINT = re.compile("[0-9a-f]{64}")
_HEADER_TEXT = re.compile(r"[!-~]*")  # of a token in an Authorization header (RFC 6750)

T = TypeVar("T")


class ServerEvent(NamedTuple):
    """A server-sent event; the default `name` is "message"."""

    name: str
    data: str


class _FaultBody(msgspec.Struct):
    error: Any


class RawBody(NamedTuple):
    """A body that is not JSON; `length` is in bytes, None if it is unknown: then the body goes in chunks."""

    content_type: str
    length: int | None
    pieces: Iterable[bytes]


class HttpClient:
    """One daemon, at `unix:///path` or `http[s]://host[:port]`. `https://host:port#FINGERPRINT` accepts only a
    certificate with this SHA-256 fingerprint, whoever signed it. Raises `BadRequest` for another kind of address.

    The methods raise `DaemonUnreachable`, the error that the daemon sent (`NotFound` for every 404, otherwise the base
    class, with the daemon's message), `TimedOut`, or `AnswerBroken`.
    """

    def __init__(self, host: str, *, key: str | None = None) -> None:
        self.host = host
        self._key = key
        try:
            self._url = urlsplit(host)
            known = (self._url.scheme == "unix" and self._url.path and not self._url.netloc) or (
                self._url.scheme in ("http", "https") and self._url.hostname and (self._url.port or True)
            )
        except ValueError:  # a port that is not a number, or half of an IPv6 address
            self._url, known = urlsplit(""), False
        if key is not None and not _HEADER_TEXT.fullmatch(key):
            raise BadRequest("the API key has a character that no key has: set MODELRUNNER_API_KEY to the key alone")
        self._fingerprint = self._url.fragment.replace(":", "").lower()
        if self._fingerprint and not (self._url.scheme == "https" and _FINGERPRINT.fullmatch(self._fingerprint)):
            raise BadRequest(
                f"{host!r} does not end in a SHA-256 fingerprint of a certificate: write 64 hex digits after the `#`"
            )
        if not known:
            raise BadRequest(f"{host!r} is not the address of a daemon: write unix:///path or http://host:port")

    def fetch(self, method: str, path: str, body: Any = None, *, timeout: float | None = CALL_TIMEOUT) -> bytes:
        """Returns the body of the answer. `timeout` is the longest silence in seconds; None waits without a limit."""
        with self.open(method, path, body, timeout=timeout) as response:
            try:
                return response.read()
            except (OSError, http.client.HTTPException) as error:
                raise self._broken(error) from error

    def call(
        self, method: str, path: str, kind: type[T], body: Any = None, *, timeout: float | None = CALL_TIMEOUT
    ) -> T:
        """Returns the answer, decoded as `kind`."""
        return decode(self.fetch(method, path, body, timeout=timeout), kind)

    def progress(self, path: str, body: Any) -> Iterator[wire.Progress]:
        """Yields the lines of progress of the work that the POST starts; raises the error of an error line."""
        with self.open("POST", path, body, headers={"Accept": "application/json"}) as response:
            for text in self.lines(response):
                line = decode(text, wire.Progress)
                if line.type == "error":
                    raise failure(line.error or {"message": line.message})
                yield line

    def events(self, response: http.client.HTTPResponse) -> Iterator[ServerEvent]:
        """Yields server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), without
        comments."""
        name, data = "message", list[str]()
        for raw in self.lines(response):
            field, _, value = raw.decode("utf-8", "replace").rstrip("\r\n").partition(":")
            match field:
                case "event":
                    name = value.removeprefix(" ")
                case "data":
                    data.append(value.removeprefix(" "))
                case "" if not value:
                    if data:
                        yield ServerEvent(name, "\n".join(data))
                    name, data = "message", []

    @contextmanager
    def open(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Yields an answer with a status below 400. Read it within the block; the connection is closed at its end."""
        connection = self._connect()
        try:
            response = self._exchange(connection, method, path, body, headers or {}, timeout)
            try:
                yield response
            finally:
                response.close()  # it holds the socket too
        finally:
            connection.close()

    def lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """Yields lines as they come, until the answer is complete. Raises `AnswerBroken` if it breaks off."""
        rest = b""
        while piece := self.piece(response):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line + b"\n"
        if rest:
            yield rest

    def piece(self, response: http.client.HTTPResponse) -> bytes:
        """Returns the available bytes, at least one, b"" at the end. (`readline` of http.client takes a pause for the
        end.)"""
        try:
            return response.read1()
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error

    def _connect(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        match self._url.scheme:
            case "unix":
                connection = UnixConnection(self._url.path)
            case "https":
                connection = PinnedConnection(self._url.hostname or "", self._url.port, self._fingerprint)
            case _:
                connection = TcpConnection(self._url.hostname or "", self._url.port, timeout=CONNECT_TIMEOUT)
        try:
            connection.connect()
        except (OSError, UnicodeError) as error:  # UnicodeError: a host name that DNS cannot have
            connection.close()
            reason = getattr(error, "strerror", None) or error
            raise DaemonUnreachable(
                f"no daemon answers at {self.host} ({reason}): start one with `modelrunner serve`, or "
                "name another with --host"
            ) from error
        return connection

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str],
        timeout: float | None,
    ) -> http.client.HTTPResponse:
        content: bytes | Iterable[bytes] | None
        if isinstance(body, RawBody):
            content, sent = body.pieces, {"Content-Type": body.content_type}
            sent |= {"Content-Length": str(body.length)} if body.length is not None else {}
        else:
            content = None if body is None else msgspec.json.encode(body)
            sent = {"Content-Type": "application/json"} if content is not None else {}
        if self._key:
            sent["Authorization"] = f"Bearer {self._key}"
        connection.sock.settimeout(timeout)
        try:
            # A daemon that refuses a large body closes before it has read it all; its reason can still be read.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, path, content, {**sent, **headers})
            response = connection.getresponse()
            if response.status >= 400:
                raise self._refusal(response)
            return response
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error

    def _refusal(self, response: http.client.HTTPResponse) -> ModelRunnerError:
        try:
            fault = msgspec.json.decode(response.read(), type=_FaultBody).error
        except msgspec.MsgspecError:
            return AnswerBroken(
                f"{self.host} answered {response.status}, but not as a modelrunner daemon: check the address"
            )
        seconds = response.getheader("Retry-After", "")
        return failure(fault, response.status, float(seconds) if seconds.isdecimal() else None)

    def _broken(self, error: Exception) -> ModelRunnerError:
        if isinstance(error, TimeoutError):
            return TimedOut(f"the daemon at {self.host} takes too long to answer; see `modelrunner logs`")
        reason = str(error) or type(error).__name__
        return AnswerBroken(f"the answer of the daemon at {self.host} broke off ({reason}); see `modelrunner logs`")


def failure(fault: Any, status: int = 500, retry_after: float | None = None) -> ModelRunnerError:
    """Returns the exception for an error object of the daemon, from an answer or from the middle of a stream."""
    code, message = (fault.get("code"), fault.get("message")) if isinstance(fault, dict) else (None, fault)
    for kind in (ModelNotFound, Forbidden):
        if code == kind.code:
            return kind(str(message))
    missing = status == NotFound.status or str(code).endswith("not_found")
    error = (NotFound if missing else ModelRunnerError)(str(message), retry_after=retry_after)
    if isinstance(code, str):
        error.code = code  # type: ignore[misc]  # the daemon's own word for what happened
    return error


def decode(text: bytes | str, kind: type[T]) -> T:
    """Decodes JSON of the daemon as `kind`. Raises `AnswerBroken` if it has another shape."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise AnswerBroken(
            f"the daemon's answer cannot be parsed ({error}): compare the two versions with `modelrunner version`"
        ) from error


def path(*segments: str, **query: str | None) -> str:
    """Returns `/models/a%2Fb%3Ac/tag?repo=x` for `path("models", "a/b:c", "tag", repo="x")`; omits a None."""
    parameters = {name: value for name, value in query.items() if value is not None}
    return "/" + "/".join(quote(s, safe="") for s in segments) + (f"?{urlencode(parameters)}" if parameters else "")
