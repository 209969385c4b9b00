"""The header lines that the answers of every family share, and the translation of an engine's error answer."""

import itertools
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from modelrunner.errors import (
    BadRequest,
    EngineFailed,
    EngineProtocolError,
    ModelRunnerError,
    NotFound,
    NotImplementedHere,
    PayloadTooLarge,
    QueueFull,
    Unavailable,
)
from modelrunner.gateway.dialects.dialect import EVENT_STREAM
from modelrunner.http.answers import Header

_HANDED_ON = {
    b"content-type": b"Content-Type",
    b"retry-after": b"Retry-After",
    b"content-language": b"Content-Language",
}
ERROR_BODY_LIMIT = 256 << 10
"""The limit of an engine's error answer, in bytes."""
_CLIENT_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_UNSAFE = re.compile(r"[^\w.-]", re.ASCII)
_LONGEST, _MOST = 64, 32  # characters of an ignored field's name, and names: clients choose them

_OF_STATUS: dict[int, type[ModelRunnerError]] = {
    404: NotFound,
    413: PayloadTooLarge,
    429: QueueFull,
    501: NotImplementedHere,
    503: Unavailable,
}


def harmless_id(given: str | None) -> str | None:
    """Returns the client's request ID if it is safe in logs and headers."""
    return given if given is not None and _CLIENT_ID.fullmatch(given) else None


_LAST_DIGITS = tuple(f"{number:02x}" for number in range(256))
_BEGINNINGS = map((secrets.token_hex(6) + "{:08x}").format, itertools.count())
new_request_id: Callable[[], str] = itertools.chain.from_iterable(
    map(beginning.__add__, _LAST_DIGITS) for beginning in _BEGINNINGS
).__next__
"""Returns twelve random digits of the process, then ten that count. This is an iterator's method, and formats 256 IDs
at once, since every request calls it."""
ID_LINE = b"X-Request-ID: %b\r\n"
"""The line of a request's ID in the answer's head, and in the request to the engine."""


def id_line(request_id: str) -> bytes:
    """Returns the line of the X-Request-ID header."""
    return ID_LINE % request_id.encode()


def server_timing(queue: float, load: float, proxy: float) -> bytes:
    """Returns the line of the Server-Timing header; all times are in seconds."""
    times = (queue * 1e3, load * 1e3, max(0.0, proxy) * 1e3)
    return b"Server-Timing: queue;dur=%.1f, load;dur=%.1f, proxy;dur=%.3f\r\n" % times


WARM_TIMINGS = tuple(server_timing(0.0, 0.0, microseconds / 1e6) for microseconds in range(1000))
"""The lines of requests that did not wait, by the proxy's time in microseconds."""


def chunk(data: bytes) -> bytes:
    """Returns `data`, which is not empty, as one chunk (RFC 9112, 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


@lru_cache(maxsize=256)
def engine_headers(
    headers: tuple[Header, ...], variant: str, ignored: tuple[str, ...], model: str
) -> tuple[Header, ...]:
    """Returns the engine's headers that the client may see, and our own, as of `own_headers`."""
    found = [(_HANDED_ON[name], value) for name, value in headers if name in _HANDED_ON]
    if any(value.startswith(b"text/event-stream") for _, value in found):
        found += EVENT_STREAM[1:]
    return (*found, *own_headers(variant, ignored, model))


def own_headers(variant: str, ignored: tuple[str, ...] = (), model: str = "") -> tuple[Header, ...]:
    """Returns our own fields. `variant` says how the runner differs from its configuration, "" if it does not;
    `ignored` are the fields that the engine ignores; `model` is the model that was chosen for an alias, or ""."""
    headers: tuple[Header, ...] = ()
    if variant:
        headers += ((b"X-Modelrunner-Variant", " ".join(variant.split()).encode("ascii", "replace")),)
    if model:
        headers += ((b"X-Modelrunner-Model", model.encode("ascii", "replace")),)
    if ignored:
        names = ", ".join([_UNSAFE.sub("?", name[:_LONGEST]) for name in ignored[:_MOST]])
        headers += ((b"X-Modelrunner-Ignored", names.encode()),)
    return headers


def one_line_each(headers: tuple[Header, ...]) -> tuple[Header, ...]:
    """Returns the fields with repeated names joined to lists, one line for each name (RFC 9110, 5.3)."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        found[name] = found[name] + b", " + value if name in found else value
    return tuple(found.items())


RequestError = Callable[[int, str, Mapping[str, Any]], Awaitable[ModelRunnerError | None]]
"""As `Runner.request_error`."""


class EngineRefused(Exception):
    """An engine's stream had an error instead of an answer."""

    def __init__(self, refusal: "EngineRefusal") -> None:
        self.refusal = refusal


class EngineRefusal:
    """An engine's error answer while it arrives."""

    def __init__(self, status: int) -> None:
        self._status = status
        self._body = bytearray()

    def add(self, data: bytes) -> None:
        """Raises `EngineProtocolError` for a body that is too large."""
        self._body += data
        if len(self._body) > ERROR_BODY_LIMIT:
            raise EngineProtocolError("the engine's error is too large to pass on")

    async def error(self, request_error: RequestError) -> ModelRunnerError:
        """Returns our error with the engine's message. The backend's `request_error` comes first. A fault of the engine
        rather than of the request becomes 502; 500 would be a fault of the daemon."""
        status, fields = self._status, _fields(bytes(self._body))
        if status < 400:
            return EngineFailed(f"the engine answered with status {status}, which is no answer to this request")
        message = _message(fields) or f"the engine answered with status {status}"
        if (found := await request_error(status, message, fields)) is not None:
            return found
        if status in (401, 403, 407) or (status >= 500 and status not in _OF_STATUS):
            return EngineFailed(message)
        kind = _OF_STATUS.get(status, BadRequest)
        return kind(message, retry_after=1.0 if status in (429, 503) else None)


def _fields(body: bytes) -> Mapping[str, Any]:
    """Returns the error object. llama.cpp, vLLM and OpenAI send `{"error": {"message", ...}}`, FastAPI `{"detail"}`;
    any other text is the message itself."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {"message": body[:500].decode("utf-8", "replace").strip()}
    if not isinstance(found, dict):
        return {}
    inner = found.get("error")
    return inner if isinstance(inner, dict) else found


def _message(fields: Mapping[str, Any]) -> str:
    found = next((fields[key] for key in ("message", "detail", "error") if key in fields), "")
    return found[:4000] if isinstance(found, str) else ""
