"""The conversation of a tool loop: the client's chat, and the messages that the model and its tools add to it."""

from collections.abc import Sequence
from typing import Any

import msgspec

from modelrunner.errors import BadRequest
from modelrunner.gateway.dialects.bodies import MEMBERS, with_members
from modelrunner.gateway.interceptors.toolturn import ToolCall
from modelrunner.gateway.request.tool_choice import name_of

_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_OF_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Chat(msgspec.Struct):
    messages: list[msgspec.Raw]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None


class ToolChat:
    """`theirs` are the names of the client's own tools; `wants_usage` is True if its stream ends with the token
    counts."""

    def __init__(self, body: bytes) -> None:
        """Raises `BadRequest`."""
        self._members = MEMBERS.decode(body)
        del self._members["modelrunner_tools"]
        try:
            chat = msgspec.json.decode(body, type=_Chat)
        except msgspec.ValidationError as error:
            raise BadRequest(f"a chat with modelrunner_tools: {error}") from None
        if chat.n not in (None, 1):
            raise BadRequest("a chat with modelrunner_tools has one answer: leave `n` out", param="n")
        self.theirs = frozenset(name for tool in chat.tools or () if (name := name_of(tool)) is not None)
        self.wants_usage = bool(chat.stream_options and chat.stream_options.include_usage)
        self._tools: list[Any] = [*(chat.tools or ())]
        self._choice = chat.tool_choice
        self._messages: list[Any] = [*chat.messages]
        self._called = False

    def request(self, functions: Sequence[dict[str, Any]]) -> bytes:
        """Returns the next request to the engine, with `functions` beside the client's own tools. A `tool_choice` that
        requires a call holds until the first call, else the model could never answer. A named tool is the only tool of
        its request, for every engine. Raises `BadRequest`."""
        tools = [*self._tools, *functions]
        changed: dict[str, Any] = {"messages": self._messages, **_STREAM}
        if not tools:
            return with_members({name: raw for name, raw in self._members.items() if name not in _OF_TOOLS}, changed)
        if self._called and self._choice != "none":
            changed["tool_choice"] = "auto"
        elif (named := _named(self._choice)) is not None:
            changed["tool_choice"] = "required"
            tools = [tool for tool in tools if name_of(tool) == named]
            if not tools:
                raise BadRequest(f"`tool_choice` names {named!r}, which is none of the tools", param="tool_choice")
        return with_members(self._members, {**changed, "tools": tools})

    def add(self, content: Any, calls: Sequence[ToolCall], results: Sequence[str]) -> None:
        """Adds the model's message and the results of its calls. Broken arguments become `{}`, since engines refuse
        them."""
        self._called = True
        made = []
        for call in calls:
            arguments = call.arguments if call.decoded() is not None else "{}"
            function = {"name": call.name, "arguments": arguments}
            made.append({"id": call.id, "type": "function", "function": function})
        self._messages.append({"role": "assistant", "content": content, "tool_calls": made})
        for call, result in zip(calls, results, strict=True):
            self._messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def _named(choice: str | dict[str, Any] | None) -> str | None:
    return name_of(choice) if isinstance(choice, dict) else None
