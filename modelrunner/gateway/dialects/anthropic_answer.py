"""Assembles an Anthropic message from the events of its stream.

Source of the events: https://docs.claude.com/en/docs/build-with-claude/streaming."""

from collections.abc import Mapping
from typing import Any

import msgspec

from modelrunner.gateway.dialects.assembly import Assembly, Event, finished, grow
from modelrunner.gateway.dialects.chunks import arguments_of

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
        found = msgspec.json.decode(msgspec.json.encode(event), type=_Delta)
        match found.type:
            case "message_start":
                self._message = found.message
            case "content_block_start":
                self._blocks[found.index] = found.content_block
            case "content_block_delta":
                block = self._blocks.setdefault(found.index, {})
                for name, value in found.delta.items():
                    if name in _OWN and isinstance(value, str):
                        grow(block, name, value)
            case "message_delta":
                self._message |= found.delta
                self._message["usage"] = (self._message.get("usage") or {}) | found.usage
            case "message_stop":
                self._stopped = True
            case _:
                return 0
        return sum(len(bytes(raw)) for raw in event.values())

    def complete(self) -> bool:
        return self._stopped

    def answer(self) -> Mapping[str, Any]:
        blocks = [_block(finished(block)) for _, block in sorted(self._blocks.items())]
        return self._message | {"content": blocks}


def _block(block: dict[str, Any]) -> dict[str, Any]:
    """Returns a complete block. The input of a tool call comes as pieces of JSON text."""
    partial = block.pop(_PARTIAL, "")
    return block | {"input": arguments_of(partial) or {}} if partial else block
