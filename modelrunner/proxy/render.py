"""Answers that are ours: errors in the one shape, server-sent events, and the headers that every answer has."""

import itertools
import re
import secrets
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

Header = tuple[bytes, bytes]
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
# Engines answer some requests that are the client's fault with 500; llama-server does for an input beyond its batch.
_CLIENTS_FAULT = ("too large to process", "exceeds the available context size", "context length")


def new_request_id(given: str | None = None) -> str:
    """The client's own where it sent a harmless one."""
    if given is not None and _CLIENT_ID.fullmatch(given):
        return given
    return f"{_process}{next(_numbers):010x}"


def error_answer(error: ModelRunnerError, request_id: str) -> tuple[list[Header], bytes]:
    """Headers and body."""
    headers = [JSON, (b"X-Request-ID", request_id.encode())]
    if error.retry_after is not None:
        headers.append((b"Retry-After", b"%d" % max(1, round(error.retry_after))))
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
def engine_headers(headers: tuple[Header, ...]) -> tuple[Header, ...]:
    """Of an engine's answer, what the client may see."""
    found = [(_HANDED_ON[name], value) for name, value in headers if name in _HANDED_ON]
    if (b"Content-Type", b"text/event-stream") in found:
        found += EVENT_STREAM[1:]
    return tuple(found)


def engine_error(status: int, body: bytes) -> ModelRunnerError:
    """An engine's refusal in our shape, with its message. What is wrong with the engine rather than with the request
    becomes 502: 500 would be a fault of ours."""
    message = _message(body) or f"the engine answered with status {status}"
    if status in (401, 403, 407) or (status >= 500 and status not in _OF_STATUS):
        blame = any(words in message for words in _CLIENTS_FAULT)
        return BadRequest(message) if blame else EngineFailed(message)
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
