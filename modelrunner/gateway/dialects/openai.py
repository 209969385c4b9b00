"""OpenAI's family, with the calls that vLLM and Jina added. Engines speak it, so requests and answers pass through."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from modelrunner.engine.runner import Runner
from modelrunner.errors import BadRequest, ModelRunnerError
from modelrunner.gateway.calls import JSON, Call, Fields, Inference, Translation
from modelrunner.gateway.dialects import answershapes, requestshapes
from modelrunner.gateway.dialects.bodies import JsonDialect
from modelrunner.gateway.dialects.choices import ChoiceCounts, ChoiceEvents
from modelrunner.gateway.dialects.completion_logprobs import CompletionEvents
from modelrunner.gateway.dialects.dialect import WITH_ENGINE, refusal_headers, streamed
from modelrunner.gateway.dialects.nesting import decode_with_room
from modelrunner.gateway.dialects.normalize import LEAST_LOGPROBS
from modelrunner.gateway.dialects.openai_answer import OpenAIAnswer
from modelrunner.gateway.engine_request import EngineRequest
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


_TOKENIZE = Call(
    Mode.COMPLETION,
    "/tokenize",  # llama.cpp and vLLM have this one and the next at the root
    text="Splits a text into tokens.",
    body=requestshapes.TokenizeRequest,
    answer=answershapes.TokenList,
)
_DETOKENIZE = Call(
    Mode.COMPLETION,
    "/detokenize",
    text="Makes a text of tokens.",
    body=requestshapes.DetokenizeRequest,
    answer=answershapes.DetokenizedText,
)
_COMPLETIONS = "/v1/completions"
_GENERATING = ("/v1/chat/completions", _COMPLETIONS)
_HELD = "structured_outputs"
_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
"""vLLM's earlier names for what `structured_outputs` has."""
_SAME = {"prompt": "content", "add_special_tokens": "add_special"}
"""What vLLM's clients call what llama.cpp's call so, when they tokenize."""


_ABSENT = msgspec.Raw()
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
    n_cmpl: _Copies = None
    prompt: msgspec.Raw = _ABSENT
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

    @property
    def copies(self) -> int:
        """How many choices each prompt gets; `n_cmpl` is llama.cpp's name."""
        return self.n_cmpl or self.n or 1

    @property
    def has_several(self) -> bool:
        """True if the answer may have several choices."""
        return self.copies > 1 or (bool(self.prompt) and memoryview(self.prompt)[0] == ord("["))

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with one usage. vLLM's `continuous_usage_stats` wants one in each event instead."""
        options = self.stream_options or {}
        return bool(options.get("include_usage")) and not options.get("continuous_usage_stats")


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
        "/v1/tokenize": _TOKENIZE,
        "/tokenize": _TOKENIZE,
        "/v1/detokenize": _DETOKENIZE,
        "/detokenize": _DETOKENIZE,
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

    def request(self, ask: Inference, runner: Runner) -> tuple[EngineRequest, Translation | None]:
        request, translation = super().request(ask, runner)
        fields, read = ask.fields, runner.api.reads(request.path)
        if request.path not in _GENERATING:
            if read is not None and request.path == _TOKENIZE.path:
                _rename(request, read)
            return request, translation
        if read is not None:
            _hold(request, read)
        if not isinstance(fields, OpenAIFields):
            return request, translation
        if fields.logprobs is True and fields.top_logprobs == 0:
            request.set({"top_logprobs": LEAST_LOGPROBS})
        events = CompletionEvents() if request.path == _COMPLETIONS and fields.logprobs and fields.stream else None
        if not fields.has_several:
            return request, translation or events
        counts = ChoiceCounts(fields.copies)
        if isinstance(translation, OpenAIAnswer):
            translation.counts = counts
        elif fields.stream:
            translation = ChoiceEvents(counts, total=fields.wants_usage, logprobs=events)
        return request, translation

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


def _hold(request: EngineRequest, read: Collection[str]) -> None:
    """Writes what holds the answer as the engine reads it: vLLM's `guided_json` and its like as `structured_outputs`,
    these as llama.cpp's `json_schema` and `grammar`, and the schema beside Hugging Face's `json_object` as one of
    OpenAI's. What has no such form stays, and is refused."""
    wanted = request.get("response_format") if request.has("response_format") else None
    if isinstance(wanted, dict) and wanted.get("type") in ("json", "json_object") and "value" in wanted:
        schema = {"name": "answer", "schema": wanted["value"]}
        request.set({"response_format": {"type": "json_schema", "json_schema": schema}})
    guided = [name for name in _GUIDED if request.has(name) and name not in read]
    outputs = request.get(_HELD) if request.has(_HELD) else None
    if (not guided and _HELD in read) or not (outputs is None or isinstance(outputs, dict)):
        return
    held = (outputs or {}) | {_GUIDED[name]: _guiding(request, name) for name in guided}
    held = {name: value for name, value in held.items() if value is not None}
    gone: dict[str, Any] = dict.fromkeys((*guided, _HELD))
    match held:
        case _ if _HELD in read:
            request.set(gone | {_HELD: held})
        case {"json": dict() as schema, **more} if not more and "json_schema" in read:
            request.set(gone | {"json_schema": schema})
        case {"json_object": True, **more} if not more and "response_format" in read:
            request.set(gone | {"response_format": {"type": "json_object"}})
        case {"grammar": str() as grammar, **more} if not more and "grammar" in read:
            request.set(gone | {"grammar": grammar})
        case {"choice": list() as choices, **more} if not more and "grammar" in read and choices:
            texts = [msgspec.json.encode(str(one)).decode() for one in choices]
            request.set(gone | {"grammar": f"root ::= {' | '.join(texts)}"})


def _guiding(request: EngineRequest, name: str) -> Any:
    """Returns the value of a field of `_GUIDED`. A schema may be a text of JSON. Raises `BadRequest`."""
    value = request.get(name)
    if name != "guided_json" or not isinstance(value, str):
        return value
    try:
        return decode_with_room(msgspec.json.decode, value.encode())
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise BadRequest("`guided_json` is a schema, or the JSON of one", param=name) from None


def _rename(request: EngineRequest, read: Collection[str]) -> None:
    """Gives a request to tokenize the names that the engine reads. Raises `BadRequest` without a text."""
    for theirs, other in (*_SAME.items(), *((value, name) for name, value in _SAME.items())):
        if request.has(theirs) and theirs not in read and other in read and not request.has(other):
            request.set({other: request.raw(theirs), theirs: None})
    if not any(name in read and request.has(name) for name in ("content", "prompt", "messages")):
        raise BadRequest("the engine of this model tokenizes a text: send it as `content` or `prompt`", param="prompt")
