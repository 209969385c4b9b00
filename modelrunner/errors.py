"""Every error that modelrunner raises on purpose, with the HTTP status it becomes (docs/api.md: one shape for all).

ModelRunnerError 500
├── BadRequest 400 ── InvalidReference, ContextTooLong
├── Unauthorized 401, Forbidden 403
├── NotFound 404 ── ModelNotFound, BackendNotFound, RouteNotFound, RunnerNotFound, KeyNotFound, RequestNotFound
├── MethodNotAllowed 405, LengthRequired 411, PayloadTooLarge 413, UnsupportedMediaType 415, ExpectationFailed 417
├── HeadersTooLarge 431, NotImplementedHere 501
├── Conflict 409, BackendUnavailable 412, Misdirected 421
├── UnsupportedModel 422 ── InvalidModel, UntrustedModel
├── QueueFull 429, RateLimited 429
├── EngineFailed 502 ── BackendExited ── OutOfMemory; EngineProtocolError; BackendFaulty; HostLost
├── SourceFailed 502      a registry or hub did not answer as it should
├── ToolServerFailed 502  an MCP server did not
├── Unavailable 503 ── ShuttingDown, BackingOff
├── RequestCancelled 503
├── TimedOut 504 ── RequestTooLong
├── InsufficientMemory 507, InsufficientDisk 507 ── QuotaExceeded
├── FolderMissing 503     a disk with models is not mounted
├── StorageFailed 500     the disk failed, or the data is of a newer version
└── DaemonUnreachable, AnswerBroken: the command line's own, for a missing or an incomplete answer

A class knows its `status`, its `code` (stable, for programs) and its `type` (one of OpenAI's, except for a full
context). Handlers raise errors; one place renders them. A message says what happened and what to do next.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self


class ModelRunnerError(Exception):
    """Base of the tree. `param` names the wrong field of the request, if there is one; `retry_after` is in seconds and
    becomes the Retry-After header. `details` are further members of the error object. A `permanent` error means that
    the same request would fail again."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    permanent: ClassVar[bool] = False
    details: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    def saying(self, message: str) -> Self:
        """Returns the same error with another message."""
        error = type(self).__new__(type(self), message)
        error.__dict__.update(self.__dict__)
        error.message = message
        return error

    def as_dict(self, request_id: str) -> dict[str, Any]:
        """Returns the body of an error answer."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code, **self.details}
        return {"error": error, "request_id": request_id}


def code_of(error: BaseException) -> str:
    """Returns the code of an error; an error of another class is a fault of the daemon."""
    return error.code if isinstance(error, ModelRunnerError) else ModelRunnerError.code


class BadRequest(ModelRunnerError):
    status, code, type = 400, "bad_request", "invalid_request_error"


class InvalidReference(BadRequest):
    """A text that is not a model reference, tag or digest."""

    code = "invalid_reference"


class ContextTooLong(BadRequest):
    """The prompt does not fit in the model's context. `n_prompt_tokens` and `n_ctx` are in tokens, None if unknown. The
    message gets the command that makes the context large enough for this prompt and an answer of a fourth of it.

    The code is OpenAI's, which its clients look for; the type and the figures are llama.cpp's (tools/server)."""

    code, type = "context_length_exceeded", "exceed_context_size_error"

    def __init__(self, message: str, n_prompt_tokens: int | None = None, n_ctx: int | None = None) -> None:
        size = "N" if n_prompt_tokens is None else -(-n_prompt_tokens * 5 // 4096) * 1024
        larger = f"`modelrunner configure MODEL --context-size {size} --restart` makes room where the model can have it"
        super().__init__(f"{message.rstrip('.')}; {larger}", param="messages")
        self.details = {"n_prompt_tokens": n_prompt_tokens, "n_ctx": n_ctx}


class Unauthorized(ModelRunnerError):
    """The request has no API key, or one that is unknown or has expired."""

    status, code, type = 401, "unauthorized", "authentication_error"


class Forbidden(ModelRunnerError):
    """The request is not allowed: by its Host or Origin, by the rights of its API key, or over TCP."""

    status, code, type = 403, "forbidden", "permission_error"


class NotFound(ModelRunnerError):
    status, code, type = 404, "not_found", "not_found_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class BackendNotFound(NotFound):
    code = "backend_not_found"


class RouteNotFound(NotFound):
    code = "route_not_found"


class RunnerNotFound(NotFound):
    code = "runner_not_found"


class KeyNotFound(NotFound):
    code = "key_not_found"


class RequestNotFound(NotFound):
    code = "request_not_found"


class MethodNotAllowed(ModelRunnerError):
    status, code, type = 405, "method_not_allowed", "invalid_request_error"


class LengthRequired(ModelRunnerError):
    status, code, type = 411, "length_required", "invalid_request_error"


class PayloadTooLarge(ModelRunnerError):
    status, code, type = 413, "payload_too_large", "invalid_request_error"


class UnsupportedMediaType(ModelRunnerError):
    status, code, type = 415, "unsupported_media_type", "invalid_request_error"


class ExpectationFailed(ModelRunnerError):
    status, code, type = 417, "expectation_failed", "invalid_request_error"


class HeadersTooLarge(ModelRunnerError):
    status, code, type = 431, "headers_too_large", "invalid_request_error"


class RateLimited(ModelRunnerError):
    """An API key, or an address, has used up a limit."""

    status, code, type = 429, "rate_limited", "rate_limit_error"


class NotImplementedHere(ModelRunnerError):
    """The method has no route, the mode has no backend, or the engine lacks the endpoint."""

    status, code, type = 501, "not_implemented", "invalid_request_error"
    permanent = True


class Conflict(ModelRunnerError):
    """The object is in use and `force` was not given."""

    status, code, type = 409, "in_use", "invalid_request_error"
    permanent = True


class BackendUnavailable(ModelRunnerError):
    """The backend is known but not installed, or cannot run on this machine."""

    status, code, type = 412, "backend_unavailable", "invalid_request_error"


class Misdirected(ModelRunnerError):
    """A runner or backend was asked for a model that it cannot serve; the message names where to go."""

    status, code, type = 421, "misdirected_request", "invalid_request_error"


class UnsupportedModel(ModelRunnerError):
    """No backend here can run this format or media type."""

    status, code, type = 422, "unsupported_model", "invalid_request_error"


class InvalidModel(UnsupportedModel):
    """The file is cut, corrupt or hostile. The message begins with "invalid model:"."""

    code = "invalid_model"

    def __init__(self, reason: str) -> None:
        super().__init__(f"invalid model: {reason}")


class UntrustedModel(UnsupportedModel):
    """The model is not signed, or not by a required key."""

    code = "untrusted_model"


class QueueFull(ModelRunnerError):
    status, code, type = 429, "queue_full", "rate_limit_error"


class EngineFailed(ModelRunnerError):
    status, code = 502, "engine_failed"


class HostLost(EngineFailed):
    """The machine of the engine does not answer: no fault of the model's, nor of a request's."""


class BackendExited(EngineFailed):
    """The engine's process ended. `returncode` is negative for a signal, None where it could not be learned; `tail`
    is the end of its log."""

    code = "engine_exited"

    def __init__(self, returncode: int | None, tail: str = "", *, message: str | None = None) -> None:
        how = (
            "ended"
            if returncode is None
            else f"was ended by signal {-returncode}"
            if returncode < 0
            else f"exited with {returncode}"
        )
        super().__init__(message or f"the engine {how}")
        self.returncode = returncode
        self.tail = tail


class OutOfMemory(BackendExited):
    """The engine's process ended because memory ran out: an allocation failed, or the system killed it."""

    code = "out_of_memory"


class EngineProtocolError(EngineFailed):
    """The engine's answer is not valid HTTP for the request. `written` are the client's bytes of the received piece
    before the fault."""

    code = "engine_protocol_error"
    written = b""


class BackendFaulty(EngineFailed):
    """The backend `name` broke its contract in a call of `method`: it raised, was late, or returned nonsense."""

    code = "backend_faulty"

    def __init__(self, name: str, method: str, how: str) -> None:
        super().__init__(f"backend {name} is faulty: its `{method}` {how}; update or remove that backend")


class ToolServerFailed(ModelRunnerError):
    """An MCP server could not be reached, ended, or took too long."""

    status, code = 502, "tool_server_failed"


class SourceFailed(ModelRunnerError):
    """A registry, index or hub could not be reached or answered nonsense."""

    status, code = 502, "source_failed"


class Unavailable(ModelRunnerError):
    """The request cannot be served now. Retry-After is `pause` seconds unless a better time is known."""

    status, code = 503, "unavailable"
    pause: ClassVar[float] = 1.0

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message, param=param, retry_after=self.pause if retry_after is None else retry_after)


class ShuttingDown(Unavailable):
    code = "shutting_down"
    pause = 5.0  # for a restart


class BackingOff(Unavailable):
    """The last start of this model failed; the next attempt comes later."""

    code = "backing_off"


class RequestCancelled(ModelRunnerError):
    """The request was cancelled with `modelrunner requests cancel`."""

    status, code = 503, "request_cancelled"
    permanent = True


class TimedOut(ModelRunnerError):
    """A load or a wait in the queue passed its limit."""

    status, code = 504, "timed_out"


class RequestTooLong(TimedOut):
    """The engine worked longer on a request than the API key or the model allows."""

    code, permanent = "request_too_long", True


class InsufficientMemory(ModelRunnerError):
    status, code = 507, "insufficient_memory"
    permanent = True


class InsufficientDisk(ModelRunnerError):
    status, code = 507, "insufficient_disk"
    permanent = True


class QuotaExceeded(InsufficientDisk):
    """The models would have more bytes than `models_quota`."""


class FolderMissing(ModelRunnerError):
    """The folder of a model, one of `model_dirs`, cannot be used now."""

    status, code, permanent = 503, "folder_missing", True


class StorageFailed(ModelRunnerError):
    """The disk gave an error, or the data directory belongs to a newer release."""

    status, code = 500, "storage_failed"


class DaemonUnreachable(ModelRunnerError):
    """No daemon answers at the client's address. A daemon never sends it."""

    status, code = 503, "daemon_unreachable"


class AnswerBroken(ModelRunnerError):
    """The connection to the daemon ended in the middle of an answer, or the answer is invalid. A daemon never sends
    it."""

    status, code = 502, "answer_broken"
