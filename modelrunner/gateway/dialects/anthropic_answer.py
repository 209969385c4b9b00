"""An engine's Anthropic messages: assembled from the events of a stream or passed as one, with what engines write
differently from Anthropic put right.

Source of the events: https://docs.claude.com/en/docs/build-with-claude/streaming."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from modelrunner.gateway.dialects.assembly import Assembly, Event, finished, grow
from modelrunner.gateway.dialects.chunks import arguments_of
from modelrunner.gateway.dialects.rewritten import RewrittenEvents

_CHAT_ID = "chatcmpl-"
_PARTIAL = "partial_json"
_OWN = ("text", "thinking", "signature", _PARTIAL)  # texts of a delta that grow


class _Delta(msgspec.Struct):
    """The fields that are used, from events of any type."""

    type: str
    index: int = 0
    message: dict[str, Any] = {}
    content_block: dict[str, Any] = {}
    delta: dict[str, Any] = {}
    usage: dict[str, Any] = {}


class AnthropicAnswer(Assembly):
    def __init__(self) -> None:
        super().__init__()
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._stopped = False

    def add(self, event: Event) -> int:
        delta = msgspec.json.decode(msgspec.json.encode(event), type=_Delta)
        match delta.type:
            case "message_start":
                self._message = delta.message
            case "content_block_start":
                self._blocks[delta.index] = delta.content_block
            case "content_block_delta":
                block = self._blocks.setdefault(delta.index, {})
                for name, value in delta.delta.items():
                    if name in _OWN and isinstance(value, str):
                        grow(block, name, value)
            case "message_delta":
                self._message |= delta.delta
                self._message["usage"] = (self._message.get("usage") or {}) | delta.usage
            case "message_stop":
                self._stopped = True
            case _:
                return 0
        return sum(len(bytes(raw)) for raw in event.values())

    def complete(self) -> bool:
        return self._stopped

    def answer(self) -> Mapping[str, Any]:
        blocks = [_block(finished(block)) for _, block in sorted(self._blocks.items())]
        return _ended(_named(self._message)) | {"content": blocks}


def _block(block: dict[str, Any]) -> dict[str, Any]:
    """Returns a complete block. The input of a tool call comes as pieces of JSON text."""
    partial = block.pop(_PARTIAL, "")
    return block | {"input": arguments_of(partial) or {}} if partial else _begun(block)


class PassedMessage(RewrittenEvents):
    """The stream of a message."""

    def event(self, event: bytes) -> bytes:
        kind, between, data = event.partition(b"\ndata: ")
        change = _CHANGED.get(kind)
        if change is None:
            return event
        name, rewrite = change
        fields = msgspec.json.decode(data, type=dict[str, Any])
        return kind + between + msgspec.json.encode({**fields, name: rewrite(fields[name])})


def _named(message: dict[str, Any]) -> dict[str, Any]:
    """Gives a message the ID of a message: engines give it that of a chat."""
    id = message.get("id")
    if not isinstance(id, str) or not id.startswith(_CHAT_ID):
        return message
    return {**message, "id": "msg_" + id.removeprefix(_CHAT_ID)}


def _begun(block: dict[str, Any]) -> dict[str, Any]:
    """Gives the call of a tool its input, which the pieces of a stream fill."""
    return {"input": {}, **block} if block.get("type") == "tool_use" else block


def _ended(delta: dict[str, Any]) -> dict[str, Any]:
    """Writes that a stop sequence ended the answer. llama.cpp names the sequence alone."""
    stopped = delta.get("stop_sequence") is not None and delta.get("stop_reason") == "end_turn"
    return {**delta, "stop_reason": "stop_sequence"} if stopped else delta


_CHANGED: Mapping[bytes, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    b"event: message_start": ("message", _named),
    b"event: content_block_start": ("content_block", _begun),
    b"event: message_delta": ("delta", _ended),
}
