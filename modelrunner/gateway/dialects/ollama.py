"""Ollama's API: requests are translated to OpenAI's chat completions, completions and embeddings.

Source of the shapes: https://github.com/ollama/ollama/blob/main/docs/api.md. The routes about models are in
api/ollama_routes.py.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from modelrunner.engine.runner import Runner
from modelrunner.errors import ContextTooLong, ModelRunnerError
from modelrunner.gateway.calls import JSON, Call, Fields, Inference, Preparing, Translation
from modelrunner.gateway.dialects import answershapes
from modelrunner.gateway.dialects.bodies import JsonBodies
from modelrunner.gateway.dialects.chunks import engine_request
from modelrunner.gateway.dialects.dialect import engine_model, refusal_headers, streamed
from modelrunner.gateway.dialects.ollama_answer import (
    NDJSON,
    AnswerClock,
    OllamaEmbeddings,
    OllamaLines,
    OllamaText,
    now,
)
from modelrunner.gateway.dialects.ollama_request import ChatFields, EmbedFields, GenerateFields
from modelrunner.gateway.dialects.ollama_truncation import shortened
from modelrunner.gateway.engine_request import EngineRequest
from modelrunner.gateway.headers import own_headers
from modelrunner.http.answers import Header
from modelrunner.progress import LoadProgress
from modelrunner.types import Mode

_CHAT, _COMPLETIONS, _EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_LINES = "application/x-ndjson"


class Ollama(JsonBodies):
    """The base of all calls."""

    name: ClassVar[str] = "ollama"
    stream_headers = NDJSON
    error_shape = answershapes.OllamaError

    def owns(self, path: str) -> bool:
        return path.startswith("/api/")

    def error(self, error: ModelRunnerError, request_id: str) -> tuple[tuple[Header, ...], bytes]:
        return (JSON, *refusal_headers(error)), msgspec.json.encode({"error": error.message})

    def error_event(self, error: ModelRunnerError, request_id: str) -> bytes:
        return msgspec.json.encode({"error": error.message}) + b"\n"

    async def prepare(self, preparing: Preparing, ask: Inference) -> bytes:
        """Unloads the model, and returns the answer."""
        await preparing.unload(ask)
        return self.empty(ask, "unload")

    async def shortened(self, ask: Inference, runner: Runner, error: ContextTooLong) -> Inference | None:
        return await shortened(ask, runner, error)

    def loaded(self, ask: Inference) -> bytes:
        return self.empty(ask, "load")

    @abstractmethod
    def empty(self, ask: Inference, reason: str) -> bytes:
        """Returns the answer to a request without work. `reason` is load or unload."""

    def waiting(self, progress: LoadProgress | None, waited: float) -> bytes:
        """Returns a space before the first line: Ollama's clients know no other sign of life."""
        return b" "


class OllamaChat(Ollama):
    calls: ClassVar[Mapping[str, Call]] = {
        "/api/chat": Call(
            Mode.COMPLETION,
            _CHAT,
            text="Answers a chat, as Ollama does. Without messages it loads the model.",
            body=ChatFields,
            answer=streamed(answershapes.OllamaAnswer, _LINES),
        )
    }
    decoder = msgspec.json.Decoder(ChatFields)

    def read(self, body: bytes) -> Fields:
        fields = super().read(body)
        assert isinstance(fields, ChatFields)
        fields.chat()  # raises for an untranslatable request before its model is loaded
        return fields

    def request(self, ask: Inference, runner: Runner) -> tuple[EngineRequest, Translation]:
        fields = ask.fields
        assert isinstance(fields, ChatFields)
        ignored = fields.ignored(runner.api.reads(_CHAT))
        make = OllamaLines if fields.stream else OllamaText
        translation = make(
            fields.model, AnswerClock(ask.arrived), own_headers("", tuple(ignored), lost=ask.lost), chat=True
        )
        return engine_request(runner, _CHAT, fields.model, fields.chat()), translation

    def empty(self, ask: Inference, reason: str) -> bytes:
        return _empty(ask, {"message": {"role": "assistant", "content": ""}}, reason)


class OllamaGenerate(Ollama):
    calls: ClassVar[Mapping[str, Call]] = {
        "/api/generate": Call(
            Mode.COMPLETION,
            _CHAT,
            text="Completes a prompt, as Ollama does. Without a prompt it loads the model.",
            body=GenerateFields,
            answer=streamed(answershapes.OllamaAnswer, _LINES),
        )
    }
    decoder = msgspec.json.Decoder(GenerateFields)

    def read(self, body: bytes) -> Fields:
        fields = super().read(body)
        assert isinstance(fields, GenerateFields)
        fields.check()
        if fields.raw:
            fields.completion()
        else:
            fields.chat()
        return fields

    def request(self, ask: Inference, runner: Runner) -> tuple[EngineRequest, Translation]:
        """Translates to a chat; a model without a chat template gets the prompt unchanged."""
        fields = ask.fields
        assert isinstance(fields, GenerateFields)
        capabilities = runner.spec.bundle.capabilities
        plain = bool(fields.raw) or (bool(capabilities) and "chat" not in capabilities)
        path, body = (_COMPLETIONS, fields.completion()) if plain else (_CHAT, fields.chat())
        ignored = fields.ignored(runner.api.reads(path)) + (["logprobs"] if plain and fields.logprobs else [])
        make = OllamaLines if fields.stream else OllamaText
        translation = make(
            fields.model,
            AnswerClock(ask.arrived),
            own_headers("", tuple(ignored), lost=ask.lost),
            chat=False,
            turns=fields.turns(),
        )
        return engine_request(runner, path, fields.model, body), translation

    def empty(self, ask: Inference, reason: str) -> bytes:
        return _empty(ask, {"response": ""}, reason)


class OllamaEmbed(Ollama):
    calls: ClassVar[Mapping[str, Call]] = {
        "/api/embed": Call(
            Mode.EMBEDDING,
            _EMBEDDINGS,
            text="Makes embeddings of texts, as Ollama does.",
            body=EmbedFields,
            answer=answershapes.OllamaVectors,
        ),
        "/api/embeddings": Call(
            Mode.EMBEDDING,
            _EMBEDDINGS,
            text="Makes an embedding of a text, as Ollama does.",
            body=EmbedFields,
            answer=answershapes.OllamaVectors,
        ),
    }
    decoder = msgspec.json.Decoder(EmbedFields)

    def request(self, ask: Inference, runner: Runner) -> tuple[EngineRequest, Translation]:
        fields = ask.fields
        assert isinstance(fields, EmbedFields)
        members = {"model": engine_model(runner, fields.model), **fields.embedding()}
        headers = own_headers("", tuple(fields.ignored()), lost=ask.lost)
        clock = AnswerClock(ask.arrived)
        translation = OllamaEmbeddings(fields.model, clock, headers, single=_is_single(ask), length=fields.length)
        return EngineRequest.of(_EMBEDDINGS, members), translation

    def empty(self, ask: Inference, reason: str) -> bytes:
        if _is_single(ask):
            return b'{"embedding":[]}'
        return msgspec.json.encode({"model": ask.fields.model, "embeddings": []})


def _is_single(ask: Inference) -> bool:
    return ask.head.route.pattern == "/api/embeddings"


def _empty(ask: Inference, said: Mapping[str, Any], reason: str) -> bytes:
    answer = {"model": ask.fields.model, "created_at": now(), **said, "done": True, "done_reason": reason}
    return msgspec.json.encode(answer)
