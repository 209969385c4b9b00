"""Recorded requests: shows one, and sends one again."""

import difflib
from collections.abc import Iterator
from typing import Any

import msgspec

from modelrunner import wire
from modelrunner.cli.client import HttpClient
from modelrunner.errors import BadRequest

# The paths to the text of an answer in each API family, or to a piece of it in a stream.
_PLACES: tuple[tuple[str | int, ...], ...] = (
    ("choices", 0, "delta", "content"),
    ("choices", 0, "message", "content"),
    ("choices", 0, "text"),
    ("message", "content"),  # Ollama
    ("response",),
)
_SEVERAL = (("content", "text"), ("output", "content", "text"))  # paths of Anthropic and of the Responses API
_DELTAS = {"content_block_delta": ("delta", "text"), "response.output_text.delta": ("delta",)}


def again(client: HttpClient, recorded: wire.RecordedRequest, model: str | None) -> bytes:
    """Sends a recorded request once more, to `model` if it is given; returns the answer's body. Raises `BadRequest` for
    a request that was not kept whole."""
    if not recorded.body.whole or recorded.body.redacted:
        why = (
            "was too large for recording_limit" if not recorded.body.whole else "had a key or a file, which is not kept"
        )
        raise BadRequest(f"this request cannot be sent again: its body {why}")
    body: Any = msgspec.Raw(recorded.body.text.encode())
    if model is not None:
        body = {**msgspec.json.decode(recorded.body.text), "model": model}
    return client.fetch("POST", recorded.path, body, timeout=None)


def answer_text(body: str) -> str:
    """Returns the text in an answer of any family, streamed or not; the body itself if it has none."""
    pieces = [piece for part in _parts(body) for piece in _texts(part)]
    return "".join(pieces) or body


def difference(before: str, after: str) -> str:
    """Returns the difference between two texts as a unified diff; "" for equal ones."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "now", lineterm="")
    return "\n".join(lines)


def _parts(body: str) -> Iterator[dict[str, Any]]:
    """Yields the objects of a body: one, those of its lines, or those of its events."""
    for text in (body,), [line.removeprefix("data:").strip() for line in body.splitlines()]:
        parts = [value for one in text if isinstance(value := _decoded(one), dict)]
        if parts:
            yield from parts
            return


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None


def _texts(part: dict[str, Any]) -> Iterator[str]:
    kind = part.get("type")
    if (isinstance(kind, str) and "." in kind) or kind in _DELTAS or "delta" in part:  # an event of a stream
        text = _at(part, _DELTAS.get(str(kind), ()))
        yield from [text] if isinstance(text, str) else []
        return
    for place in _PLACES:
        if isinstance(text := _at(part, place), str):
            yield text
            return
    for names in _SEVERAL:
        yield from _inner(part, names)


def _at(value: Any, place: tuple[str | int, ...]) -> Any:
    for step in place:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value if place else None


def _inner(value: Any, names: tuple[str, ...]) -> Iterator[str]:
    """Yields the texts at the end of a path whose every step but the last leads to a list."""
    inner = value.get(names[0]) if isinstance(value, dict) else None
    if len(names) == 1:
        yield from [inner] if isinstance(inner, str) else []
    elif isinstance(inner, list):
        for one in inner:
            yield from _inner(one, names[1:])
