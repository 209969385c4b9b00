"""The HTTP interface of llama.cpp's servers: the fields that they read, and the form that they want a request in."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelrunner.sdk import MESSAGES_ENDPOINTS, OPENAI_ENDPOINTS, ApiShape, EndpointApi, EngineApi, RunSpec

# For a plain answer, llama.cpp's server checks whether the client is still there only after a second without a result
# for any client: beside a stream, never. In a stream it checks at every token and, if it reports the progress of the
# prompt, at every batch (`server_response_reader` in tools/server/server-queue.cpp).
_STREAM = {"stream": True, "stream_options": {"include_usage": True}, "return_progress": True}
_AS_STREAMS: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": _STREAM,
    "/v1/completions": _STREAM,
    "/v1/messages": {"stream": True},
}
# llama.cpp's server takes another type for "auto" in a chat, and in a message each name for "required" (tools/server:
# server-common.cpp, server-chat.cpp).
_BY_WORD = frozenset({"/v1/chat/completions", "/apply-template", "/v1/messages", "/v1/messages/count_tokens"})
_SHAPES = {
    **OPENAI_ENDPOINTS,
    **MESSAGES_ENDPOINTS,
    "/apply-template": EndpointApi(ApiShape.TEMPLATE),
    "/v1/audio/transcriptions": EndpointApi(ApiShape.TRANSCRIPTION, lacks_text=True),
}
_SAMPLING = frozenset(
    (
        *("verbose", "timings_per_token", "stream", "stream_options", "cache_prompt", "return_tokens"),
        *("return_progress", "sse_ping_interval", "n_predict", "max_completion_tokens", "max_tokens", "n_indent"),
        *("n_keep", "n_discard", "n_cmpl", "n", "n_cache_reuse", "t_max_predict_ms", "response_fields", "id_slot"),
        *("temperature", "top_k", "top_p", "min_p", "top_n_sigma", "typical_p", "dynatemp_range", "dynatemp_exponent"),
        *("xtc_probability", "xtc_threshold", "adaptive_target", "adaptive_decay", "min_keep", "samplers", "seed"),
        *("repeat_last_n", "repeat_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier", "dry_base"),
        *("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "mirostat", "mirostat_tau"),
        *("mirostat_eta", "logprobs", "n_probs", "post_sampling_probs", "backend_sampling", "logit_bias", "stop"),
        *("ignore_eos", "lora", "json_schema", "grammar", "grammar_type", "grammar_lazy", "grammar_triggers"),
        *("preserved_tokens", "reasoning_format", "reasoning_control", "reasoning_budget_tokens"),
        *("reasoning_budget_start_tag", "reasoning_budget_end_tag", "reasoning_budget_end_tags"),
        *("reasoning_budget_message", "chat_format", "chat_parser", "generation_prompt", "parse_tool_calls"),
        *("continue_final_message", "speculative.n_max", "speculative.n_min", "speculative.p_min"),
        *("speculative.type", "speculative.ngram_size_n", "speculative.ngram_size_m", "speculative.ngram_min_hits"),
    )
)
_CHAT = frozenset(
    (
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "top_logprobs"),
        *("add_generation_prompt", "chat_template_kwargs", "reasoning_effort", "thinking_budget_tokens"),
    )
)
_ANTHROPIC = frozenset(
    (
        *("messages", "system", "tools", "tool_choice", "stop_sequences", "max_tokens", "temperature", "top_p"),
        *("top_k", "stream", "chat_template_kwargs", "thinking", "metadata"),
    )
)
# The fields that llama.cpp's own server reads (tools/server: server-schema.cpp, server-common.cpp, server-chat.cpp,
# server-context.cpp).
_READ: Mapping[str, frozenset[str]] = {
    "/v1/chat/completions": _SAMPLING | _CHAT,
    "/apply-template": _SAMPLING | _CHAT,
    "/v1/completions": _SAMPLING | {"prompt"},
    "/v1/messages": _ANTHROPIC,
    "/v1/messages/count_tokens": _ANTHROPIC,
    "/v1/embeddings": frozenset({"input", "content", "encoding_format", "embd_normalize", "dimensions"}),
    "/v1/rerank": frozenset({"query", "documents", "texts", "return_text", "top_n"}),
    "/tokenize": frozenset({"content", "add_special", "parse_special", "with_pieces"}),
    "/detokenize": frozenset({"tokens"}),
}
# Keywords that common/json-schema-to-grammar.cpp does not read.
_UNHELD = frozenset(
    (
        *("multipleOf", "uniqueItems", "contains", "minContains", "maxContains", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "not", "if"),
        *("then", "else", "unevaluatedItems", "unevaluatedProperties", "contentEncoding", "contentMediaType"),
    )
)
_PYTHON = frozenset(
    (
        *("max_tokens", "temperature", "top_p", "min_p", "top_k", "stop", "stream", "stream_options", "logprobs"),
        *("presence_penalty", "frequency_penalty", "repeat_penalty", "logit_bias", "seed", "mirostat_mode"),
        *("mirostat_tau", "mirostat_eta", "grammar"),
    )
)
# The fields that llama-cpp-python's server reads (llama_cpp/server/types.py; `exclude` in app.py).
_READ_IN_PYTHON: Mapping[str, frozenset[str]] = {
    "/v1/chat/completions": _PYTHON
    | {"messages", "functions", "function_call", "tools", "tool_choice", "top_logprobs", "response_format"},
    "/v1/completions": _PYTHON | {"prompt", "suffix", "echo"},
    "/v1/embeddings": frozenset({"input", "dimensions"}),
}
# The counter of computed batches. The loop that computes them also answers this question, so a stuck engine is silent.
_WORK = ("llamacpp:n_decode_total",)
# When llama.cpp's server closes the connection of a request that was given up, the order to cancel it stands in its
# queue, which it reads after the batch under way. Questions wait in the same queue, except those about metrics and
# slots (`process_single_task` in tools/server/server-context.cpp).
_SETTLED = "/lora-adapters"
# llama-cpp-python's server lets this question wait for its lock on the model.
_SETTLED_IN_PYTHON = "/v1/models"


def api(spec: RunSpec, *, in_python: bool) -> EngineApi:
    """Returns the interface of llama.cpp's own server, or of llama-cpp-python's (`in_python`). That one reads fewer
    fields, takes no sound, gives no usage in a stream, and takes names as `tool_choice`."""
    base = EngineApi.openai(spec.mode, spec.bundle.name)
    if in_python:
        endpoints = {path: replace(_SHAPES[path], reads=reads) for path, reads in _READ_IN_PYTHON.items()}
        return _for_run(
            replace(base, endpoints=endpoints, settled=_SETTLED_IN_PYTHON, lacks=frozenset({"audio"})), spec
        )
    return _for_run(replace(base, endpoints=_ENDPOINTS, work=_WORK, settled=_SETTLED), spec)


def _of_llama_server(path: str, endpoint: EndpointApi) -> EndpointApi:
    as_stream = _AS_STREAMS.get(path, {})
    unheld = _UNHELD if path in ("/v1/chat/completions", "/v1/completions") else frozenset()
    return replace(
        endpoint,
        reads=_READ.get(path),
        as_stream=as_stream,
        chooses_by_word=path in _BY_WORD,
        prose_before_calls=endpoint.shape is ApiShape.CHAT,
        choices_by_sequence=True,  # server-context.cpp: "n_cmpl cannot be greater than the number of slots"
        unheld=unheld,
    )


_ENDPOINTS = {path: _of_llama_server(path, endpoint) for path, endpoint in _SHAPES.items()}


def _for_run(api: EngineApi, spec: RunSpec) -> EngineApi:
    """Returns the interface with what follows from the model: llama.cpp gives embeddings in their full length only, and
    calls tools only if the model's chat template has a place for them."""
    header, name = spec.bundle.header, spec.bundle.name
    length = header.metadata.get(f"{header.architecture}.embedding_length")
    no_tools = (
        f"the chat template of {name} knows no tools, so no call of one can be required: give it one that does with "
        f"`modelrunner configure {name} --chat-template FILE` (those that the runtime flag --chat-template names know "
        "none)"
    )
    return replace(
        api,
        no_tools="" if _knows_tools(spec) else no_tools,
        embedding_length=length if isinstance(length, int) else 0,
    )


def _knows_tools(spec: RunSpec) -> bool:
    """Returns True if the chat template has a place for tools. llama.cpp's built-in templates, which --chat-template
    names, have none."""
    named = any(flag.partition("=")[0] == "--chat-template" for flag in spec.flags)
    return not named and "tools" in spec.bundle.capabilities
