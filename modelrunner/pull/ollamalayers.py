"""What a model of Ollama carries for requests, in layers of its own types
(https://github.com/ollama/ollama/blob/main/server/model.go). Its template is in Go's language, and left out: the one in
its weights takes its place."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from modelrunner.defaults import SamplingOptions

CARRIED = ("system", "params", "messages", "license")
"""The kinds of layers that are read."""
ODD = (ValueError, KeyError, TypeError, AttributeError, RuntimeError)
"""The errors of JSON of another shape."""


class OllamaDefaults(NamedTuple):
    """`parameters` are Ollama's options, without those of a machine (`num_gpu`); `messages` are role and content."""

    system: str | None
    parameters: dict[str, Any]
    messages: list[tuple[str, str]]
    licences: list[str]


def carried(texts: Mapping[str, Iterable[str]]) -> OllamaDefaults:
    """Reads the texts of a model's layers, by their kinds. Raises one of `ODD`."""
    parameters: dict[str, Any] = {}
    for text in texts.get("params", ()):
        parameters |= json.loads(text)
    known = (*SamplingOptions.__struct_fields__, "num_ctx")
    messages = [message for text in texts.get("messages", ()) for message in json.loads(text)]
    return OllamaDefaults(
        "\n".join(texts.get("system", ())) or None,
        {name: value for name, value in parameters.items() if name in known},
        [(str(message["role"]), str(message["content"])) for message in messages],
        [text for text in texts.get("license", ()) if text],
    )
