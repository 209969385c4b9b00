"""Limits the tokens that an engine may generate for a request. It changes the engine's body, so all API families share
it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from modelrunner.errors import BadRequest
from modelrunner.gateway.dialects.bodies import MEMBERS, with_members

_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
# llama.cpp's names (tools/server/README.md) and vLLM's; each engine knows some of them, and reads the last one.
_LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")
_COPIES = ("n", "n_cmpl", "best_of")


def with_most_tokens(path: str, body: bytes, most: int) -> bytes:
    """Returns `body`, which is for the engine's endpoint `path`, with limits by which all its answers together have at
    most `most` tokens. Lower limits of the client stay. Raises `BadRequest` if it asks for more answers than tokens."""
    if path not in _GENERATING:
        return body
    try:
        members = MEMBERS.decode(body)
        given = {name: msgspec.json.decode(members[name]) for name in (*_LIMITS, *_COPIES, "prompt") if name in members}
    except msgspec.MsgspecError:
        return body  # the engine refuses it
    answers = _answers(given)
    if answers > most:
        raise BadRequest(f"the request asks for {answers} answers, and may generate {most} tokens", param="n")
    each = most // answers
    wanted = {name: given[name] for name in _LIMITS if given.get(name) is not None}
    limits = {
        name: value if type(value) in (int, float) and 0 <= value <= each else each for name, value in wanted.items()
    }
    return with_members(members, {"max_tokens": min(limits.values(), default=each), **limits})


def _answers(given: Mapping[str, Any]) -> int:
    prompt = given.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and not all(map(_is_count, prompt)) else 1
    copies: list[Any] = [given[name] for name in _COPIES if given.get(name) is not None]
    if not all(map(_is_count, copies)):
        raise BadRequest("the number of answers is a whole number", param="n")
    return prompts * max([1, *map(int, copies)])


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
