"""Requests whose fields llama.cpp's server ignores."""

from collections.abc import Mapping, Sequence
from typing import Any

from modelrunner import BadRequest, RunSpec


def ignored(spec: RunSpec, fields: Mapping[str, Any]) -> Sequence[str]:
    """As `Backend.check_request`: llama.cpp gives embeddings in their full length only, and calls tools only where the
    model's chat template has a place for them."""
    found = [name for name in ("return_documents",) if fields.get(name)]
    _check_dimensions(spec, fields.get("dimensions"))
    choice = fields.get("tool_choice", "auto")
    choice = choice.get("type") if isinstance(choice, dict) else choice  # Anthropic's is an object
    if fields.get("tools") and choice != "none" and not _knows_tools(spec):
        if choice != "auto":
            raise BadRequest(
                f"the chat template of {spec.bundle.name} knows no tools, so no call of one can be required: give it "
                f"one that does with `modelrunner configure {spec.bundle.name} --chat-template FILE` (those that the "
                "runtime flag --chat-template names know none), or leave `tool_choice` out",
                param="tool_choice",
            )
        found.append("tools")
    return found


def _check_dimensions(spec: RunSpec, wanted: object) -> None:
    header = spec.bundle.header
    length = header.metadata.get(f"{header.architecture}.embedding_length")
    if wanted is not None and wanted != length:
        raise BadRequest(
            f"llama.cpp cannot shorten embeddings: leave `dimensions` out and take all {length or ''}".rstrip(),
            param="dimensions",
        )


def _knows_tools(spec: RunSpec) -> bool:
    """llama.cpp's built-in templates, which --chat-template names, know no tools."""
    named = any(flag.partition("=")[0] == "--chat-template" for flag in spec.flags)
    return not named and "tools" in spec.bundle.capabilities
