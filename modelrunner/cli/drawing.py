"""Asks a model that draws for a picture."""

import base64
import binascii
from pathlib import Path
from typing import Any

import click
import msgspec

from modelrunner.cli.client import HttpClient
from modelrunner.cli.files import check_folder, written
from modelrunner.errors import AnswerBroken

_FORMS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp"}


class _Picture(msgspec.Struct):
    b64_json: str = ""


class _Pictures(msgspec.Struct):
    data: list[_Picture]


def check_picture(file: Path) -> None:
    """Raises `UsageError` for a file that is none of a picture, or has no folder."""
    if file.suffix.lower() not in _FORMS:
        raise click.UsageError(f"{file} has no ending of a picture: end it in {', '.join(_FORMS)}")
    check_folder(file)


def draw(client: HttpClient, model: str, prompt: str, file: Path, seed: int | None) -> None:
    """Writes the picture that the model draws. Raises `ModelRunnerError`."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "n": 1, "response_format": "b64_json"}
    body |= {"output_format": _FORMS[file.suffix.lower()]} | ({"seed": seed} if seed is not None else {})
    try:
        [picture] = client.call("POST", "/v1/images/generations", _Pictures, body, timeout=None).data
        if not (data := base64.b64decode(picture.b64_json, validate=True)):
            raise ValueError
    except (ValueError, binascii.Error):
        raise AnswerBroken(f"{model} answered without one picture in base64: see `modelrunner logs {model}`") from None
    with written(file) as opened:
        opened.write(data)
