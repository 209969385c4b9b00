"""OpenAI's family, with the calls that vLLM and Jina added. Engines speak it, so requests and answers pass through."""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from modelrunner.errors import ModelRunnerError
from modelrunner.gateway.dialects import answershapes, requestshapes
from modelrunner.gateway.dialects.bodies import JsonDialect
from modelrunner.gateway.dialects.dialect import JSON, WITH_ENGINE, Call, refusal_headers, streamed
from modelrunner.gateway.dialects.openai_answer import OpenAIAnswer
from modelrunner.http.answers import Header
from modelrunner.progress import LoadProgress
from modelrunner.types import Mode

_RERANK = Call(
    Mode.RERANKING,
    "/v1/rerank",
    text="Ranks documents for a query.",
    body=requestshapes.RerankRequest,
    answer=answershapes.Rankings,
)
_SCORE = Call(
    Mode.RERANKING,
    "/score",
    text="Scores pairs of texts.",
    body=requestshapes.ScoreRequest,
    answer=answershapes.Scores,
)


class OpenAI(JsonDialect):
    name: ClassVar[str] = "openai"
    calls: ClassVar[Mapping[str, Call]] = {
        "/v1/chat/completions": Call(
            Mode.COMPLETION,
            "/v1/chat/completions",
            text="Answers a chat. Text, tools, structured output, log probabilities, images and audio: as the engine "
            "has them.",
            body=requestshapes.ChatRequest,
            answer=streamed(answershapes.Completion),
        ),
        "/v1/completions": Call(
            Mode.COMPLETION,
            "/v1/completions",
            text="Completes a prompt as it stands.",
            body=requestshapes.CompletionRequest,
            answer=streamed(answershapes.Completion),
        ),
        "/v1/embeddings": Call(
            Mode.EMBEDDING,
            "/v1/embeddings",
            text="Makes embeddings of texts.",
            body=requestshapes.EmbeddingRequest,
            answer=answershapes.Embeddings,
        ),
        "/v1/rerank": _RERANK,
        "/rerank": _RERANK,
        "/v1/score": _SCORE,
        "/score": _SCORE,
        "/v1/tokenize": Call(
            Mode.COMPLETION,
            "/tokenize",  # neither llama.cpp nor vLLM has this one and the next under /v1
            text="Splits a text into tokens.",
            body=requestshapes.TokenizeRequest,
            answer=answershapes.TokenList,
        ),
        "/v1/detokenize": Call(
            Mode.COMPLETION,
            "/detokenize",
            text="Makes a text of tokens.",
            body=requestshapes.DetokenizeRequest,
            answer=answershapes.DetokenizedText,
        ),
        "/v1/apply-template": Call(
            Mode.COMPLETION,
            "/apply-template",
            text="Writes a chat as the prompt that the model gets.",
            body=requestshapes.TemplateRequest,
            answer=answershapes.TemplateText,
        ),
    }
    prefixes: ClassVar[tuple[str, ...]] = WITH_ENGINE
    assembly = OpenAIAnswer
    error_shape = answershapes.ErrorAnswer

    def error(self, error: ModelRunnerError, request_id: str) -> tuple[tuple[Header, ...], bytes]:
        return (JSON, *refusal_headers(error)), msgspec.json.encode(error.as_dict(request_id))

    def error_event(self, error: ModelRunnerError, request_id: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(error.as_dict(request_id))

    def waiting(self, progress: LoadProgress | None, waited: float) -> bytes:
        """Sends a comment, which clients ignore, or the event `modelrunner.progress`."""
        if progress is None:
            return b": waiting for the model, %.0f s\n\n" % waited
        place: dict[str, Any] = {}
        if progress.position is not None:
            seconds = progress.expected_seconds
            place = {"position": progress.position, "expected_seconds": seconds and round(seconds, 1)}
        news = msgspec.json.encode({"stage": progress.stage, **place, "waited": round(waited, 3)})
        return b"event: modelrunner.progress\ndata: %b\n\n" % news
