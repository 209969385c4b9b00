"""A `tool_choice` that names tools, for an engine that does not read the names: the engine gets only these tools, and a
choice of one word. No engine reads a list of allowed tools; some read only words
(`EndpointApi.chooses_by_word`).

Source of the shapes: https://platform.openai.com/docs/api-reference/chat/create,
https://docs.claude.com/en/api/messages
"""

from collections.abc import Sequence
from typing import Any

from modelrunner.engineapi import ApiShape
from modelrunner.errors import BadRequest
from modelrunner.gateway.engine_request import EngineRequest

_LIST = "allowed_tools"
_MOST_TOLD = 8  # names in an error
_LONGEST_TOLD = 80  # characters of one


def choose_tools(request: EngineRequest, shape: ApiShape, *, by_word: bool) -> None:
    """Changes a choice that lists tools, or names a tool to an endpoint that takes words alone (`by_word`). Raises
    `BadRequest` for a choice without such a word, or whose tools are all missing."""
    choice = request.get("tool_choice")
    if not isinstance(choice, dict) or (not by_word and choice.get("type") != _LIST):
        return
    if shape in (ApiShape.MESSAGES, ApiShape.MESSAGE_COUNT):
        if choice.get("type") != "tool":
            return
        word: Any = {**choice, "type": "any"}
        word.pop("name", None)
        names: Sequence[Any] = (choice.get("name"),)
    else:
        word, names = _of_a_chat(choice)
    tools = request.get("tools")
    chosen = {name for name in names if name is None or isinstance(name, str)}
    offered = [tool for tool in tools if name_of(tool) in chosen] if isinstance(tools, list) else []
    if not offered:
        listed = ", ".join(repr(name)[:_LONGEST_TOLD] for name in names[:_MOST_TOLD])
        listed += " and others" if len(names) > _MOST_TOLD else ""
        raise BadRequest(f"`tool_choice` names {listed}, which is none of the tools", param="tool_choice")
    request.set({"tools": offered, "tool_choice": word})


def name_of(tool: Any) -> str | None:
    """Returns the name of an offered or chosen tool; None for a value that is not a tool."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def word_of(choice: Any) -> Any:
    """Returns the word of a `tool_choice`. Anthropic's choice is an object, and so is a list of allowed tools, which is
    flat among Responses and nested in a chat."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    allowed = choice.get("allowed_tools", choice)
    return allowed.get("mode") if kind == "allowed_tools" and isinstance(allowed, dict) else kind


def _of_a_chat(choice: dict[str, Any]) -> tuple[str, Sequence[str | None]]:
    """Returns the word, and the names of the tools that may be called. Raises `BadRequest`."""
    match choice.get("type"):
        case "function" if (name := name_of(choice)) is not None:
            return "required", (name,)
        case "allowed_tools" if isinstance(allowed := choice.get(_LIST), dict):
            tools, mode = allowed.get("tools"), allowed.get("mode")
            if isinstance(tools, list) and mode in ("auto", "required"):
                return mode, [name_of(tool) for tool in tools]
    raise BadRequest(
        "`tool_choice` is auto, none or required, or an object that names a function or the allowed tools",
        param="tool_choice",
    )
