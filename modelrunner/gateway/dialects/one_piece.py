"""Answers of engines that make no streams, for clients that asked for one.

Source of the events: https://platform.openai.com/docs/api-reference/chat-streaming and .../images-streaming."""

from collections.abc import Iterator
from typing import Any

import msgspec

from modelrunner.errors import EngineProtocolError
from modelrunner.gateway.calls import EVENT_STREAM, Translation
from modelrunner.gateway.dialects.assembly import UNLIKE, WholeBody
from modelrunner.gateway.dialects.rewritten import RewrittenEvents

_STREAMS = (b"d", b"e", b"i", b"r", b":")
"""The first byte of a stream of events; no JSON begins so."""


def is_whole(content_type: bytes) -> bool:
    """True if an answer of this media type is no stream."""
    return content_type.partition(b";")[0].strip().lower() == b"application/json"


class OnePiece(WholeBody):
    """Writes the JSON of a whole answer as OpenAI's events: a chat as one chunk, each image as the event that completes
    it, and anything else as it is. A stream that the engine calls JSON passes as it comes. `then` translates the events
    for another family."""

    def __init__(self, then: Translation | None) -> None:
        super().__init__(())
        self.whole = False  # the head of the stream may be out
        self._then = then
        self._stream: Translation | None = None
        self.headers = EVENT_STREAM if then is None else then.headers
        self.chunk_per_line = then is not None and then.chunk_per_line

    def piece(self, data: bytes) -> bytes:
        if self._stream is None:
            super().piece(data)
            if bytes(self._body[:64].lstrip()[:1]) not in _STREAMS:
                return b""
            self._stream, data = self._then or _SameEvents(), bytes(self._body)
            self._body.clear()
        return self._stream.piece(data)

    def end(self) -> bytes:
        """Returns all events. Raises `EngineProtocolError` for an answer that cannot be read, and what `then` does."""
        if self._stream is not None:
            data = self._stream.end()
            self.counted = self._stream.counted
            return data
        answer = self.decoded(Any)
        try:
            written = [b"data: %b\n\n" % msgspec.json.encode(event) for event in _events(answer)]
        except UNLIKE as error:
            raise EngineProtocolError(f"the engine's answer cannot be read: {error}") from None
        if isinstance(answer, dict) and "choices" in answer:
            written.append(b"data: [DONE]\n\n")
        data = b"".join(written)
        if self._then is None:
            return data
        data = self._then.piece(data) + self._then.end()
        self.counted = self._then.counted
        return data


class _SameEvents(RewrittenEvents):
    """Whole events only, so that one of our own can follow."""

    def event(self, event: bytes) -> bytes:
        return event


def _events(answer: Any) -> Iterator[Any]:
    match answer:
        case {"choices": [{"message": dict()}, *_] as choices}:
            yield {**answer, "object": "chat.completion.chunk", "choices": [_delta(choice) for choice in choices]}
        case {"data": [{"b64_json": _} | {"url": _}, *_] as images, **rest}:
            if "created" in rest:
                rest["created_at"] = rest.pop("created")
            for image in images:
                yield {"type": "image_generation.completed", **rest, **image}
        case _:
            yield answer


def _delta(choice: dict[str, Any]) -> dict[str, Any]:
    """Returns the choice of a whole chat as that of a chunk."""
    message = dict(choice["message"])
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    return {**{name: value for name, value in choice.items() if name != "message"}, "delta": message}
