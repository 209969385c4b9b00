"""Answers of engines and the errors of the families, for the document of the interface. Answers have the fields that
clients of several engines use; engines send more.

Sources of the shapes: those of `requestshapes`.
"""

from typing import Any, Literal

import msgspec


class UsageCounts(msgspec.Struct):
    """Counts of tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None = None


class Completion(msgspec.Struct):
    """A chat completion, a completion, or a chunk of one: a choice has a `message`, a `text` or a `delta`."""

    id: str
    object: Literal["chat.completion", "chat.completion.chunk", "text_completion", "text_completion.chunk"]
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: UsageCounts | None = None


class Embedding(msgspec.Struct):
    """`embedding` is numbers, or base64 of 32-bit floats in little-endian order."""

    object: Literal["embedding"]
    index: int
    embedding: list[Any] | str


class Embeddings(msgspec.Struct):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: UsageCounts


class RankedText(msgspec.Struct):
    index: int
    relevance_score: float


class Rankings(msgspec.Struct):
    results: list[RankedText]
    model: str | None = None
    usage: dict[str, Any] | None = None


class CohereRankings(msgspec.Struct):
    id: str
    results: list[RankedText]
    meta: dict[str, Any]


class Scores(msgspec.Struct):
    data: list[dict[str, Any]]
    model: str | None = None


class TokenList(msgspec.Struct):
    """An element may be an object with `id` and `piece`."""

    tokens: list[Any]
    count: int | None = None


class DetokenizedText(msgspec.Struct):
    """llama.cpp's has `content`, vLLM's `prompt`."""

    content: str | None = None
    prompt: str | None = None


class TemplateText(msgspec.Struct):
    prompt: str


class AnthropicMessage(msgspec.Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    usage: dict[str, Any]


class TokenCount(msgspec.Struct):
    input_tokens: int


class ResponseAnswer(msgspec.Struct):
    """A response of the Responses API."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    background: bool
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None
    metadata: dict[str, Any]


class OllamaAnswer(msgspec.Struct):
    """A line of a stream, or the whole answer: `message` of a chat, `response` of a generation. The last line has
    `done_reason`, `context` (of a generation), counts of tokens, and durations in nanoseconds."""

    model: str
    created_at: str
    done: bool
    message: dict[str, Any] | None = None
    response: str | None = None
    context: list[int] | None = None
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaVectors(msgspec.Struct):
    """`/api/embeddings` answers with `embedding`, `/api/embed` with the other fields."""

    model: str | None = None
    embeddings: list[list[float]] | None = None
    embedding: list[float] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None


class ErrorDetails(msgspec.Struct):
    """`code` is stable, for programs; `param` names the wrong field."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct):
    """Every error, except those of Anthropic's, Cohere's and Ollama's routes."""

    error: ErrorDetails
    request_id: str


class AnthropicErrorDetails(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct):
    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str


class CohereError(msgspec.Struct):
    id: str
    message: str


class OllamaError(msgspec.Struct):
    error: str
