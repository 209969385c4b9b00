"""The tools of the Responses API as the functions of a chat, and the calls of these functions as its items.

An engine knows only functions: a tool with free text as its input becomes a function with one string, and a tool in a
namespace has the namespace before its name. Source of the fields:
https://platform.openai.com/docs/api-reference/responses/create
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from modelrunner.errors import BadRequest
from modelrunner.gateway.dialects.chunks import GrowingToolCall

_LEFT_OUT = frozenset(
    (
        *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
        *("image_generation", "tool_search", "local_shell", "shell", "apply_patch"),
    )
)
"""Types of tools that no engine has, and without which a model can still answer."""
_INPUT = "input"
_FREE_TEXT = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}
_SHOWN = ("name", "description", "parameters", "strict")


class OfferedTool(NamedTuple):
    """A tool of the client. `kind` is function or custom, `namespace` "" for none."""

    kind: str
    name: str
    namespace: str
    function: dict[str, Any]


class OfferedTools:
    """`left_out` are the types of the tools that are not offered."""

    def __init__(self, tools: Any) -> None:
        """`tools` are those of the request. Raises `BadRequest` for tools that run at a service, without which the
        answer would mean something else."""
        self.left_out: list[Any] = []
        self._by_name: dict[str, OfferedTool] = {}
        for tool in _list(tools):
            self._add(tool, "")

    def _add(self, tool: Any, namespace: str) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        name = tool.get("name") if kind is not None else None
        if kind in ("function", "custom") and isinstance(name, str):
            offered = _function(tool) if kind == "function" else _with_free_text(tool)
            offered["name"] = function_name(name, namespace)
            self._by_name[offered["name"]] = OfferedTool(
                kind, name, namespace, {"type": "function", "function": offered}
            )
        elif kind == "namespace" and isinstance(name, str) and not namespace:
            for one in _list(tool.get("tools")):
                self._add(one, name)
        elif _is_left_out(tool):
            self.left_out.append(kind)
        else:
            raise BadRequest(
                "tools of the types function, custom and namespace are supported, and those of a service are not",
                param="tools",
            )

    def functions(self) -> list[dict[str, Any]]:
        return [tool.function for tool in self._by_name.values()]

    def choice(self, choice: Any) -> Any:
        """Returns the `tool_choice` of a chat. Raises `BadRequest` if it requires a tool that is not offered."""
        if choice == "required" and self.left_out and not self._by_name:
            raise BadRequest("none of the tools that must be called is offered here", param="tool_choice")
        if not isinstance(choice, dict):
            return choice
        if choice.get("type") == "allowed_tools":
            named = [_named(one) for one in _list(choice.get("tools")) if not _is_left_out(one)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
        return _named(choice)

    def item(self, id: str, call_id: str, call: GrowingToolCall) -> dict[str, Any]:
        """Returns the complete item of a call."""
        tool = self._by_name.get(call.name)
        status = "completed" if call.decoded() is not None else "incomplete"  # the limit of tokens cut it
        item = {"id": id, "type": "function_call", "status": status, "call_id": call_id, "name": call.name}
        if tool is not None:
            item["name"] = tool.name
            if tool.namespace:
                item["namespace"] = tool.namespace
            if tool.kind == "custom":
                text = (call.decoded() or {}).get(_INPUT)
                return item | {"type": "custom_tool_call", _INPUT: text if isinstance(text, str) else call.arguments}
        return item | {"arguments": call.arguments}


def function_name(name: Any, namespace: Any) -> Any:
    return f"{namespace}__{name}" if namespace else name


def arguments_with(text: Any) -> dict[str, Any]:
    return {_INPUT: text}


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tool[name] for name in _SHOWN if tool.get(name) is not None}


def _with_free_text(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the members of a function for a custom tool. The model sees the grammar of its text in the description,
    since no engine enforces a grammar within a call."""
    about, form = tool.get("description") or "", tool.get("format")
    if isinstance(form, dict) and isinstance(form.get("definition"), str):
        about = f"{about}\nThe input follows this {form.get('syntax')} grammar:\n{form['definition']}".lstrip()
    return {"description": about, "parameters": _FREE_TEXT}


def _named(choice: Any) -> dict[str, Any]:
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        raise BadRequest("`tool_choice` names a tool that is not offered here", param="tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _is_left_out(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind in _LEFT_OUT


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
