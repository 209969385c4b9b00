"""Bodies that pass through to engines and back, as far as clients share them, and the errors of the families. Only the
document uses these structs: the gateway reads the few fields of `Fields`, and engines take more than stand here.

Source of the shapes: https://platform.openai.com/docs/api-reference, https://docs.claude.com/en/api/messages,
https://jina.ai/reranker, https://docs.cohere.com/reference/rerank and
https://github.com/ollama/ollama/blob/main/docs/api.md.
"""

from typing import Annotated, Any, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Content = str | list[dict[str, Any]]
KeepAliveText = str | float | None


class ChatMessage(msgspec.Struct):
    """`content` may be null beside `tool_calls`; its parts are `text`, `image_url` and `input_audio`, whose files come
    as `data:` URLs or base64."""

    role: str
    content: Content | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class SampledRequest(msgspec.Struct, kw_only=True):
    """What requests for a text have in common. `keep_alive` is a Go duration or seconds; engines take further
    fields."""

    model: str
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    user: str | None = None
    keep_alive: KeepAliveText = None


class ChatRequest(SampledRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    reasoning_effort: str | None = None


class CompletionRequest(SampledRequest, kw_only=True):
    """`POST /v1/completions`. `prompt` may be tokens."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Count | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/embeddings`. `input` is a text, texts, tokens, or lists of tokens."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    user: str | None = None
    keep_alive: KeepAliveText = None


class RerankRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/rerank`, as Jina has it."""

    model: str
    query: str
    documents: list[str]
    top_n: int | None = None
    return_documents: bool | None = None
    keep_alive: KeepAliveText = None


class ScoreRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/score`, as vLLM has it."""

    model: str
    text_1: str | list[str]
    text_2: str | list[str]
    keep_alive: KeepAliveText = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/tokenize`: llama.cpp takes `content`, vLLM `prompt` or `messages`."""

    model: str
    content: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special: bool | None = None
    keep_alive: KeepAliveText = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/detokenize`."""

    model: str
    tokens: list[int]
    keep_alive: KeepAliveText = None


class TemplateRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/apply-template`, as llama.cpp has it."""

    model: str
    messages: list[ChatMessage]
    keep_alive: KeepAliveText = None


class MessagesRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/messages`. `system` is a text or blocks; `content` of a message likewise."""

    model: str
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    messages: list[dict[str, Any]]
    system: Content | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    keep_alive: KeepAliveText = None


class TokenCountRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    model: str
    messages: list[dict[str, Any]]
    system: Content | None = None
    tools: list[dict[str, Any]] | None = None
    keep_alive: KeepAliveText = None


class UsageCounts(msgspec.Struct):
    """Tokens."""

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
    `done_reason`, counts of tokens, and durations in nanoseconds."""

    model: str
    created_at: str
    done: bool
    message: dict[str, Any] | None = None
    response: str | None = None
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaVectors(msgspec.Struct):
    """`embedding` is of `/api/embeddings`, the others of `/api/embed`."""

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
