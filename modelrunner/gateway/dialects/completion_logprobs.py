"""The probabilities of a completion in OpenAI's form: four lists, where llama.cpp gives those of a chat.

Source of the form: https://platform.openai.com/docs/api-reference/completions/object
"""

from typing import Any

import msgspec

from modelrunner.gateway.dialects.rewritten import RewrittenEvents

_MARK = b'"content":['


def in_lists(logprobs: Any, offset: int) -> tuple[Any, int]:
    """Returns the probabilities in lists, and the offset after their tokens; `offset` is that of the first token in the
    answer's text. Others than a chat's stay as they are."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list):
        return logprobs, offset
    lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for one in content:
        token = one.get("token", "")
        lists["tokens"].append(token)
        lists["token_logprobs"].append(one.get("logprob"))
        lists["top_logprobs"].append(
            {top.get("token", ""): top.get("logprob") for top in one.get("top_logprobs") or ()}
        )
        lists["text_offset"].append(offset)
        offset += len(token)
    return lists, offset


class CompletionEvents(RewrittenEvents):
    """The stream of a completion."""

    def __init__(self) -> None:
        super().__init__()
        self._offsets: dict[Any, int] = {}  # of the next token of each choice

    def event(self, event: bytes) -> bytes:
        if not event.startswith(b"data:") or _MARK not in event:
            return event
        fields = msgspec.json.decode(event[5:])
        for choice in fields["choices"]:
            index = choice.get("index", 0)
            logprobs = in_lists(choice.get("logprobs"), self._offsets.get(index, 0))
            choice["logprobs"], self._offsets[index] = logprobs
        return b"data: " + msgspec.json.encode(fields)
