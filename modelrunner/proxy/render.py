"""Answers that are ours: errors in the one shape, server-sent events, and the headers that every answer has."""

import itertools
import re
import secrets
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from modelrunner.errors import (
    BadRequest,
    EngineFailed,
    ModelRunnerError,
    NotFound,
    NotImplementedHere,
    PayloadTooLarge,
    QueueFull,
    Unavailable,
)
from modelrunner.proxy.wire import Header

JSON: Header = (b"Content-Type", b"application/json")
EVENT_STREAM: tuple[Header, ...] = (
    (b"Content-Type", b"text/event-stream"),
    (b"Cache-Control", b"no-store"),
    (b"X-Accel-Buffering", b"no"),  # nginx in front of us passes each event on at once
)
_HANDED_ON = {
    b"content-type": b"Content-Type",
    b"retry-after": b"Retry-After",
    b"content-language": b"Content-Language",
}
_CLIENT_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_numbers = itertools.count(1)
_process = secrets.token_hex(6)

_OF_STATUS: dict[int, type[ModelRunnerError]] = {
    404: NotFound,
    413: PayloadTooLarge,
    429: QueueFull,
    501: NotImplementedHere,
    503: Unavailable,
}


def harmless_id(given: str | None) -> str | None:
    """The request ID that a client sent, if it can stand in logs and headers."""
    return given if given is not None and _CLIENT_ID.fullmatch(given) else None


def new_request_id() -> str:
    return f"{_process}{next(_numbers):010x}"


def id_line(request_id: str) -> bytes:
    """Of an answer's head, and of the request to the engine."""
    return b"X-Request-ID: %b\r\n" % request_id.encode()


def server_timing(queue: float, load: float, proxy: float) -> bytes:
    """The header's line; all in seconds."""
    if not queue and not load:  # a warm request
        return b"Server-Timing: queue;dur=0.0, load;dur=0.0, proxy;dur=%.3f\r\n" % (proxy * 1e3)
    times = (queue * 1e3, load * 1e3, max(0.0, proxy) * 1e3)
    return b"Server-Timing: queue;dur=%.1f, load;dur=%.1f, proxy;dur=%.3f\r\n" % times


def error_answer(error: ModelRunnerError, request_id: str) -> tuple[tuple[Header, ...], bytes]:
    """Headers, less the request's ID, and body."""
    headers: tuple[Header, ...] = (JSON,)
    if error.retry_after is not None:
        headers += ((b"Retry-After", b"%d" % max(1, round(error.retry_after))),)
    return headers, msgspec.json.encode(error.as_dict(request_id))


def error_event(error: ModelRunnerError, request_id: str) -> bytes:
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(error.as_dict(request_id))


def progress_event(progress: dict[str, Any], waited: float) -> bytes:
    """`waited` in seconds."""
    told = msgspec.json.encode({**progress, "waited": round(waited, 3)})
    return b"event: modelrunner.progress\ndata: %b\n\n" % told


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@lru_cache(maxsize=256)
def engine_headers(headers: tuple[Header, ...], variant: str) -> tuple[Header, ...]:
    """Of an engine's answer, what the client may see; and how its runner differs from what was configured, if it
    does."""
    found = [(_HANDED_ON[name], value) for name, value in headers if name in _HANDED_ON]
    if (b"Content-Type", b"text/event-stream") in found:
        found += EVENT_STREAM[1:]
    return (*found, *variant_header(variant))


def variant_header(variant: str) -> tuple[Header, ...]:
    """`variant` is the label of the runner's, "" for none."""
    return ((b"X-Modelrunner-Variant", " ".join(variant.split()).encode("ascii", "replace")),) if variant else ()


def engine_error(status: int, body: bytes, blames_client: Callable[[int, str], bool]) -> ModelRunnerError:
    """An engine's refusal in our shape, with its message. What is wrong with the engine rather than with the request
    becomes 502: 500 would be a fault of ours. `blames_client` is the backend's."""
    message = _message(body) or f"the engine answered with status {status}"
    if status in (401, 403, 407) or (status >= 500 and status not in _OF_STATUS):
        return BadRequest(message) if status >= 500 and blames_client(status, message) else EngineFailed(message)
    if status < 400:
        return EngineFailed(f"the engine answered with status {status}, which is no answer to this request")
    kind = _OF_STATUS.get(status, BadRequest)
    return kind(message, retry_after=1.0 if status in (429, 503) else None)


def _message(body: bytes) -> str:
    """llama.cpp and OpenAI: `{"error": {"message"}}`; vLLM once `{"message"}`; FastAPI `{"detail"}`."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return body[:500].decode("utf-8", "replace").strip()
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return found[:4000] if isinstance(found, str) else ""
