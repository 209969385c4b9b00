"""Changes to requests for llama.cpp's server, and the fields that it ignores."""

from collections.abc import Mapping, Sequence
from typing import Any

from modelrunner.sdk import BadRequest, RunSpec

# For a plain answer, llama.cpp's server checks whether the client is still there only after a second without a result
# for any client: beside a stream, never. In a stream it checks at every token and, if it reports the progress of the
# prompt, at every batch (`server_response_reader` in tools/server/server-queue.cpp).
_STREAM = {"stream": True, "stream_options": {"include_usage": True}, "return_progress": True}
AS_STREAMS: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": _STREAM,
    "/v1/completions": _STREAM,
    "/v1/messages": {"stream": True},
}
"""As `Backend.asked_as_streams`."""


def ignored(spec: RunSpec, fields: Mapping[str, Any]) -> Sequence[str]:
    """`Backend.check_request` for llama.cpp: it gives embeddings in their full length only, and calls tools only if the
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
    """llama.cpp's built-in templates, which --chat-template names, have no tools."""
    named = any(flag.partition("=")[0] == "--chat-template" for flag in spec.flags)
    return not named and "tools" in spec.bundle.capabilities
