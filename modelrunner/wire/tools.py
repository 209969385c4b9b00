"""The structs about tools of MCP servers."""

from typing import Any, Literal

import msgspec


class ToolStatus(msgspec.Struct, frozen=True):
    """A tool of the MCP server `server`, under its name here; `parameters` is a JSON schema."""

    name: str
    server: str
    description: str
    parameters: dict[str, Any]
    type: Literal["function"] = "function"


class ToolList(msgspec.Struct, frozen=True):
    """The answer of `GET /v1/tools`; `errors` has a reason for each server that could not be asked."""

    data: list[ToolStatus]
    errors: dict[str, str]
    object: Literal["list"] = "list"


class ToolCallRequest(msgspec.Struct, frozen=True):
    """The body of `POST /v1/tools/execute`."""

    name: str
    arguments: dict[str, Any] = {}


class ToolAnswer(msgspec.Struct, frozen=True):
    """The result of a call: MCP's blocks, and their texts in one. `is_error` is the tool's own report."""

    name: str
    text: str
    content: list[dict[str, Any]]
    structured_content: Any
    is_error: bool
    object: Literal["tool.result"] = "tool.result"
