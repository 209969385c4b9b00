"""Limits the tokens that an engine may generate for a request. It changes the engine's body, so all API families share
it."""

from collections.abc import Mapping
from typing import Any

import msgspec

from modelrunner.engineapi import ApiShape
from modelrunner.errors import BadRequest
from modelrunner.gateway.engine_request import EngineRequest

_GENERATING = (ApiShape.CHAT, ApiShape.COMPLETION, ApiShape.MESSAGES)
# llama.cpp's names (tools/server/README.md) and vLLM's; each engine knows some of them, and reads the last one.
_LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")
_COPIES = ("n", "n_cmpl", "best_of")


def limit_tokens(request: EngineRequest, shape: ApiShape, most: int) -> None:
    """Sets limits by which all the answers of a request together have at most `most` tokens, for an endpoint of this
    shape. Lower limits of the client stay. Raises `BadRequest` if it asks for more answers than tokens."""
    if shape not in _GENERATING:
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
