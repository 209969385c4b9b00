"""Assembles a chat completion or a completion from the chunks of its stream.

Source of the shapes: https://platform.openai.com/docs/api-reference/chat-streaming and llama.cpp's
tools/server/server-task.cpp, which adds `timings`, `reasoning_content` and `prompt_progress`."""

from collections.abc import Mapping
from typing import Any

import msgspec

from modelrunner.gateway.dialects.assembly import Assembly, Event, finished, grow, is_null
from modelrunner.gateway.dialects.choices import ChoiceCounts
from modelrunner.gateway.dialects.completion_logprobs import in_lists
from modelrunner.gateway.request.tokens import Tokens

_GROWING = frozenset(("content", "reasoning_content", "refusal", "arguments"))
_STREAMED_ONLY = frozenset(("choices", "prompt_progress"))
_choices = msgspec.json.Decoder(list[Event])
_index = msgspec.json.Decoder(int)
_text = msgspec.json.Decoder(str)
_object = msgspec.json.Decoder(dict[str, Any])
_logprobs = msgspec.json.Decoder(Event)


class OpenAIAnswer(Assembly):
    """The fields beside the choices (`timings`) come from the choice with the index 0, as in llama.cpp's answers with
    several choices. `counts` counts the tokens of several choices."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: ChoiceCounts | None = None
        self._fields: Event = {}
        self._choices: dict[int, _ChoicePieces] = {}
        self._current = 0  # the choice of the last chunk: the usage follows it, without an index

    @property
    def counted(self) -> Tokens | None:
        return self.counts.tokens if self.counts is not None else None

    def _read(self, data: bytes) -> None:
        super()._read(data)
        if self.counts is not None:
            self.counts.read(data)

    def add(self, event: Event) -> int:
        kept = 0
        for fields in _choices.decode(event.get("choices", b"[]")):
            self._current = _index.decode(fields.pop("index", b"0"))
            choice = self._choices.get(self._current)
            if choice is None:
                choice = self._choices[self._current] = _ChoicePieces()
            kept += choice.add(fields)
        for name, raw in event.items():
            if name in _STREAMED_ONLY or is_null(raw):
                continue
            if self._current == 0 or name not in self._fields:
                self._fields[name] = raw
        return kept

    def complete(self) -> bool:
        return bool(self._choices) and all(choice.finished for choice in self._choices.values())

    def answer(self) -> Mapping[str, Any]:
        choices = [{**choice.answer(), "index": index} for index, choice in sorted(self._choices.items())]
        kind = _text.decode(self._fields.get("object", b'""')).removesuffix(".chunk")
        usage = {"usage": self.counts.usage()} if self.counts is not None else {}
        return {"choices": choices, **self._fields, **usage, "object": kind}


class _ChoicePieces:
    def __init__(self) -> None:
        self.finished = False
        self._fields: dict[str, Any] = {}
        self._logprobs: dict[str, list[bytes]] = {}  # the elements of each list as the engine wrote them

    def add(self, fields: Event) -> int:
        """Adds a chunk, and returns how many bytes of it are kept."""
        kept = 0
        for name, raw in fields.items():
            if is_null(raw):
                self._fields.setdefault(name, None)
                continue
            kept += len(bytes(raw))
            match name:
                case "delta":
                    _merge(self._fields.setdefault("message", {}), _object.decode(raw))
                case "text":
                    grow(self._fields, name, _text.decode(raw))
                case "logprobs":
                    self._add_logprobs(_logprobs.decode(raw))
                case _:
                    self._fields[name] = msgspec.json.decode(raw)
        self.finished = self._fields.get("finish_reason") is not None
        return kept

    def _add_logprobs(self, logprobs: Event) -> None:
        for name, raw in logprobs.items():
            elements = self._logprobs.setdefault(name, [])
            if (text := bytes(raw)).startswith(b"[") and (inner := text[1:-1].strip()):
                elements.append(inner)

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = finished(self._fields)
        if self._logprobs:
            lists = {name: b"[%b]" % b",".join(elements) for name, elements in self._logprobs.items()}
            answer["logprobs"] = {name: msgspec.Raw(elements) for name, elements in lists.items()}
            if "text" in answer and "content" in lists:
                answer["logprobs"], _ = in_lists({"content": msgspec.json.decode(lists["content"])}, 0)
        message = answer.get("message")
        if message is not None and message.get("tool_calls"):
            calls = message["tool_calls"]
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
        elif message is not None and message.get("content") is None:
            message["content"] = ""  # a message without a call has a text, if an empty one
        return answer


def _merge(known: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Adds a delta to a message, or to one of its tool calls, which are kept by their index."""
    for name, value in delta.items():
        if value is None:
            known.setdefault(name, None)
        elif name in _GROWING and isinstance(value, str):
            grow(known, name, value)
        elif name == "tool_calls":
            calls = known.setdefault(name, {})
            for call in msgspec.convert(value, list[dict[str, Any]]):
                _merge(calls.setdefault(msgspec.convert(call.pop("index", 0), int), {}), call)
        elif isinstance(value, dict):
            known[name] = inner = known.get(name) or {}
            _merge(inner, value)
        else:
            known[name] = value
