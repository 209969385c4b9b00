"""Forms of JSON that the services of the families take and engines do not, in the one form that engines take: null for
an absent field, 40.0 for 40, a tool call whose arguments are no JSON."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from modelrunner.gateway.dialects.chunks import arguments_of
from modelrunner.gateway.dialects.nesting import decode_with_room
from modelrunner.gateway.engine_request import EngineRequest
from modelrunner.schema import whole_number

# A text may match, too: then a member is decoded for nothing.
_NULL = re.compile(rb"[:\[,]\s*+null\b")
# What these hold is the client's: null is a value there. A null in a message's `content` is one, too.
_OPAQUE = frozenset(
    (
        *("arguments", "chat_template_kwargs", "content", "default", "enum", "guided_json", "input", "input_schema"),
        *("json_schema", "logit_bias", "metadata", "parameters", "schema", "structured_outputs", "value"),
    )
)
LEAST_LOGPROBS = 1
"""The `top_logprobs` of a request for the probabilities of the answer's own tokens alone: llama.cpp takes 0 for no
probabilities at all."""


def normalized(path: str, body: bytes) -> EngineRequest:
    """Returns a request for the engine's endpoint `path` with the JSON object `body`: the same bytes unless something
    in it needs another form."""
    request = EngineRequest(path, body)
    # (`rfind` takes half the time of `in`.)
    has_null = body.rfind(b"null") >= 0 and _NULL.search(body) is not None
    has_calls = body.rfind(b'"tool_calls"') >= 0
    if has_null or has_calls:
        request.set(dict(_changes(request, has_null=has_null, has_calls=has_calls)))
    return request


def _changes(request: EngineRequest, *, has_null: bool, has_calls: bool) -> Iterator[tuple[str, Any]]:
    """Yields the members that need another form, None for one that is to go."""
    for name, raw in request.members.items():
        calls = has_calls and name == "messages"
        if has_null and not request.has(name):
            if name != "content":
                yield name, None
        elif calls or (has_null and _NULL.search(raw)):
            try:
                value = request.get(name)
            except msgspec.MsgspecError:
                continue  # the engine refuses it
            changed = has_null and _is_ours(name, value) and _without_nulls(value)
            if (calls and _with_readable_arguments(value)) or changed:
                yield name, value


def lenient(body: bytes) -> bytes:
    """Returns the JSON `body` without its nulls, and with whole numbers that are written as 40.0 or 4e1 as 40."""
    value = decode_with_room(msgspec.json.decode, body)
    _without_nulls(value)
    return msgspec.json.encode(with_whole_numbers(value))


def with_whole_numbers(value: Any) -> Any:
    """Returns decoded JSON with whole numbers as `int`. JSON has one kind of number, so 40.0 is 40."""
    top = [value]
    open_values: list[Any] = [top]
    while open_values:
        one = open_values.pop()
        for key, inner in _items(one):
            if isinstance(inner, float):
                one[key] = whole_number(inner)
            elif isinstance(inner, (dict, list)):
                open_values.append(inner)
    return top[0]


def readable_arguments(text: object) -> str:
    """Returns the arguments of a call, which a model wrote: JSON of an object, with what is none as its only text.
    Engines refuse a conversation with anything else, such as a call that the limit of tokens cut."""
    if not isinstance(text, str) or not text.strip():
        return "{}"
    return text if arguments_of(text) is not None else msgspec.json.encode({"unfinished": text}).decode()


def _with_readable_arguments(messages: Any) -> bool:
    changed = False
    for message in messages if isinstance(messages, list) else ():
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(arguments := function.get("arguments", ""), str):
                function["arguments"] = readable_arguments(arguments)
                changed |= function["arguments"] != arguments
    return changed


def _without_nulls(value: Any) -> bool:
    """Removes each member that is null; returns whether there was one."""
    changed = False
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, dict):
            for name in [name for name, inner in one.items() if inner is None and name != "content"]:
                del one[name]
                changed = True
        open_values += [inner for key, inner in _items(one) if isinstance(inner, (dict, list)) and _is_ours(key, inner)]
    return changed


def _is_ours(key: object, inner: Any) -> bool:
    """True for a value that may be searched. The parts of a message's content are the API's, a text's content is
    not."""
    return key not in _OPAQUE or (key == "content" and isinstance(inner, list))


def _items(value: Any) -> list[tuple[Any, Any]]:
    find: Callable[[], Any] = value.items if isinstance(value, dict) else lambda: enumerate(value)
    return list(find()) if isinstance(value, (dict, list)) else []
