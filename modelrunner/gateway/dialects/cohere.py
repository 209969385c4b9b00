"""Cohere's rerank, translated to Jina's, which engines speak.

Source of the shapes: https://docs.cohere.com/reference/rerank
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from modelrunner.engine.runner import Runner
from modelrunner.errors import BadRequest, ModelRunnerError
from modelrunner.gateway.calls import JSON, Call, Fields, Inference, Translation
from modelrunner.gateway.dialects.answershapes import CohereError, CohereRankings
from modelrunner.gateway.dialects.assembly import WholeBody
from modelrunner.gateway.dialects.bodies import JsonBodies
from modelrunner.gateway.dialects.dialect import engine_model, refusal_headers
from modelrunner.gateway.engine_request import EngineRequest
from modelrunner.gateway.headers import own_headers
from modelrunner.http.answers import Header
from modelrunner.progress import LoadProgress
from modelrunner.types import Mode

_RERANK = "/v1/rerank"


class CohereFields(Fields, frozen=True, gc=False):
    """`POST /v2/rerank`. A document may be an object: its `text`, or the fields of `rank_fields`, are ranked, else all
    of it as lines of "field: value"."""

    query: str = ""
    documents: list[str | dict[str, Any]] = msgspec.field(default_factory=list)
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    rank_fields: list[str] | None = None
    max_tokens_per_doc: int | None = None
    priority: int | None = None

    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else self._text(one) for one in self.documents]

    def _text(self, document: dict[str, Any]) -> str:
        if not self.rank_fields and isinstance(text := document.get("text"), str):
            return text
        names = self.rank_fields or list(document)
        return "\n".join(f"{name}: {value}" for name in names if (value := document.get(name)) is not None)

    def ignored(self) -> tuple[str, ...]:
        return tuple(name for name in ("max_tokens_per_doc", "priority") if getattr(self, name) is not None)


class Cohere(JsonBodies):
    name: ClassVar[str] = "cohere"
    calls: ClassVar[Mapping[str, Call]] = {
        "/v2/rerank": Call(
            Mode.RERANKING,
            _RERANK,
            text="Ranks documents for a query, as Cohere's API does.",
            body=CohereFields,
            answer=CohereRankings,
        )
    }
    error_shape = CohereError
    decoder = msgspec.json.Decoder(CohereFields)

    def request(self, ask: Inference, runner: Runner) -> tuple[EngineRequest, Translation]:
        fields = ask.fields
        assert isinstance(fields, CohereFields)
        for name in ("query", "documents"):
            if not getattr(fields, name):
                raise BadRequest(f"`{name}` is missing, or empty", param=name)
        top = {} if fields.top_n is None else {"top_n": fields.top_n}
        body = {"model": engine_model(runner, fields.model), "query": fields.query, "documents": fields.texts(), **top}
        return EngineRequest.of(_RERANK, body), _CohereRanking(ask.request_id, fields)

    def error(self, error: ModelRunnerError, request_id: str) -> tuple[tuple[Header, ...], bytes]:
        body = {"id": request_id, "message": error.message}
        return (JSON, *refusal_headers(error)), msgspec.json.encode(body)

    def error_event(self, error: ModelRunnerError, request_id: str) -> bytes:
        return b""  # a ranking is never streamed

    def waiting(self, progress: LoadProgress | None, waited: float) -> bytes:
        return b" "


class _RankedDocument(msgspec.Struct):
    index: int
    relevance_score: float


class _Ranking(msgspec.Struct):
    results: list[_RankedDocument]


class _CohereRanking(WholeBody):
    """The results, the best first."""

    def __init__(self, request_id: str, fields: CohereFields) -> None:
        super().__init__(own_headers("", fields.ignored()))
        self._id = request_id
        self._top = fields.top_n

    def end(self) -> bytes:
        results = self.decoded(_Ranking).results
        best = sorted(results, key=lambda one: one.relevance_score, reverse=True)[: self._top]
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
        return msgspec.json.encode({"id": self._id, "results": best, "meta": meta})
