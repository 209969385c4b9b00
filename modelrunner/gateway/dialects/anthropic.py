"""Anthropic's messages. They pass through to an engine that serves them, and are translated to chats for other engines.

Source of the shapes: https://docs.claude.com/en/api/errors and
https://docs.claude.com/en/docs/build-with-claude/streaming.
"""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from modelrunner.engine.runner import Runner
from modelrunner.errors import ModelRunnerError
from modelrunner.gateway.calls import JSON, Call, Inference, Translation
from modelrunner.gateway.dialects import answershapes, requestshapes
from modelrunner.gateway.dialects.anthropic_answer import AnthropicAnswer
from modelrunner.gateway.dialects.anthropic_request import MessageRequest, has_other_content
from modelrunner.gateway.dialects.anthropic_translation import CountedTokens, MessageEvents, WholeMessage
from modelrunner.gateway.dialects.bodies import JsonDialect
from modelrunner.gateway.dialects.chunks import engine_request
from modelrunner.gateway.dialects.dialect import WITH_ENGINE, refusal_headers, streamed
from modelrunner.gateway.engine_request import EngineRequest
from modelrunner.gateway.headers import own_headers
from modelrunner.http.answers import Header
from modelrunner.progress import LoadProgress
from modelrunner.types import Mode

_MESSAGES = "/v1/messages"
_COUNT = "/v1/messages/count_tokens"
_CHAT = "/v1/chat/completions"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Anthropic(JsonDialect):
    name: ClassVar[str] = "anthropic"
    calls: ClassVar[Mapping[str, Call]] = {
        _MESSAGES: Call(
            Mode.COMPLETION,
            _MESSAGES,
            _CHAT,
            text="Answers messages, as Anthropic's API does.",
            body=requestshapes.MessagesRequest,
            answer=streamed(answershapes.AnthropicMessage),
        ),
        _COUNT: Call(
            Mode.COMPLETION,
            _COUNT,
            _CHAT,
            text="Counts the tokens of messages.",
            body=requestshapes.TokenCountRequest,
            answer=answershapes.TokenCount,
        ),
    }
    prefixes: ClassVar[tuple[str, ...]] = (*WITH_ENGINE, "/anthropic")
    assembly = AnthropicAnswer
    error_shape = answershapes.AnthropicError
    translates = MessageRequest.__struct_fields__
    counts_at_start = True
    translates_for = "output_config"  # llama.cpp reads schemas in chats, but not in messages

    def owns(self, path: str) -> bool:
        return path.startswith("/anthropic/") or f"{_MESSAGES}/" in f"{path}/"

    def request(self, ask: Inference, runner: Runner) -> tuple[EngineRequest, Translation | None]:
        return self.translated(ask, runner) if has_other_content(ask.body) else super().request(ask, runner)

    def translated(self, ask: Inference, runner: Runner) -> tuple[EngineRequest, Translation]:
        """Counts tokens with an answer of one token, since every engine reports the tokens of its prompt."""
        asked = MessageRequest.of(ask.body)
        chat, model, headers = asked.chat(), ask.fields.model, own_headers("", asked.ignored())
        make = MessageEvents if ask.fields.stream else WholeMessage
        if ask.head.route.path == _COUNT:
            chat["max_tokens"] = 1
            make = CountedTokens
        return engine_request(runner, _CHAT, model, chat), make(model, asked.stop_sequences or [], headers)

    def error(self, error: ModelRunnerError, request_id: str) -> tuple[tuple[Header, ...], bytes]:
        return (JSON, *refusal_headers(error)), _encoded(error, request_id)

    def error_event(self, error: ModelRunnerError, request_id: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % _encoded(error, request_id)

    def waiting(self, progress: LoadProgress | None, waited: float) -> bytes:
        """Sends a ping, which clients ignore."""
        return b'event: ping\ndata: {"type":"ping"}\n\n'


def _encoded(error: ModelRunnerError, request_id: str) -> bytes:
    usual = "invalid_request_error" if error.status < 500 else "api_error"
    told = {"type": _TYPES.get(error.status, usual), "message": error.message}
    return msgspec.json.encode({"type": "error", "error": told, "request_id": request_id})
