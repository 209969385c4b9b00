"""Asks a model that draws for a picture."""

import base64
import binascii
from pathlib import Path
from typing import Any

import click
import msgspec

from modelrunner.cli.client import HttpClient, decode, failure
from modelrunner.cli.files import check_folder, written
from modelrunner.cli.forms import form
from modelrunner.cli.progressdisplay import shared_displays
from modelrunner.errors import AnswerBroken
from modelrunner.wire import Progress

_FORMS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


class _Picture(msgspec.Struct):
    b64_json: str = ""


def check_picture(file: Path) -> None:
    """Raises `UsageError` for a file that is none of a picture, or has no folder."""
    if file.suffix.lower() not in _FORMS:
        raise click.UsageError(f"{file} has no ending of an image: end it in {', '.join(_FORMS)}")
    check_folder(file)


def draw(client: HttpClient, model: str, prompt: str, file: Path, seed: int | None, source: Path | None) -> None:
    """Writes the picture that the model draws, or makes of the picture `source`, and shows its steps. Raises
    `ModelRunnerError`."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "n": 1, "response_format": "b64_json", "stream": True}
    body |= {"output_format": _FORMS[file.suffix.lower()]} | ({"seed": seed} if seed is not None else {})
    try:
        if source is None:
            [picture] = _drawn(client, "generations", body)
        else:
            texts = {name: "true" if value is True else str(value) for name, value in body.items()}
            [picture] = _drawn(client, "edits", form("image", source, texts))
        if not (data := base64.b64decode(picture.b64_json, validate=True)):
            raise ValueError
    except (ValueError, binascii.Error):
        raise AnswerBroken(f"{model} answered without one image in base64: see `modelrunner logs {model}`") from None
    with written(file) as opened:
        opened.write(data)


def _drawn(client: HttpClient, call: str, body: Any) -> list[_Picture]:
    """Returns the pictures of an answer."""
    with client.open("POST", f"/v1/images/{call}", body) as response, shared_displays() as displays:
        display, pictures = displays("Drawing"), []
        for event in client.events(response):
            if event.data == "[DONE]":  # an engine of another maker
                break
            data = decode(event.data, dict[str, Any])
            if fault := data.get("error"):
                raise failure(fault)
            match data:
                case {
                    "type": "image_generation.progress" | "image_edit.progress",
                    "step": int(step),
                    "steps": int(steps),
                }:
                    display.show(Progress("progress", "Drawing", steps, step))
                case {"type": "image_generation.completed" | "image_edit.completed", "b64_json": str(text)}:
                    pictures.append(_Picture(text))
    return pictures
