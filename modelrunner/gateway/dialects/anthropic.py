"""Anthropic's messages. They pass through to an engine that serves them, and are translated to chats for other engines.

Source of the shapes: https://docs.claude.com/en/api/errors and
https://docs.claude.com/en/docs/build-with-claude/streaming.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec

from modelrunner.engine.runner import Runner
from modelrunner.errors import BadRequest, ModelRunnerError
from modelrunner.gateway.calls import JSON, Call, Fields, Inference, Translation, decoded
from modelrunner.gateway.dialects import answershapes, requestshapes
from modelrunner.gateway.dialects.anthropic_answer import AnthropicAnswer, PassedMessage
from modelrunner.gateway.dialects.anthropic_request import MessageRequest, Thinking, has_other_content
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


_THINKS = {"enabled": True, "adaptive": True, "disabled": False}
_TEMPLATE = "chat_template_kwargs"


class _Tool(msgspec.Struct):
    type: str | None = None
    name: str = ""


class AnthropicFields(Fields, frozen=True, gc=False):
    """The fields whose type and range are checked here, so that a mistake is the same error with every engine."""

    max_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    thinking: Thinking | None = None


class Anthropic(JsonDialect):
    name: ClassVar[str] = "anthropic"
    decoder = msgspec.json.Decoder(AnthropicFields)
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

    def read(self, body: bytes) -> Fields:
        fields = super().read(body)
        if fields.tools:
            _check_tools(fields.tools)
        return fields

    def request(self, ask: Inference, runner: Runner) -> tuple[EngineRequest, Translation | None]:
        if has_other_content(ask.body) or _requires_call(ask, runner):
            return self.translated(ask, runner)
        request, translation = super().request(ask, runner)
        assert isinstance(ask.fields, AnthropicFields)
        thinking = ask.fields.thinking
        if thinking is not None and _TEMPLATE in (runner.api.reads(request.path) or ()) and not request.has(_TEMPLATE):
            request.set({_TEMPLATE: {"enable_thinking": _THINKS[thinking.type]}})  # engines do not switch it off
        if ask.fields.stream and request.path == _MESSAGES:
            translation = translation or PassedMessage()
        return request, translation

    def translated(self, ask: Inference, runner: Runner) -> tuple[EngineRequest, Translation]:
        """Counts tokens with an answer of one token, since every engine reports the tokens of its prompt."""
        request = MessageRequest.of(ask.body)
        chat, model, headers = request.chat(), ask.fields.model, own_headers("", request.ignored())
        make = MessageEvents if ask.fields.stream else WholeMessage
        if ask.head.route.path == _COUNT:
            chat["max_tokens"] = 1
            make = CountedTokens
        return engine_request(runner, _CHAT, model, chat), make(model, request.stop_sequences or [], headers)

    def error(self, error: ModelRunnerError, request_id: str) -> tuple[tuple[Header, ...], bytes]:
        return (JSON, *refusal_headers(error)), _encoded(error, request_id)

    def error_event(self, error: ModelRunnerError, request_id: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % _encoded(error, request_id)

    def waiting(self, progress: LoadProgress | None, waited: float) -> bytes:
        """Sends a ping, which clients ignore."""
        return b'event: ping\ndata: {"type":"ping"}\n\n'


def _requires_call(ask: Inference, runner: Runner) -> bool:
    """True for a message that requires a call of a tool, of an engine that has to be asked for one in a chat."""
    chat = runner.api.endpoints.get(_CHAT)
    if not ask.fields.tool_choice or ask.head.route.path != _MESSAGES or chat is None or not chat.prose_before_calls:
        return False
    choice = decoded(ask.fields.tool_choice, "tool_choice")
    return isinstance(choice, dict) and choice.get("type") in ("any", "tool")


def _check_tools(tools: msgspec.Raw) -> None:
    """Raises `BadRequest` for a tool that Anthropic's service runs or defines: engines would take it for a plain one
    that nobody runs."""
    try:
        for tool in msgspec.json.decode(tools, type=list[_Tool] | None) or ():
            if tool.type not in (None, "custom"):
                raise BadRequest(
                    f"the tool {tool.name[:60]} of the type {tool.type[:60]} is one of Anthropic's service, not here: "
                    "leave it out, or describe it as a tool of your own",
                    param="tools",
                )
    except msgspec.ValidationError as error:
        raise BadRequest(f"tools: {error}", param="tools") from None


def _encoded(error: ModelRunnerError, request_id: str) -> bytes:
    usual = "invalid_request_error" if error.status < 500 else "api_error"
    details = {"type": _TYPES.get(error.status, usual), "message": error.message}
    return msgspec.json.encode({"type": "error", "error": details, "request_id": request_id})
