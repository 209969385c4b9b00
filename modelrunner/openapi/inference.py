"""The operations of the gateway's routes. A call of a family that is not described here is a `KeyError`, which a test
finds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from modelrunner.gateway.dialects.bodies import JsonBodies
from modelrunner.gateway.routes import all_routes
from modelrunner.openapi import answers, bodies
from modelrunner.openapi.operation import Operation

_EVENTS = "text/event-stream"
_ERRORS = (411, 412, 421, 422, 429, 501, 502, 504, 507)


@dataclass(frozen=True, slots=True)
class _CallText:
    """`body` is None where the dialect's own fields are the request; `stream` is the media type of a streamed
    answer."""

    text: str
    body: Any
    answer: Any
    stream: str = ""


_CALLS = {
    "/v1/chat/completions": _CallText(
        "Answers a chat. Text, tools, structured output, log probabilities, images and audio: as the engine has them.",
        bodies.ChatRequest,
        answers.Completion,
        _EVENTS,
    ),
    "/v1/completions": _CallText(
        "Completes a prompt as it stands.", bodies.CompletionRequest, answers.Completion, _EVENTS
    ),
    "/v1/embeddings": _CallText("Makes embeddings of texts.", bodies.EmbeddingRequest, answers.Embeddings),
    "/v1/rerank": _CallText("Ranks documents for a query.", bodies.RerankRequest, answers.Rankings),
    "/rerank": _CallText("Ranks documents for a query.", bodies.RerankRequest, answers.Rankings),
    "/v1/score": _CallText("Scores pairs of texts.", bodies.ScoreRequest, answers.Scores),
    "/score": _CallText("Scores pairs of texts.", bodies.ScoreRequest, answers.Scores),
    "/v1/tokenize": _CallText("Splits a text into tokens.", bodies.TokenizeRequest, answers.TokenList),
    "/v1/detokenize": _CallText("Makes a text of tokens.", bodies.DetokenizeRequest, answers.DetokenizedText),
    "/v1/apply-template": _CallText(
        "Writes a chat as the prompt that the model gets.", bodies.TemplateRequest, answers.TemplateText
    ),
    "/v1/responses": _CallText(
        "Makes a response. It is stored unless `store` is false.", None, answers.ResponseAnswer, _EVENTS
    ),
    "/v1/messages": _CallText(
        "Answers messages, as Anthropic's API does.", bodies.MessagesRequest, answers.AnthropicMessage, _EVENTS
    ),
    "/v1/messages/count_tokens": _CallText(
        "Counts the tokens of messages.", bodies.TokenCountRequest, answers.TokenCount
    ),
    "/v2/rerank": _CallText("Ranks documents for a query, as Cohere's API does.", None, answers.CohereRankings),
    "/api/chat": _CallText(
        "Answers a chat, as Ollama does. Without messages it loads the model.",
        None,
        answers.OllamaAnswer,
        "application/x-ndjson",
    ),
    "/api/generate": _CallText(
        "Completes a prompt, as Ollama does. Without a prompt it loads the model.",
        None,
        answers.OllamaAnswer,
        "application/x-ndjson",
    ),
    "/api/embed": _CallText("Makes embeddings of texts, as Ollama does.", None, answers.OllamaVectors),
    "/api/embeddings": _CallText("Makes an embedding of a text, as Ollama does.", None, answers.OllamaVectors),
}


def inference_operations() -> Iterator[tuple[str, str, str, str, Operation]]:
    """Yields (family, method, path, scope, operation) of each route."""
    for pattern, tail, route in all_routes():
        found = _CALLS[tail]
        assert isinstance(route.dialect, JsonBodies)
        answer = {"application/json": found.answer} | ({found.stream: Any} if found.stream else {})
        body = found.body or route.dialect.decoder.type
        operation = Operation(found.text, answer, body=body, errors=_ERRORS)
        yield route.dialect.name, "POST", pattern, "inference", operation
