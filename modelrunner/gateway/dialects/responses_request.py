"""Translates the items of the Responses API to messages of a chat.

Source of the fields: https://platform.openai.com/docs/api-reference/responses/create
"""

import contextlib
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from modelrunner.errors import BadRequest, NotFound, PayloadTooLarge
from modelrunner.gateway.calls import Fields, decoded
from modelrunner.gateway.dialects.normalize import LEAST_LOGPROBS, readable_arguments
from modelrunner.gateway.dialects.responses_tools import OfferedTools, arguments_with, function_name
from modelrunner.gateway.response_store import ResponseStore

_WITHOUT_EFFECT = ("max_tool_calls", "truncation", "service_tier")
_LOGPROBS = "message.output_text.logprobs"
_REFERENCE = "item_reference"
_OTHER_TOOLS = re.compile(r"\w{1,64}_call(_output)?|mcp_\w{1,64}|compaction")
"""Types of items that tools of a service wrote in an earlier session: no model here can read them."""
_UNKNOWN = ("conversation", "prompt")
_OURS = frozenset(("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"))
_TEXTS = frozenset(("input_text", "output_text", "text", "refusal"))


class ResponseFields(Fields, frozen=True, gc=False):
    """`POST /v1/responses`."""

    prepares: ClassVar[bool] = True
    input: str | list[dict[str, Any]] | None = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    top_logprobs: int | None = None
    user: str | None = None
    include: list[Any] | None = None
    max_tool_calls: int | None = None
    truncation: str | None = None
    service_tier: str | None = None
    conversation: Any = None
    prompt: Any = None

    def check(self) -> None:
        """Raises `BadRequest` for a field whose omission would change the answer."""
        for name in _UNKNOWN:
            if getattr(self, name) is not None:
                raise BadRequest(f"{name} is not offered here: send the input", param=name)
        if self.background and self.store is False:
            raise BadRequest("a response in the background is stored: leave `store` out", param="store")
        self.offered().choice(decoded(self.tool_choice, "tool_choice"))
        self._format()
        messages(self.items())

    def items(self) -> list[dict[str, Any]]:
        """Returns the input of this request alone, as items."""
        if not self.input:
            return []
        if isinstance(self.input, str):
            content = [{"type": "input_text", "text": self.input}]
            return [{"type": "message", "role": "user", "content": content}]
        return self.input

    def ignored(self) -> list[str]:
        """Returns the names of the request's fields that have no effect."""
        names = [name for name in _WITHOUT_EFFECT if getattr(self, name) not in (None, [], "auto", "disabled")]
        left_out = [f"tools.{kind}" for kind in self.offered().left_out]
        strange = dict.fromkeys(f"input.{kind}" for item in self.items() if (kind := _strange(item)))
        included = ["include" for one in self.include or () if one != _LOGPROBS][:1]
        return [*names, *(["truncation"] if self.truncation == "auto" else []), *left_out, *strange, *included]

    def offered(self) -> OfferedTools:
        """Returns the tools. Raises `BadRequest` for tools that run at a service."""
        return OfferedTools(decoded(self.tools, "tools"))

    def chat(self, history: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Returns the body of a chat. `history` has the items before this request. Raises `BadRequest`."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        body: dict[str, Any] = {"messages": [*system, *messages([*history, *self.items()])]}
        for name in ("temperature", "top_p", "parallel_tool_calls", "user"):
            if (value := getattr(self, name)) is not None:
                body[name] = value
        if self.max_output_tokens is not None:
            body["max_tokens"] = self.max_output_tokens
        if self.top_logprobs or _LOGPROBS in (self.include or ()):
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs or LEAST_LOGPROBS}
        offered = self.offered()
        if tools := offered.functions():
            body["tools"] = tools
        choice = decoded(self.tool_choice, "tool_choice")
        if choice is not None:
            body["tool_choice"] = offered.choice(choice)
        if self.reasoning and self.reasoning.get("effort"):
            body["reasoning_effort"] = self.reasoning["effort"]
        return body | self._format()

    def _format(self) -> dict[str, Any]:
        wanted = (self.text or {}).get("format") or {"type": "text"}
        if not isinstance(wanted, dict):
            raise BadRequest("text.format is an object with a type", param="text.format")
        match wanted.get("type"):
            case "text":
                return {}
            case "json_object":
                return {"response_format": {"type": "json_object"}}
            case "json_schema":
                schema = {name: value for name, value in wanted.items() if name != "type"}
                return {"response_format": {"type": "json_schema", "json_schema": schema}}
            case other:
                raise BadRequest(f"text.format has the unknown type {other!r}", param="text.format")


class PreparedFields(ResponseFields, frozen=True, gc=False):
    """A request with its conversation. `kept` is the store of its answer, None if the answer is not stored; `owner` is
    an `ApiKey.owner`, "" for the daemon's owner; `size` is that of the request's body in bytes."""

    prepares: ClassVar[bool] = False
    id: str = ""
    created: float = 0.0
    history: Sequence[dict[str, Any]] = ()
    kept: Any = None
    owner: str = ""
    size: int = 0

    @property
    def responses(self) -> ResponseStore | None:
        store: ResponseStore | None = self.kept
        return store


_ID_DIGITS = 48
_OF_AN_ITEM = re.compile(rf"[a-z]{{1,8}}_([0-9a-f]{{{_ID_DIGITS}}})[0-9a-f]+")


def new_id(kind: str) -> str:
    """Returns an ID for an object of the `kind` resp or call."""
    return f"{kind}_{secrets.token_hex(_ID_DIGITS // 2)}"


def item_id(kind: str, response: str, index: int) -> str:
    """Returns the ID of an item of the `kind` msg, rs or fc in the output of a response. It holds the response's ID, so
    that the item is found without a table of items."""
    return f"{kind}_{response.partition('_')[2]}{index:x}"


async def resolved(
    items: Sequence[dict[str, Any]], store: ResponseStore | None, owner: str, largest: int
) -> tuple[list[dict[str, Any]], int]:
    """Returns the items with those of stored responses in place of references to them, and the bytes of these. Raises
    `NotFound`, and `PayloadTooLarge` for more than `largest` bytes."""
    outputs: dict[str, dict[str, dict[str, Any]]] = {}
    conversation, size = list(items), 0
    for place, item in enumerate(items):
        if item.get("type") != _REFERENCE:
            continue
        id = item.get("id")
        named = _OF_AN_ITEM.fullmatch(id) if isinstance(id, str) else None
        response = f"resp_{named[1]}" if named else ""
        if store is not None and response and response not in outputs:
            outputs[response] = {}
            with contextlib.suppress(NotFound):
                stored = await store.get(response, owner)
                outputs[response], size = {one["id"]: one for one in stored.response["output"]}, size + stored.size
            if size > largest:
                raise PayloadTooLarge(f"the items that the input names have more than {largest} bytes together")
        if (whole := outputs.get(response, {}).get(str(id))) is None:
            raise NotFound(
                f"the item {str(id)[:80]!r} is not stored here: send the item itself, and `store` its response",
                param="input",
            )
        conversation[place] = whole
    return conversation, size


def messages(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the items as messages: successive calls, with a text of the assistant, are one message. Raises
    `BadRequest`."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item.get("type") or "message":
            case "message":
                role = item.get("role")
                role = "system" if role == "developer" else role
                messages.append({"role": role, "content": _content(item.get("content"))})
            case "function_call" | "custom_tool_call" as kind:
                arguments = readable_arguments(item.get("arguments"))
                if kind == "custom_tool_call":
                    arguments = msgspec.json.encode(arguments_with(item.get("input"))).decode()
                name = function_name(item.get("name"), item.get("namespace"))
                call = {"name": name, "arguments": arguments}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                message = {"id": item.get("call_id"), "type": "function", "function": call}
                messages[-1].setdefault("tool_calls", []).append(message)
            case "function_call_output" | "custom_tool_call_output":
                output = item.get("output")
                text = output if isinstance(output, str) else _content(output)
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
            case "reasoning" | "item_reference":
                continue  # a model does not get the thoughts of its earlier answers; `resolved` puts items in place
            case other if _strange(item):
                continue
            case other:
                raise BadRequest(f"an item of the type {other!r} is not offered here", param="input")
    return messages


def _strange(item: dict[str, Any]) -> str:
    """Returns the type of an item that a tool of a service wrote, "" for any other item."""
    kind = item.get("type")
    if not isinstance(kind, str) or kind in _OURS or _OTHER_TOOLS.fullmatch(kind) is None:
        return ""
    return kind


def _content(content: Any) -> Any:
    """Returns the content of a message; a single text stays a text. Raises `BadRequest`."""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _TEXTS:
            text = part.get("text") or part.get("refusal") or ""
            if not isinstance(text, str):
                raise BadRequest(f"the text of content of the type {kind} is not a string", param="input")
            parts.append({"type": "text", "text": text})
        elif kind == "input_image" and isinstance(part.get("image_url"), str):
            parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        elif kind == "input_audio":
            parts.append({"type": "input_audio", "input_audio": part.get("input_audio")})
        else:
            raise BadRequest(f"content of the type {kind!r} is not offered here", param="input")
    return "".join(part["text"] for part in parts) if all("text" in part for part in parts) else parts
