"""Translates the chunks of a chat to the events of Anthropic's messages, or to one message.

Source of the shapes: https://docs.claude.com/en/docs/build-with-claude/streaming
"""

import secrets
from typing import Any, ClassVar

import msgspec

from modelrunner.errors import EngineProtocolError
from modelrunner.gateway.calls import EVENT_STREAM, JSON
from modelrunner.gateway.dialects.chunks import ChunkTranslation, GrowingToolCall
from modelrunner.http.answers import Header

_encode = msgspec.json.encode
_REASONS = {"length": "max_tokens", "content_filter": "refusal", "tool_calls": "tool_use"}
_EMPTY: dict[str, dict[str, Any]] = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


class MessageEvents(ChunkTranslation):
    """The stream of a message. `stops` are the request's stop sequences."""

    def __init__(self, model: str, stops: list[str], headers: tuple[Header, ...]) -> None:
        super().__init__()
        self.headers = (*EVENT_STREAM, *headers)
        self._model = model
        self._stops = stops
        self._id = f"msg_{secrets.token_hex(12)}"
        self._begun = False
        self._open = ""  # the type of the block that grows
        self._index = 0
        self._start = b""  # of an event of that block

    def piece(self, data: bytes) -> bytes:
        if self._begun:
            return super().piece(data)
        self._begun = True
        return event("message_start", message=self.message([], None, None)) + super().piece(data)

    def text(self, text: str, logprobs: list[msgspec.Raw] | None) -> bytes:
        return self._grow("text", text)

    def thought(self, text: str) -> bytes:
        return self._grow("thinking", text)

    def last(self) -> bytes:
        """Ends the stream. Tool calls are sent whole."""
        calls = b"".join([self._call(call) for call in self.calls])
        reason, sequence = self.reason()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return b"%b%b%b%b" % (
            self._close(),
            calls,
            event("message_delta", delta=delta, usage=self._usage()),
            event("message_stop"),
        )

    def message(self, content: list[dict[str, Any]], reason: str | None, sequence: str | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
        }

    def reason(self) -> tuple[str, str | None]:
        """Returns why the answer ended, and the stop sequence that ended it, if the engine names it."""
        if self.stop_reason in self._stops:
            return "stop_sequence", str(self.stop_reason)
        return _REASONS.get(self.finish_reason) or ("tool_use" if self._calls else "end_turn"), None

    def _usage(self) -> dict[str, Any]:
        """Returns the token counts: those of the prompt that were cached are separate."""
        usage = self.usage
        return {
            "input_tokens": max(0, usage.prompt_tokens - usage.cached),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion_tokens,
        }

    def _grow(self, kind: str, text: str) -> bytes:
        before = b""
        if self._open != kind:
            before = self._close()
            self._open = kind
            before += event("content_block_start", index=self._index, content_block={"type": kind, **_EMPTY[kind]})
            self._start = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,' % self._index
            self._start += f'"delta":{{"type":"{kind}_delta","{kind}":'.encode()
        return b"%b%b%b}}\n\n" % (before, self._start, _encode(text))

    def _close(self) -> bytes:
        if not self._open:
            return b""
        index, before = self._index, b""
        if self._open == "thinking":  # clients send the signature back with the thoughts
            signed = {"type": "signature_delta", "signature": ""}
            before = event("content_block_delta", index=index, delta=signed)
        self._open, self._index = "", index + 1
        return before + event("content_block_stop", index=index)

    def _call(self, call: GrowingToolCall) -> bytes:
        before, index = self._close(), self._index
        self._index += 1
        begun = tool_use(call, {})
        delta = {"type": "input_json_delta", "partial_json": call.arguments or "{}"}
        return b"%b%b%b%b" % (
            before,
            event("content_block_start", index=index, content_block=begun),
            event("content_block_delta", index=index, delta=delta),
            event("content_block_stop", index=index),
        )


def tool_use(call: GrowingToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
    id = call.id or f"toolu_{secrets.token_hex(12)}"
    return {"type": "tool_use", "id": id, "name": call.name, "input": arguments}


class WholeMessage(MessageEvents):
    """A message in one piece."""

    whole: ClassVar[bool] = True

    def __init__(self, model: str, stops: list[str], headers: tuple[Header, ...]) -> None:
        super().__init__(model, stops, headers)
        self.headers = (JSON, *headers)
        self._blocks: list[tuple[str, list[str]]] = []

    def _grow(self, kind: str, text: str) -> bytes:
        if not self._blocks or self._blocks[-1][0] != kind:
            self._blocks.append((kind, []))
        self._blocks[-1][1].append(text)
        return b""

    def last(self) -> bytes:
        """Returns the message. A call that was cut off has an empty input."""
        content = [{"type": kind, **_EMPTY[kind], kind: "".join(pieces)} for kind, pieces in self._blocks]
        content += [tool_use(call, call.decoded() or {}) for call in self.calls]
        return _encode(self.message(content, *self.reason()))


class CountedTokens(WholeMessage):
    """The token count of a prompt, from an answer of one token."""

    def last(self) -> bytes:
        if not self.usage.prompt_tokens:
            raise EngineProtocolError("the engine does not report the tokens of the prompt")
        return _encode({"input_tokens": self.usage.prompt_tokens})
