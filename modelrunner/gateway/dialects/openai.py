"""OpenAI's family, with the calls that vLLM and Jina added. Engines speak it, so requests and answers pass through."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from modelrunner.errors import ModelRunnerError
from modelrunner.gateway.calls import JSON, Call, Fields
from modelrunner.gateway.dialects import answershapes, requestshapes
from modelrunner.gateway.dialects.bodies import JsonDialect
from modelrunner.gateway.dialects.dialect import WITH_ENGINE, refusal_headers, streamed
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


_Count = Annotated[int, msgspec.Meta(ge=0)] | None
_Length = Annotated[int, msgspec.Meta(ge=-1)] | None  # engines take -1 for "no limit"
_Copies = Annotated[int, msgspec.Meta(ge=1)] | None


class OpenAIFields(Fields, frozen=True, gc=False):
    """The fields of all calls whose type and range are checked here, so that a mistake is the same error, with the
    field's name, whatever engine the model has. Engines differ: some take a wrong type for an absent field, some fail
    with a fault of their own. `logprobs` is a number in completions."""

    max_tokens: _Length = None
    max_completion_tokens: _Length = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: float | None = None
    n: _Copies = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: bool | int | None = None
    top_logprobs: _Count = None
    logit_bias: dict[str, float] | list[Any] | None = None
    response_format: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    encoding_format: Literal["float", "base64"] | None = None
    top_n: _Count = None
    tokens: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None


class OpenAI(JsonDialect):
    name: ClassVar[str] = "openai"
    decoder = msgspec.json.Decoder(OpenAIFields)
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
