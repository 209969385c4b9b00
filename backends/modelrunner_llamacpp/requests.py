"""How requests are put to llama.cpp's server, when it is done with one, and which of their fields it ignores."""

from collections.abc import Mapping, Sequence
from typing import Any

from modelrunner.sdk import BadRequest, Endpoint, RunSpec, calls

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
_BATCH_LIMIT = 50.0  # seconds: a batch of a long prompt on a slow processor


async def settled(endpoint: Endpoint) -> None:
    """As `Backend.settled`. When llama.cpp's server closes the connection of a request that was given up, the order to
    cancel it stands in its queue, which it reads after the batch under way. Questions wait in the same queue, but for
    those about metrics and slots (`process_single_task` in tools/server/server-context.cpp). llama-cpp-python's server
    lets the question wait for its lock on the model."""
    status, _ = await calls.fetch(endpoint, "GET", "/lora-adapters", timeout=_BATCH_LIMIT)
    if status == 404:
        await calls.fetch(endpoint, "GET", "/v1/models", timeout=_BATCH_LIMIT)


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
