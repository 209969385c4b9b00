"""From OpenAI's answers to Ollama's: lines of JSON, or one object.

Source of the fields: https://github.com/ollama/ollama/blob/main/docs/api.md; durations are in nanoseconds.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from time import perf_counter
from typing import Any, ClassVar

import msgspec

from modelrunner.errors import EngineProtocolError
from modelrunner.gateway.dialects.chunks import ChunkChoice, ChunkTranslation, GrowingToolCall, Timings, TokenUsage
from modelrunner.gateway.dialects.dialect import JSON
from modelrunner.gateway.dialects.openai_answer import OpenAIAnswer
from modelrunner.http.answers import Header

NDJSON: tuple[Header, ...] = (
    (b"Content-Type", b"application/x-ndjson"),
    (b"Cache-Control", b"no-store"),
    (b"X-Accel-Buffering", b"no"),
)
_LARGEST = 256 << 20
"""Bytes of an engine's answer of embeddings."""
_encode = msgspec.json.encode


def now() -> str:
    """The time, as the answers give it: RFC 3339 in UTC."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class AnswerClock:
    """Measures an answer whose request arrived at `arrived`, in seconds of `perf_counter`; made when the engine is
    asked."""

    def __init__(self, arrived: float) -> None:
        self._arrived = arrived
        self._asked = perf_counter()
        self._first: float | None = None

    def first(self) -> None:
        """The engine's first token is here."""
        if self._first is None:
            self._first = perf_counter()

    def figures(self, usage: TokenUsage, timings: Timings | None) -> dict[str, int]:
        """The engine's own timings, else those of this clock."""
        end = perf_counter()
        first = self._first if self._first is not None else end
        prompt, written = (first - self._asked) * 1e3, (end - first) * 1e3
        if timings is not None:
            prompt, written = timings.prompt_ms, timings.predicted_ms
        return {
            "total_duration": int((end - self._arrived) * 1e9),
            "load_duration": int((self._asked - self._arrived) * 1e9),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(prompt * 1e6),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(written * 1e6),
        }


def done_reason(finish_reason: str) -> str:
    return "length" if finish_reason == "length" else "stop"


def tool_calls(calls: list[tuple[str, str]]) -> tuple[list[dict[str, Any]], str]:
    """Ollama's form of calls (name, text of the arguments), and the text of those whose arguments are not an object: of
    an answer that was cut off."""
    made: list[dict[str, Any]] = []
    broken = ""
    for name, text in calls:
        try:
            arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
        except msgspec.DecodeError:
            broken += text
        else:
            made.append({"function": {"index": len(made), "name": name, "arguments": arguments}})
    return made, broken


class OllamaLines(ChunkTranslation):
    """The stream of a chat or, with `chat` False, of a generation."""

    def __init__(self, model: str, clock: AnswerClock, headers: tuple[Header, ...], *, chat: bool) -> None:
        super().__init__()
        self.headers = (*NDJSON, *headers)
        self._start = b'{"model":%b,"created_at":"' % _encode(model)
        self._clock = clock
        self._chat = chat
        self._calls: dict[int, GrowingToolCall] = {}

    def choice(self, choice: ChunkChoice) -> bytes:
        delta = choice.delta
        text, thought = choice.text or "", ""
        if delta is not None:
            text, thought = delta.content or delta.refusal or "", delta.thought
            for part in delta.tool_calls or ():
                self._calls.setdefault(part.index, GrowingToolCall()).add(part)
        if not text and not thought:
            return b""
        self._clock.first()
        logprobs = choice.logprobs.content if choice.logprobs is not None else None
        more = b',"logprobs":%b' % _encode(logprobs) if logprobs else b""
        return self._line(text, thought, b',"done":false%b}\n' % more)

    def last(self) -> bytes:
        calls, broken = tool_calls([(call.name, call.arguments) for _, call in sorted(self._calls.items())])
        before = self._line(broken, "", b',"done":false}\n', calls) if calls or broken else b""
        told = {"done": True, "done_reason": done_reason(self.finish_reason)}
        return before + self._line("", "", b",%b\n" % _encode(told | self._figures())[1:])

    def _figures(self) -> dict[str, int]:
        return self._clock.figures(self.usage, self.timings)

    def _line(self, text: str, thought: str, end: bytes, calls: list[dict[str, Any]] | None = None) -> bytes:
        thinking = b',"thinking":%b' % _encode(thought) if thought else b""
        if self._chat:
            called = b',"tool_calls":%b' % _encode(calls) if calls else b""
            said = b'"message":{"role":"assistant","content":%b%b%b}' % (_encode(text), thinking, called)
        else:
            said = b'"response":%b%b' % (_encode(text), thinking)
        return b'%b%b",%b%b' % (self._start, now().encode(), said, end)


class OllamaText(OpenAIAnswer):
    """The same in one object."""

    def __init__(self, model: str, clock: AnswerClock, headers: tuple[Header, ...], *, chat: bool) -> None:
        super().__init__()
        self.headers = (JSON, *headers)
        self._model = model
        self._clock = clock
        self._chat = chat

    def answer(self) -> Mapping[str, Any]:
        found = msgspec.convert(msgspec.json.decode(_encode(super().answer())), _WholeCompletion)
        choice = found.choices[0]
        message = choice.message or _WholeMessage(content=choice.text)
        calls, broken = tool_calls([(call.function.name, call.function.arguments) for call in message.tool_calls or ()])
        text = (message.content or "") + broken
        thinking = {"thinking": message.thought} if message.thought else {}
        if self._chat:
            called = {"tool_calls": calls} if calls else {}
            said: dict[str, Any] = {"message": {"role": "assistant", "content": text, **thinking, **called}}
        else:
            said = {"response": text, **thinking}
        if choice.logprobs and choice.logprobs.get("content"):
            said["logprobs"] = choice.logprobs["content"]
        told = {"done": True, "done_reason": done_reason(choice.finish_reason or "")}
        figures = self._clock.figures(found.usage or TokenUsage(), found.timings)
        return {"model": self._model, "created_at": now(), **said, **told, **figures}


class _CalledFunction(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class _WholeCall(msgspec.Struct):
    function: _CalledFunction


class _WholeMessage(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_WholeCall] | None = None

    @property
    def thought(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class _WholeChoice(msgspec.Struct):
    message: _WholeMessage | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class _WholeCompletion(msgspec.Struct):
    choices: list[_WholeChoice]
    usage: TokenUsage | None = None
    timings: Timings | None = None


class _Vector(msgspec.Struct):
    embedding: msgspec.Raw
    index: int = 0


class _Vectors(msgspec.Struct):
    data: list[_Vector]
    usage: TokenUsage | None = None


class OllamaEmbeddings:
    """The vectors as the engine wrote them; with `single`, as `/api/embeddings` gives its only one."""

    whole: ClassVar[bool] = True

    def __init__(self, model: str, clock: AnswerClock, headers: tuple[Header, ...], *, single: bool) -> None:
        self.headers = (JSON, *headers)
        self._model = model
        self._clock = clock
        self._single = single
        self._body = bytearray()

    def piece(self, data: bytes) -> bytes:
        self._body += data
        if len(self._body) > _LARGEST:
            raise EngineProtocolError("the engine's answer is too large: ask for fewer embeddings at once")
        return b""

    def end(self) -> bytes:
        try:
            found = msgspec.json.decode(self._body, type=_Vectors)
        except msgspec.DecodeError as error:
            raise EngineProtocolError(f"the engine's embeddings cannot be read: {error}") from None
        vectors = [each.embedding for each in sorted(found.data, key=lambda each: each.index)]
        if self._single:
            return _encode({"embedding": vectors[0] if vectors else []})
        figures = self._clock.figures(found.usage or TokenUsage(), None)
        told = {name: figures[name] for name in ("total_duration", "load_duration", "prompt_eval_count")}
        return _encode({"model": self._model, "embeddings": vectors, **told})
