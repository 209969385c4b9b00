"""Fills in a model's defaults where a request has no value, and limits the tokens of its answers. Both change the
engine's body, so all API families share them."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from modelrunner.defaults import ModelDefaults
from modelrunner.engineapi import ApiShape
from modelrunner.errors import BadRequest
from modelrunner.gateway.engine_request import EngineRequest

_SAMPLED = (ApiShape.CHAT, ApiShape.COMPLETION, ApiShape.MESSAGES)
_ANTHROPIC = (ApiShape.MESSAGES, ApiShape.MESSAGE_COUNT)
_CHATS = (ApiShape.CHAT, ApiShape.TEMPLATE, *_ANTHROPIC)
_ANTHROPIC_NAMES = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "stop": "stop_sequences"}
# llama.cpp's names (tools/server/README.md) and vLLM's; each engine knows some of them, and reads the last one.
_LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")
# The names of an option: a request with one of them has set the option.
_SAME = {
    "max_tokens": _LIMITS,
    "repeat_penalty": ("repeat_penalty", "repetition_penalty"),
    "repetition_penalty": ("repeat_penalty", "repetition_penalty"),
}
_ARGUMENTS = "chat_template_kwargs"
_COPIES = ("n", "n_cmpl", "best_of")


class _Role(msgspec.Struct):
    role: str = ""


def apply_defaults(
    request: EngineRequest, shape: ApiShape, defaults: ModelDefaults, reads: Collection[str] | None
) -> None:
    """Sets the defaults in a request for an endpoint of this shape, which reads these fields, None if they are unknown.
    A body that an engine would refuse is not changed."""
    added: dict[str, Any] = {}
    try:
        if shape in _CHATS:
            added |= _conversation(request, defaults, anthropic=shape in _ANTHROPIC)
            # As for a request's `thinking`: an engine that is not known to read it in Anthropic's API may refuse it.
            knows = shape not in _ANTHROPIC if reads is None else _ARGUMENTS in reads
            if defaults.template_arguments and knows:
                arguments = msgspec.convert(request.get(_ARGUMENTS) or {}, dict[str, Any])
                added[_ARGUMENTS] = {**defaults.template_arguments, **arguments}
    except msgspec.MsgspecError:
        return
    if shape in _SAMPLED:
        added |= _sampling(request, defaults, anthropic=shape in _ANTHROPIC)
    request.set(added)


def _conversation(request: EngineRequest, defaults: ModelDefaults, *, anthropic: bool) -> dict[str, Any]:
    """Returns the changed members: the model's system prompt comes first if the request has none, and the model's
    messages come before the request's."""
    messages = msgspec.json.decode(request.raw("messages") or b"[]", type=list[msgspec.Raw])
    roles = [msgspec.json.decode(message, type=_Role).role for message in messages]
    has_system = request.has("system") if anthropic else any(role in ("system", "developer") for role in roles)
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


def _sampling(request: EngineRequest, defaults: ModelDefaults, *, anthropic: bool) -> dict[str, Any]:
    options = defaults.sampling.mapped()
    if anthropic:
        options = {theirs: options[ours] for ours, theirs in _ANTHROPIC_NAMES.items() if ours in options}
        if isinstance(stop := options.get("stop_sequences"), str):
            options["stop_sequences"] = [stop]
    return {name: value for name, value in options.items() if not any(map(request.has, _SAME.get(name, (name,))))}


def limit_tokens(request: EngineRequest, shape: ApiShape, most: int) -> None:
    """Sets limits by which all the answers of a request together have at most `most` tokens, for an endpoint of this
    shape. Lower limits of the client stay. Raises `BadRequest` if it asks for more answers than tokens."""
    if shape not in _SAMPLED:
        return
    try:
        fields = {name: request.get(name) for name in (*_LIMITS, *_COPIES, "prompt")}
    except msgspec.MsgspecError:
        return  # the engine refuses it
    answers = _answers(fields)
    if answers > most:
        raise BadRequest(f"the request asks for {answers} answers, and may generate {most} tokens", param="n")
    each = most // answers
    wanted = {name: fields[name] for name in _LIMITS if fields[name] is not None}
    limits = {
        name: value if type(value) in (int, float) and 0 <= value <= each else each for name, value in wanted.items()
    }
    request.set({"max_tokens": min(limits.values(), default=each), **limits})


def _answers(fields: Mapping[str, Any]) -> int:
    prompt = fields["prompt"]
    prompts = len(prompt) if isinstance(prompt, list) and not all(map(_is_count, prompt)) else 1
    copies: list[Any] = [fields[name] for name in _COPIES if fields[name] is not None]
    if not all(map(_is_count, copies)):
        raise BadRequest("the number of answers is a whole number", param="n")
    return prompts * max([1, *map(int, copies)])


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
