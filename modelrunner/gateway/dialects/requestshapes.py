"""Bodies of requests that pass through to engines, for the document of the interface. They have the fields that clients
of several engines use: the gateway reads only those of `Fields`, and engines read more.

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
    """The base of requests for a text. `keep_alive` is a Go duration or seconds; engines take further fields."""

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
    """`POST /v1/completions`. `prompt` may be a list of tokens."""

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
