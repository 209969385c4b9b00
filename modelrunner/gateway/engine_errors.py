"""An engine's refusal of a request, as an error of ours."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
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
from modelrunner.http.answers import Header

ERROR_BODY_LIMIT = 256 << 10
"""The limit of an engine's error answer, in bytes."""
_LONGEST_PAUSE = 86_400.0
_OF_STATUS: dict[int, type[ModelRunnerError]] = {
    404: NotFound,
    413: PayloadTooLarge,
    429: QueueFull,
    501: NotImplementedHere,
    503: Unavailable,
}

RequestError = Callable[[int, str, Mapping[str, Any]], Awaitable[ModelRunnerError | None]]
"""As `Runner.request_error`."""


class EngineRefused(Exception):
    """An engine's stream had an error instead of an answer."""

    def __init__(self, refusal: "EngineRefusal") -> None:
        self.refusal = refusal


class EngineRefusal:
    """An engine's error answer while it arrives."""

    def __init__(self, status: int, headers: Iterable[Header] = ()) -> None:
        self._status = status
        self._pause = next((_seconds(value) for name, value in headers if name == b"retry-after"), None)
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
        if (error := await request_error(status, message, fields)) is not None:
            error.retry_after = self._pause or error.retry_after
            return error
        if status in (401, 403, 407) or (status >= 500 and status not in _OF_STATUS):
            return EngineFailed(message)
        kind = _OF_STATUS.get(status, BadRequest)
        return kind(message, retry_after=(self._pause or 1.0) if status in (429, 503) else None)


def _seconds(value: bytes) -> float | None:
    """Returns a number of seconds, at most a day; None for a date."""
    return min(float(value), _LONGEST_PAUSE) if value.isdigit() and len(value) < 10 else None


def _fields(body: bytes) -> Mapping[str, Any]:
    """Returns the error object. llama.cpp, vLLM and OpenAI send `{"error": {"message", ...}}`, FastAPI `{"detail"}`;
    any other text is the message itself."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        if body.lstrip().startswith(b"<"):  # a page for people
            return {}
        return {"message": body[:500].decode("utf-8", "replace").strip()}
    if not isinstance(fields, dict):
        return {}
    inner = fields.get("error")
    return inner if isinstance(inner, dict) else fields


def _message(fields: Mapping[str, Any]) -> str:
    message = next((fields[key] for key in ("message", "detail", "error") if key in fields), "")
    return message[:4000] if isinstance(message, str) else ""
