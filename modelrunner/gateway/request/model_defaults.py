"""Fills in a model's defaults where a request has no value. It changes the engine's body, so all API families share
it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from modelrunner.defaults import ModelDefaults
from modelrunner.gateway.dialects.bodies import MEMBERS, with_members

_SAMPLED = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
_ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")
_CHATS = ("/v1/chat/completions", "/apply-template", *_ANTHROPIC)
_ANTHROPIC_NAMES = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "stop": "stop_sequences"}
# The names of an option: a request with one of them has set the option.
_SAME = {
    "max_tokens": ("max_tokens", "max_completion_tokens", "n_predict"),
    "repeat_penalty": ("repeat_penalty", "repetition_penalty"),
    "repetition_penalty": ("repeat_penalty", "repetition_penalty"),
}
_NULL = b"null"


class _Role(msgspec.Struct):
    role: str = ""


def filled(path: str, body: bytes, defaults: ModelDefaults) -> bytes:
    """Returns `body`, which is for the engine's endpoint `path`, with the defaults. A body that an engine would refuse
    is not changed."""
    try:
        members = MEMBERS.decode(body)
        given = {name for name, raw in members.items() if bytes(raw) != _NULL}
        added: dict[str, Any] = {}
        if path in _CHATS:
            added |= _conversation(members, given, defaults, anthropic=path in _ANTHROPIC)
        if path in _SAMPLED:
            added |= _sampling(given, defaults, anthropic=path in _ANTHROPIC)
    except msgspec.MsgspecError:
        return body
    return with_members(members, added) if added else body


def _conversation(
    members: Mapping[str, msgspec.Raw], given: set[str], defaults: ModelDefaults, *, anthropic: bool
) -> dict[str, Any]:
    """Returns the changed members: the model's system prompt comes first if the request has none, and the model's
    messages come before the request's."""
    messages = msgspec.json.decode(members.get("messages", b"[]"), type=list[msgspec.Raw])
    roles = [msgspec.json.decode(message, type=_Role).role for message in messages]
    has_system = "system" in given if anthropic else any(role in ("system", "developer") for role in roles)
    examples = [message for message in defaults.messages if not anthropic or message.role != "system"]
    system = defaults.system if defaults.system and not has_system else None
    if anthropic:
        start: list[Any] = []
    else:
        leading = next((n for n, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
        start = [{"role": "system", "content": system}] if system else []
        start, messages = [*start, *messages[:leading]], messages[leading:]
    added: dict[str, Any] = {"system": system} if anthropic and system else {}
    if examples or (system and not anthropic):
        added["messages"] = [*start, *examples, *messages]
    return added


def _sampling(given: set[str], defaults: ModelDefaults, *, anthropic: bool) -> dict[str, Any]:
    options = defaults.sampling.mapped()
    if anthropic:
        options = {theirs: options[ours] for ours, theirs in _ANTHROPIC_NAMES.items() if ours in options}
        if isinstance(stop := options.get("stop_sequences"), str):
            options["stop_sequences"] = [stop]
    return {name: value for name, value in options.items() if given.isdisjoint(_SAME.get(name, (name,)))}
