"""The probabilities of a completion in OpenAI's form: four lists, where llama.cpp gives those of a chat.

Source of the form: https://platform.openai.com/docs/api-reference/completions/object
"""

from typing import Any, ClassVar

import msgspec

from modelrunner.errors import EngineProtocolError
from modelrunner.gateway.calls import EVENT_STREAM
from modelrunner.gateway.dialects.assembly import LIMIT
from modelrunner.gateway.request.tokens import Tokens
from modelrunner.http.answers import Header

_MARK = b'"content":['


def in_lists(found: Any, offset: int) -> tuple[Any, int]:
    """Returns the probabilities in lists, and the offset after their tokens; `offset` is that of the first token in the
    answer's text. Others than a chat's stay as they are."""
    content = found.get("content") if isinstance(found, dict) else None
    if not isinstance(content, list):
        return found, offset
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


class CompletionEvents:
    """A `Translation` of the stream of a completion."""

    headers: tuple[Header, ...] = EVENT_STREAM
    whole: ClassVar[bool] = False
    chunk_per_line: ClassVar[bool] = False
    counted: Tokens | None = None

    def __init__(self) -> None:
        self._rest = b""
        self._offsets: dict[Any, int] = {}  # of the next token of each choice

    def piece(self, data: bytes) -> bytes:
        *events, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > LIMIT:
            raise EngineProtocolError(f"the engine's stream has an event of more than {LIMIT >> 20} MiB")
        return b"".join([self._event(event) + b"\n\n" for event in events])

    def end(self) -> bytes:
        return self._rest

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(b"data:") or _MARK not in event:
            return event
        try:
            fields = msgspec.json.decode(event[5:])
            for choice in fields["choices"]:
                index = choice.get("index", 0)
                found = in_lists(choice.get("logprobs"), self._offsets.get(index, 0))
                choice["logprobs"], self._offsets[index] = found
        except (
            msgspec.MsgspecError,
            UnicodeDecodeError,
            RecursionError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:
            raise EngineProtocolError(f"the engine's stream cannot be read: {error}") from None
        return b"data: " + msgspec.json.encode(fields)
