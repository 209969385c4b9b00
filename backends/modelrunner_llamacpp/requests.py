"""Requests whose fields llama.cpp's server ignores. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from modelrunner import BadRequest, RunSpec


def ignored(spec: RunSpec, fields: Mapping[str, Any]) -> Sequence[str]:
    """As `Backend.check_request`: llama.cpp gives embeddings in their full length only, and calls tools only where the
    model's chat template has a place for them."""
    found = [name for name in ("return_documents",) if fields.get(name)]
    _check_dimensions(spec, fields.get("dimensions"))
    if fields.get("tools") and fields.get("tool_choice") != "none" and not _knows_tools(spec):
        if fields.get("tool_choice", "auto") != "auto":
            raise BadRequest(
                f"the chat template of {spec.bundle.name} knows no tools, so no call of one can be required: give the "
                "model a template that does (the runtime flag --chat-template), or leave `tool_choice` out",
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
    template = spec.bundle.header.metadata.get("tokenizer.chat_template")
    return isinstance(template, str) and "tool" in template and not _has_own_template(spec)


def _has_own_template(spec: RunSpec) -> bool:
    """llama.cpp's built-in templates, which a flag names, know no tools."""
    return any(flag.partition("=")[0] == "--chat-template" for flag in spec.flags)
