"""The chunks in the stream of a chat completion or a completion, for the families that translate them.

Source of the shapes: https://platform.openai.com/docs/api-reference/chat-streaming; llama.cpp adds `timings`, and both
llama.cpp and vLLM add the text of the reasoning.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec

from modelrunner.engine.runner import Runner
from modelrunner.errors import EngineProtocolError
from modelrunner.gateway.dialects.assembly import LIMIT, TOO_LARGE, EventLines, refusal_of
from modelrunner.gateway.dialects.dialect import engine_model
from modelrunner.gateway.dialects.nesting import decode_with_room
from modelrunner.gateway.engine_errors import EngineRefusal, EngineRefused
from modelrunner.gateway.engine_request import EngineRequest
from modelrunner.gateway.request.tokens import Tokens
from modelrunner.http.answers import Header


class FunctionPart(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class ToolCallPart(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: FunctionPart | None = None


class ChunkDelta(msgspec.Struct):
    """`reasoning_content` is llama.cpp's and vLLM's name, `reasoning` vLLM's newer one."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallPart] | None = None

    @property
    def thought(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class LogProbabilities(msgspec.Struct):
    """`content` has an element for each token, as the engine wrote them."""

    content: list[msgspec.Raw] | None = None


class ChunkChoice(msgspec.Struct):
    """`text` is that of a completion. `stop_reason` is vLLM's: the text that ended the answer, or the ID of a token."""

    delta: ChunkDelta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: LogProbabilities | None = None


class CachedTokens(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class TokenUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None

    @property
    def cached(self) -> int:
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class Timings(msgspec.Struct, gc=False):
    """llama.cpp's, in milliseconds."""

    prompt_ms: float = 0.0
    predicted_ms: float = 0.0


class CompletionChunk(msgspec.Struct):
    choices: list[ChunkChoice] = []
    usage: TokenUsage | None = None
    timings: Timings | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(CompletionChunk)


_arguments = msgspec.json.Decoder(dict[str, Any])


def arguments_of(text: str) -> dict[str, Any] | None:
    """Returns the arguments of a tool call, which a model wrote; None if they are not a JSON object, as in an answer
    that was cut off, or are nested too deep."""
    try:
        return decode_with_room(_arguments.decode, text.encode() or b"{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


class GrowingToolCall:
    """A tool call that grows by its parts. `arguments` is JSON as text."""

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self._arguments: list[str] = []

    def add(self, part: ToolCallPart) -> None:
        self.id = part.id or self.id
        if part.function is not None:
            self.name = part.function.name or self.name
            self._arguments.append(part.function.arguments or "")

    @property
    def arguments(self) -> str:
        return "".join(self._arguments)

    def decoded(self) -> dict[str, Any] | None:
        return arguments_of(self.arguments)


class ChunkTranslation(ABC):
    """A `Translation` of the first choice of a stream. `end` writes the last lines, since the usage comes after the
    finish reason, and tool calls are complete only then."""

    headers: tuple[Header, ...]
    whole: ClassVar[bool] = False
    chunk_per_line: ClassVar[bool] = False
    counted: Tokens | None = None

    def __init__(self) -> None:
        self._lines = EventLines()
        self._refusal: EngineRefusal | None = None
        self._calls: dict[int, GrowingToolCall] = {}
        self._taken = 0  # bytes
        self.finish_reason = ""
        self.stop_reason: str | int | None = None
        self.usage = TokenUsage()
        self.timings: Timings | None = None

    @property
    def calls(self) -> list[GrowingToolCall]:
        return [call for _, call in sorted(self._calls.items())]

    def piece(self, data: bytes) -> bytes:
        """Returns the client's bytes. Raises `EngineProtocolError`, with the bytes before the fault in `written`."""
        events = self._lines.take(data)
        self._taken += len(data)
        if self._lines.unfinished > LIMIT:
            raise EngineProtocolError(f"the engine's stream has an event of more than {LIMIT >> 20} MiB")
        if self.whole and self._taken > LIMIT:
            raise EngineProtocolError(TOO_LARGE)
        written: list[bytes] = []
        try:
            for event in events:
                written.append(self._translated(event))  # noqa: PERF401  what was written is wanted if one fails
        except EngineProtocolError as error:
            error.written = b"".join(written)
            raise
        return b"".join(written)

    def _translated(self, event: bytes) -> bytes:
        try:
            chunk = _decoder.decode(event)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise EngineProtocolError(f"the engine's stream cannot be read: {error}") from None
        if chunk.error is not None and self.whole:
            self._refusal = self._refusal or refusal_of(event)
            return b""
        if chunk.error is not None:
            reason = chunk.error.get("message") if isinstance(chunk.error, dict) else chunk.error
            raise EngineProtocolError(f"the engine ended its answer with an error: {reason}")
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.timings is not None:
            self.timings = chunk.timings
        return self._choice(chunk.choices[0]) if chunk.choices else b""

    def _choice(self, choice: ChunkChoice) -> bytes:
        if choice.finish_reason:
            self.finish_reason, self.stop_reason = choice.finish_reason, choice.stop_reason
        delta = choice.delta
        logprobs = choice.logprobs.content if choice.logprobs is not None else None
        if delta is None:
            return self.text(choice.text, logprobs) if choice.text else b""
        for part in delta.tool_calls or ():
            self._calls.setdefault(part.index, GrowingToolCall()).add(part)
        written = self.thought(thought) if (thought := delta.thought) else b""
        if text := delta.content or delta.refusal:
            written += self.text(text, logprobs)
        return written

    def end(self) -> bytes:
        if self._refusal is not None:
            raise EngineRefused(self._refusal)
        if not self.finish_reason:
            raise EngineProtocolError("the engine's stream ended before its answer was complete")
        return self.last()

    @abstractmethod
    def text(self, text: str, logprobs: list[msgspec.Raw] | None) -> bytes:
        """Returns the client's bytes for a piece of the answer's text."""

    @abstractmethod
    def thought(self, text: str) -> bytes:
        """Returns the client's bytes for a piece of the reasoning."""

    @abstractmethod
    def last(self) -> bytes:
        """Returns the client's bytes at the end of a complete answer."""


def engine_request(runner: Runner, path: str, model: str, fields: dict[str, Any]) -> EngineRequest:
    """Returns the request that asks the engine for a stream."""
    stream = {"stream": True, "stream_options": {"include_usage": True}, **runner.api.as_stream(path)}
    return EngineRequest.of(path, {"model": engine_model(runner, model), **fields, **stream})
