"""OpenAI's lists of models, files, batches and items, with the fields that modelrunner adds, and Anthropic's list of
models (https://docs.claude.com/en/api/models-list)."""

from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

import msgspec

from modelrunner.wire.models import ModelCheck

T = TypeVar("T")


class OpenAIModel(msgspec.Struct, frozen=True):
    """An entry of `GET /v1/models`. `created` is in Unix seconds; `context_window` is the most tokens of one
    request; `check` is null for a model that was not checked as it is now."""

    id: str
    created: int
    architecture: str | None
    context_window: int | None
    capabilities: list[str]
    backend: str | None
    check: ModelCheck | None
    object: Literal["model"] = "model"
    owned_by: str = "modelrunner"


class OpenAIModels(msgspec.Struct, frozen=True):
    """`GET /v1/models`: an entry for each name of each model."""

    data: list[OpenAIModel]
    object: Literal["list"] = "list"


class SpeechVoice(msgspec.Struct, frozen=True):
    """`id` is the `voice` of a request for speech, `model` its model."""

    id: str
    name: str
    model: str


class SpeechVoices(msgspec.Struct, frozen=True):
    """`GET /v1/audio/voices`: the voices of each model that speaks."""

    voices: list[SpeechVoice]


class DeletedObject(msgspec.Struct, frozen=True):
    id: str
    object: Literal["model", "file", "response"]
    deleted: bool = True


class FileStatus(msgspec.Struct, frozen=True):
    """A file. `bytes` is its size, `created_at` Unix seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class FileForm(msgspec.Struct, frozen=True):
    """The body of `POST /v1/files`, as multipart/form-data."""

    file: bytes
    purpose: Literal["batch", "user_data", "assistants", "fine-tune", "vision", "evals"] = "batch"


class BatchRequest(msgspec.Struct, frozen=True):
    """The body of `POST /v1/batches`, with OpenAI's fields; further fields are ignored. `completion_window` is a time
    such as 24h or 7d."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None


class BatchStatus(msgspec.Struct, frozen=True):
    """A batch. Times are in Unix seconds, null for a step that was not reached; `request_counts` has total, completed
    and failed."""

    id: str
    status: str
    created_at: int
    request_counts: dict[str, int]
    endpoint: str = ""
    input_file_id: str = ""
    completion_window: str = ""
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: dict[str, Any] | None = None
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    metadata: dict[str, str] | None = None
    object: Literal["batch"] = "batch"


class ListPage(msgspec.Struct, Generic[T], frozen=True):
    """A page of a list; the next one begins after `last_id` where `has_more` is true."""

    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class AnthropicModel(msgspec.Struct, frozen=True):
    """An entry of `GET /anthropic/v1/models`. `max_input_tokens` is the most tokens of one request, null if unknown."""

    id: str
    display_name: str
    created_at: datetime
    max_input_tokens: int | None
    lifecycle: Literal["active"] = "active"
    type: Literal["model"] = "model"


class AnthropicModels(msgspec.Struct, frozen=True):
    """`GET /anthropic/v1/models`: an entry for each name of each model, in one page."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False
