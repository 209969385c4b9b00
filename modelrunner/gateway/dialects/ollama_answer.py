"""Translates OpenAI's answers to Ollama's: lines of JSON, or one object.

Source of the fields: https://github.com/ollama/ollama/blob/main/docs/api.md; durations are in nanoseconds.
"""

import math
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from time import perf_counter
from typing import Any, ClassVar

import msgspec

from modelrunner.gateway.calls import JSON
from modelrunner.gateway.dialects.assembly import WholeBody
from modelrunner.gateway.dialects.chunks import ChunkTranslation, Timings, TokenUsage
from modelrunner.gateway.dialects.ollama_context import Turn, context_of
from modelrunner.http.answers import Header

NDJSON: tuple[Header, ...] = (
    (b"Content-Type", b"application/x-ndjson"),
    (b"Cache-Control", b"no-store"),
    (b"X-Accel-Buffering", b"no"),
)
_encode = msgspec.json.encode


def now() -> str:
    """Returns the time in RFC 3339 and UTC."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class AnswerClock:
    """Measures an answer, from its making when the engine is asked. The request came at `arrived`, in seconds of
    `perf_counter`."""

    def __init__(self, arrived: float) -> None:
        self._arrived = arrived
        self._sent = perf_counter()
        self._first: float | None = None

    def first(self) -> None:
        """Called with the engine's first token."""
        if self._first is None:
            self._first = perf_counter()

    def figures(self, usage: TokenUsage, timings: Timings | None) -> dict[str, int]:
        """Returns the engine's own timings, else those of this clock, in nanoseconds."""
        end = perf_counter()
        first = self._first if self._first is not None else end
        prompt, written = (first - self._sent) * 1e3, (end - first) * 1e3
        if timings is not None:
            prompt, written = timings.prompt_ms, timings.predicted_ms
        return {
            "total_duration": int((end - self._arrived) * 1e9),
            "load_duration": int((self._sent - self._arrived) * 1e9),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(prompt * 1e6),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(written * 1e6),
        }


class OllamaLines(ChunkTranslation):
    """The stream of a chat or, with `chat` False, of a generation, whose end has the context of its `turns` with the
    answer."""

    chunk_per_line: ClassVar[bool] = True
    kind: ClassVar[tuple[Header, ...]] = NDJSON

    def __init__(
        self,
        model: str,
        clock: AnswerClock,
        headers: tuple[Header, ...],
        *,
        chat: bool,
        turns: Sequence[Turn] = (),
    ) -> None:
        super().__init__()
        self.headers = (*self.kind, *headers)
        self._start = b'{"model":%b,"created_at":"' % _encode(model)
        self._clock = clock
        self._chat = chat
        self._turns = turns
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._logprobs: list[msgspec.Raw] = []

    def text(self, text: str, logprobs: list[msgspec.Raw] | None) -> bytes:
        self._clock.first()
        if self._turns:
            self._texts.append(text)
        return self._line(text, "", b',"done":false%b}\n' % _logprobs(logprobs))

    def thought(self, text: str) -> bytes:
        self._clock.first()
        return self._line("", text, b',"done":false}\n')

    def last(self) -> bytes:
        calls, broken = self.called()
        before = self._line(broken, "", b',"done":false}\n', calls) if calls or broken else b""
        return before + self._line("", "", b",%b\n" % self.figures())

    def called(self) -> tuple[list[dict[str, Any]], str]:
        """Returns the tool calls in Ollama's form, and the text of calls whose arguments were cut off."""
        calls: list[dict[str, Any]] = []
        broken = ""
        for call in self.calls:
            if (arguments := call.decoded()) is None:
                broken += call.arguments
            else:
                id = call.id or f"call_{secrets.token_hex(4)}"
                function = {"index": len(calls), "name": call.name, "arguments": arguments}
                calls.append({"id": id, "function": function})
        return calls, broken

    def figures(self) -> bytes:
        """Returns the last members of an answer and its closing bracket."""
        members: dict[str, Any] = {"done": True, "done_reason": "length" if self.finish_reason == "length" else "stop"}
        if self._turns:
            members["context"] = context_of([*self._turns, ("assistant", "".join(self._texts))])
        return _encode(members | self._clock.figures(self.usage, self.timings))[1:]

    def _line(self, text: str, thought: str, end: bytes, calls: list[dict[str, Any]] | None = None) -> bytes:
        thinking = b',"thinking":%b' % _encode(thought) if thought else b""
        if self._chat:
            called = b',"tool_calls":%b' % _encode(calls) if calls else b""
            said = b'"message":{"role":"assistant","content":%b%b%b}' % (_encode(text), thinking, called)
        else:
            said = b'"response":%b%b' % (_encode(text), thinking)
        return b'%b%b",%b%b' % (self._start, now().encode(), said, end)


class OllamaText(OllamaLines):
    """The answer to a chat or a generation in one object."""

    whole: ClassVar[bool] = True
    kind: ClassVar[tuple[Header, ...]] = (JSON,)

    def text(self, text: str, logprobs: list[msgspec.Raw] | None) -> bytes:
        self._clock.first()
        self._texts.append(text)
        self._logprobs += logprobs or ()
        return b""

    def thought(self, text: str) -> bytes:
        self._clock.first()
        self._thoughts.append(text)
        return b""

    def last(self) -> bytes:
        calls, broken = self.called()
        end = b"%b,%b" % (_logprobs(self._logprobs), self.figures())
        return self._line("".join((*self._texts, broken)), "".join(self._thoughts), end, calls)


def _logprobs(logprobs: list[msgspec.Raw] | None) -> bytes:
    return b',"logprobs":%b' % _encode(logprobs) if logprobs else b""


class _Vector(msgspec.Struct):
    embedding: msgspec.Raw
    index: int = 0


_numbers = msgspec.json.Decoder(list[float])


def _first(vector: msgspec.Raw, length: int | None) -> Any:
    """Returns the first numbers of a vector, as a vector of the length 1."""
    if length is None or length >= len(numbers := _numbers.decode(vector)):
        return vector
    norm = math.sqrt(sum(number * number for number in numbers[:length])) or 1.0
    return [number / norm for number in numbers[:length]]


class _Vectors(msgspec.Struct):
    data: list[_Vector]
    usage: TokenUsage | None = None


class OllamaEmbeddings(WholeBody):
    """The vectors as the engine wrote them, or their first `length` numbers, normalised again; with `single`, the only
    one in the form of `/api/embeddings`."""

    def __init__(
        self, model: str, clock: AnswerClock, headers: tuple[Header, ...], *, single: bool, length: int | None = None
    ) -> None:
        super().__init__(headers)
        self._model = model
        self._clock = clock
        self._single = single
        self._length = length

    def end(self) -> bytes:
        answer = self.decoded(_Vectors)
        vectors = [_first(each.embedding, self._length) for each in sorted(answer.data, key=lambda each: each.index)]
        if self._single:
            return _encode({"embedding": vectors[0] if vectors else []})
        figures = self._clock.figures(answer.usage or TokenUsage(), None)
        durations = {name: figures[name] for name in ("total_duration", "load_duration", "prompt_eval_count")}
        return _encode({"model": self._model, "embeddings": vectors, **durations})
