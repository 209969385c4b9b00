"""Fields of a request that its engine does not read, or not in this run: the answer names them in
`X-Modelrunner-Ignored`, or the request is refused if the answer would mean something else without them. The rules are
the same for every engine and family.

Source of the fields and their defaults: https://platform.openai.com/docs/api-reference, and the sampling parameters of
vLLM and llama.cpp, which clients send to each other's servers."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from modelrunner.engineapi import ApiShape, EngineApi
from modelrunner.errors import BadRequest
from modelrunner.gateway.calls import decoded
from modelrunner.gateway.request.tool_choice import word_of

_OURS = frozenset({"model", "stream", "keep_alive", "cache_control"})  # engines cache prompts without the last
_NOTHING: tuple[Any, ...] = (None, "", [], {})
_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("n", "best_of"), (1,)),
    **dict.fromkeys(("echo", "logprobs", "return_documents", "store", "use_beam_search"), (False,)),
    "encoding_format": ("float",),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default", "standard_only"),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
}
"""Values that ask for nothing: an answer without the field is the same."""
_OF_TEXT = frozenset(
    (
        *("n", "best_of", "echo", "suffix", "logprobs", "top_logprobs", "modalities", "audio", "documents"),
        *("response_format", "grammar", "json_schema", "structured_outputs", "output_format"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("stop", "stop_sequences", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias"),
        *("max_tokens", "max_completion_tokens", "min_tokens", "use_beam_search"),
        *("tool_choice", "function_call", "web_search_options", "mcp_servers", "prompt_embeds"),
    )
)
_OF_VECTORS = frozenset({"dimensions", "encoding_format"})
_OF_ALL = frozenset({"adapter", "lora"})
_MEANT: Mapping[ApiShape | None, frozenset[str]] = {
    **dict.fromkeys((ApiShape.CHAT, ApiShape.COMPLETION, ApiShape.MESSAGES), _OF_TEXT | _OF_ALL),
    ApiShape.EMBEDDINGS: _OF_VECTORS | _OF_ALL,
    **dict.fromkeys((ApiShape.RERANK, ApiShape.SCORE), _OF_ALL | {"top_n"}),
    None: frozenset(),
}
"""The fields of each shape without which the answer would mean something else: it has another form or length, breaks a
rule, or lacks a part of the question."""


def unread(members: Mapping[str, Any], shape: ApiShape | None, read: Collection[str]) -> tuple[str, ...]:
    """Returns the names of the client's `members` that are not in `read` and not at a default. `shape` is that of the
    endpoint, None for a family with names of its own. Raises `BadRequest` for a field that must not be ignored."""
    names, meant = [], _MEANT.get(shape, _OF_ALL)
    for name, raw in members.items():
        if name in read or name in _OURS:
            continue
        if isinstance(raw, msgspec.Raw) and _asks(name, decoded(raw, name)):
            if name in meant:
                raise BadRequest(
                    f"the engine of this model does not know `{name}`, and the answer would mean something else "
                    "without it: leave it out, or ask a model that another backend runs",
                    param=name,
                )
            names.append(name)
    return tuple(names)


def unread_in_run(api: EngineApi, watched: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the `watched` fields (`Fields.watched`) that the engine does not read in this run. Raises
    `BadRequest` where the answer would mean something else."""
    length = api.embedding_length
    if length is not None and watched.get("dimensions") not in (None, length):
        all_of_it = f" and take all {length}" if length else ""
        raise BadRequest(
            f"the engine of this model cannot shorten embeddings: leave `dimensions` out{all_of_it}", param="dimensions"
        )
    choice = word_of(watched.get("tool_choice", "auto"))
    if not api.no_tools or not watched.get("tools") or choice == "none":
        return ()
    if choice != "auto":
        raise BadRequest(f"{api.no_tools}, or leave `tool_choice` out", param="tool_choice")
    return ("tools",)


def _asks(name: str, value: Any) -> bool:
    """Returns whether the value differs from the defaults. `0 == False` in Python, so types are compared too."""
    known = (*_NOTHING, *_DEFAULTS.get(name, ()))
    return not any(value == one and type(value) is type(one) for one in known)
