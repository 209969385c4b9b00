"""Translates Anthropic's messages to those of a chat.

Source of the fields: https://docs.claude.com/en/api/messages
"""

from typing import Any, Literal

import msgspec

from modelrunner.errors import BadRequest
from modelrunner.schema import wrong_field

_IGNORED = ("container", "context_management", "inference_geo", "service_tier")
_DEFAULTS = (None, "auto", "standard_only")
_SAME = ("max_tokens", "temperature", "top_p", "top_k")
_PASSED = frozenset({"text", "thinking", "redacted_thinking", "image", "tool_use", "tool_result"})
"""The types of content that llama.cpp's messages read (tools/server/server-chat.cpp), and redacted content."""


class Block(msgspec.Struct):
    """A block of content of any type. A `cache_control` has no effect: engines cache prompts anyway."""

    type: str
    text: str | None = None
    thinking: str | None = None
    source: Any = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[Block] | None" = None


class _Typed(msgspec.Struct):
    type: str = ""
    content: "str | list[_Typed] | None" = None

    def is_passed(self) -> bool:
        return self.type in _PASSED and _all_passed(self.content)


class _TypedTurn(msgspec.Struct):
    content: str | list[_Typed] | None = None


class _TypedRequest(msgspec.Struct):
    messages: list[_TypedTurn]
    system: str | list[_Typed] | None = None


def _all_passed(content: str | list[_Typed] | None) -> bool:
    return content is None or isinstance(content, str) or all(block.is_passed() for block in content)


def has_other_content(body: bytes) -> bool:
    """Returns whether a request has content that an engine's own messages drop silently, such as a document. False for
    an invalid request, whose fault the engine tells."""
    try:
        request = msgspec.json.decode(body, type=_TypedRequest)
    except msgspec.ValidationError:
        return False
    except RecursionError:
        return True
    return not all(map(_all_passed, (request.system, *(turn.content for turn in request.messages))))


class Turn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None

    def function(self) -> dict[str, Any]:
        """Returns the tool as a function. Raises `BadRequest` for a tool that runs at a service."""
        if self.type not in (None, "custom"):
            raise BadRequest(f"the tool {self.name} of the type {self.type} runs at a service, not here", param="tools")
        described = {"description": self.description} if self.description else {}
        parameters = self.input_schema or {"type": "object"}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": parameters}}


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def mapped(self) -> dict[str, Any]:
        named = {"type": "function", "function": {"name": self.name}}
        choice = {"auto": "auto", "any": "required", "none": "none", "tool": named}[self.type]
        single = {"parallel_tool_calls": False} if self.disable_parallel_tool_use else {}
        return {"tool_choice": choice, **single}


class Thinking(msgspec.Struct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class MessageRequest(msgspec.Struct):
    """`POST /v1/messages` and its `count_tokens`."""

    model: str
    messages: list[Turn]
    max_tokens: int | None = None
    system: str | list[Block] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    metadata: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None
    context_management: Any = None
    inference_geo: Any = None
    service_tier: Any = None

    @classmethod
    def of(cls, body: bytes) -> "MessageRequest":
        """Decodes a body. Raises `BadRequest`."""
        try:
            return msgspec.json.decode(body, type=cls)
        except msgspec.ValidationError as error:
            raise wrong_field(error) from None
        except RecursionError:
            raise BadRequest("the content is nested too deep", param="messages") from None

    def ignored(self) -> tuple[str, ...]:
        """Returns the names of the request's fields that have no effect."""
        names = [name for name in _IGNORED if getattr(self, name) not in _DEFAULTS]
        budget = self.thinking is not None and self.thinking.budget_tokens is not None
        return (*names, *(["thinking.budget_tokens"] if budget else []))

    def chat(self) -> dict[str, Any]:
        """Returns the body of a chat, without the model. Raises `BadRequest`."""
        if self.mcp_servers:
            raise BadRequest("mcp_servers are not supported: leave them out", param="mcp_servers")
        body: dict[str, Any] = {"messages": self._messages()}
        body |= {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        if self.stop_sequences:
            body["stop"] = self.stop_sequences
        if self.tools:
            body["tools"] = [tool.function() for tool in self.tools]
        if self.tool_choice is not None:
            body |= self.tool_choice.mapped()
        if self.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
        if isinstance(user := (self.metadata or {}).get("user_id"), str):
            body["user"] = user
        return body | self._output()

    def _output(self) -> dict[str, Any]:
        config = self.output_config or {}
        effort = {"reasoning_effort": config["effort"]} if config.get("effort") else {}
        wanted = config.get("format")
        if wanted is None:
            return effort
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            raise BadRequest(
                "output_config.format has the type json_schema, and a schema", param="output_config.format"
            )
        schema = {"name": "answer", "schema": wanted.get("schema"), "strict": True}
        return effort | {"response_format": {"type": "json_schema", "json_schema": schema}}

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.system:
            text = self.system if isinstance(self.system, str) else "\n\n".join(_text(block) for block in self.system)
            messages.append({"role": "system", "content": text})
        for turn in self.messages:
            if isinstance(turn.content, str):
                messages.append({"role": turn.role, "content": turn.content})
            elif turn.role == "assistant":
                messages.append(_assistant(turn.content))
            else:
                messages += _user(turn.role, turn.content)
        return messages


def _assistant(blocks: list[Block]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls = []
    for block in blocks:
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                continue  # encrypted by the service that wrote it
            case "tool_use":
                function = {"name": block.name, "arguments": msgspec.json.encode(block.input or {}).decode()}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                texts.append(_text(block))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    thought = "".join(thoughts)
    return message | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})


def _user(role: str, blocks: list[Block]) -> list[dict[str, Any]]:
    """Returns messages for a user's blocks: first one for each result of a tool, then one with the other blocks and the
    images of the results."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if block.type != "tool_result":
            parts.append(_part(block))
            continue
        inner = [Block("text", block.content)] if isinstance(block.content, str) else block.content or []
        converted = [_part(one) for one in inner]
        text = "\n".join(part["text"] for part in converted if "text" in part)
        results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        parts += [part for part in converted if "text" not in part]
    if not parts:
        return results
    plain = all("text" in part for part in parts)
    return [*results, {"role": role, "content": "\n".join(part["text"] for part in parts) if plain else parts}]


def _part(block: Block) -> dict[str, Any]:
    source = block.source if isinstance(block.source, dict) else {}
    if block.type == "image":
        if source.get("type") == "url":
            return {"type": "image_url", "image_url": {"url": source.get("url")}}
        if source.get("type") == "base64":
            url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
            return {"type": "image_url", "image_url": {"url": url}}
        raise BadRequest("the source of an image has the type base64 or url", param="messages")
    if block.type == "document" and source.get("type") == "text" and isinstance(source.get("data"), str):
        return {"type": "text", "text": source["data"]}
    return {"type": "text", "text": _text(block)}


def _text(block: Block) -> str:
    if block.type != "text" or block.text is None:
        raise BadRequest(f"content of the type {block.type!r} is not offered here", param="messages")
    return block.text
