"""A required call of a tool, for an engine that lets a text stand before one (`EndpointApi.prose_before_calls`), where
a weak model writes prose until its limit and calls nothing. Such an engine is asked for the calls as JSON that a schema
holds, after its reasoning if it has any; the model still sees the tools, as its chat template shows them.

vLLM does the same: https://docs.vllm.ai/en/latest/features/tool_calling.html, "Required Function Calling".
"""

import json
import re
import secrets
from typing import Any

import msgspec

from modelrunner.errors import EngineProtocolError
from modelrunner.gateway.calls import EVENT_STREAM, Translation
from modelrunner.gateway.dialects.assembly import LIMIT, TOO_LARGE
from modelrunner.gateway.dialects.rewritten import RewrittenEvents
from modelrunner.gateway.engine_request import EngineRequest
from modelrunner.gateway.request.tokens import Tokens

_HOLDS = ("grammar", "json_schema")
_DEFINED = re.compile(r"^#/(?:\$defs|definitions)/")
_OF_ALL_CHOICES = ("usage", "timings")
_BEGINNING = re.compile(r'\s*+[\[,]?\s*+\{\s*+"name"\s*+:\s*+("(?:[^"\\]|\\.)*+")\s*+,\s*+"arguments"\s*+:\s*+')
_END = re.compile(r"\s*+\}")
_json = json.JSONDecoder()


def require_calls(request: EngineRequest) -> bool:
    """Makes a chat that requires a call one for the JSON of calls; returns False for any other chat, which stays as it
    is. So does one that the engine refuses: with a grammar of the client's own, or with tools that are none."""
    tools = request.get("tools")
    if request.get("tool_choice") != "required" or any(request.has(name) for name in _HOLDS):
        return False
    if not isinstance(tools, list) or not all(_is_function(tool) for tool in tools):
        return False
    definitions: dict[str, Any] = {}
    calls = []
    for number, function in enumerate(tool["function"] for tool in tools):
        arguments = _moved(function.get("parameters") or {"type": "object"}, number, definitions)
        members = {"name": {"const": function["name"]}, "arguments": arguments}
        calls.append({"type": "object", "properties": members, "required": list(members)})
    several = request.get("parallel_tool_calls") is True
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1} | ({} if several else {"maxItems": 1})
    held = schema | ({"$defs": definitions} if definitions else {})
    form = {"type": "json_schema", "json_schema": {"name": "calls", "schema": held}}
    request.set({"response_format": form, "tool_choice": "none", "parallel_tool_calls": None})
    return True


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters"), dict | None)
    )


def _moved(schema: Any, number: int, definitions: dict[str, Any]) -> Any:
    """Moves the definitions of a tool's schema, a copy, to those of the whole one, with the tool's number in their
    names. What refers to another place of the schema refers to that place of the whole one."""
    here = f"#/items/anyOf/{number}/properties/arguments/"
    open_values = [schema]
    while open_values:
        one = open_values.pop()
        if isinstance(one, dict):
            if isinstance(reference := one.get("$ref"), str):
                defined, count = _DEFINED.subn(f"#/$defs/{number}-", reference, count=1)
                one["$ref"] = defined if count else re.sub("^#/", here, reference)
            open_values += one.values()
        elif isinstance(one, list):
            open_values += one
    for place in ("$defs", "definitions"):
        if isinstance(schema, dict) and isinstance(moved := schema.get(place), dict):
            definitions |= {f"{number}-{name}": value for name, value in schema.pop(place, moved).items()}
    return schema


class RequiredCalls(RewrittenEvents):
    """A `Translation` of the stream of such a chat to one with tool calls, for the client or for `then`, which
    translates it further. A call comes whole."""

    def __init__(self, then: Translation | None) -> None:
        super().__init__()
        self._then = then
        self.headers = EVENT_STREAM if then is None else then.headers
        self.whole = then is not None and then.whole
        self.chunk_per_line = then is not None and then.chunk_per_line
        self._texts: dict[int, list[str]] = {}  # of each choice
        self._kept = 0  # characters

    @property
    def counted(self) -> Tokens | None:
        return None if self._then is None else self._then.counted

    def piece(self, data: bytes) -> bytes:
        rewritten = super().piece(data)
        return rewritten if self._then is None else self._then.piece(rewritten)

    def end(self) -> bytes:
        rest = super().end()
        return rest if self._then is None else self._then.piece(rest) + self._then.end()

    def event(self, event: bytes) -> bytes:
        data = event[5:].strip()
        if not event.startswith(b"data:") or data == b"[DONE]":
            return event
        fields = msgspec.json.decode(data)
        if not fields.get("choices"):
            return event
        called = [called for choice in fields["choices"] if (called := self._held(choice))]
        written = b"data: " + msgspec.json.encode(fields)
        if not called:
            return written
        before = {name: value for name, value in fields.items() if name not in _OF_ALL_CHOICES} | {"choices": called}
        return b"data: %b\n\n%b" % (msgspec.json.encode(before), written)

    def _held(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Takes the text out of a chunk of a choice; returns a chunk with the calls if it is the last one."""
        index, delta, reason = choice.get("index", 0), choice.get("delta") or {}, choice.get("finish_reason")
        texts = self._texts.setdefault(index, [])
        if isinstance(text := delta.get("content"), str):
            del delta["content"]
            texts.append(text)
            self._kept += len(text)
            if self._kept > LIMIT:
                raise EngineProtocolError(TOO_LARGE)
        if reason is None:
            return None
        text = "".join(texts)
        if calls := _calls(text):
            choice["finish_reason"] = "tool_calls" if reason == "stop" else reason
            return {"index": index, "delta": {"tool_calls": calls}, "finish_reason": None}
        # An engine that did not hold the schema; else the limit came before the name of a tool.
        return {"index": index, "delta": {"content": text}, "finish_reason": None} if reason == "stop" else None


def _calls(text: str) -> list[dict[str, Any]]:
    """Returns the calls in an answer, of which the last may be cut."""
    calls: list[dict[str, Any]] = []
    at: int = 0
    while (begun := _BEGINNING.match(text, at)) is not None:
        start = begun.end()
        try:
            at = _json.raw_decode(text, start)[1]
        except (json.JSONDecodeError, RecursionError):
            at = len(text)
        function = {"name": json.loads(begun[1]), "arguments": text[start:at]}
        id = f"call_{secrets.token_hex(12)}"
        calls.append({"index": len(calls), "id": id, "type": "function", "function": function})
        ended = _END.match(text, at)
        at = len(text) if ended is None else ended.end()
    return calls
