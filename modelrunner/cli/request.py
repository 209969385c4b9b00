"""The parts of a chat request: the parameters that a user can set, and messages with images."""

from base64 import b64encode
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

Message = dict[str, Any]
SYSTEM = "You are a helpful assistant."
"""The default system prompt. Small models answer worse with their template's own prompt, or with none."""

_IMAGE_TYPES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}


@dataclass(frozen=True, slots=True)
class Parameters:
    """None leaves a parameter to the model's configuration and the engine."""

    model: str
    system: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    keep_alive: str | None = None
    format: str | None = None

    def request(self, messages: list[Message], *, stream: bool) -> dict[str, Any]:
        """Returns the body of POST /v1/chat/completions (https://platform.openai.com/docs/api-reference/chat/create,
        with our `keep_alive`)."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        system, form = given.pop("system", None), given.pop("format", None)
        body = given | {"messages": [{"role": "system", "content": system}, *messages] if system else messages}
        if form == "json":
            body["response_format"] = {"type": "json_object"}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


def user_message(text: str, images: tuple[Path, ...] = ()) -> Message:
    """Returns a question with its images as `data:` URLs. Raises `click.UsageError` for a file that is no image."""
    if not images:
        return {"role": "user", "content": text}
    pictures = [{"type": "image_url", "image_url": {"url": _data_url(image)}} for image in images]
    return {"role": "user", "content": [{"type": "text", "text": text}, *pictures]}


def _data_url(image: Path) -> str:
    content = image.read_bytes()
    for start, kind in _IMAGE_TYPES.items():
        if content.startswith(start):
            return f"data:{kind};base64,{b64encode(content).decode()}"
    raise click.UsageError(f"{image} is no PNG, JPEG, GIF or WebP picture")
