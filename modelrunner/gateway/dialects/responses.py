"""OpenAI's Responses API, translated to chat completions. The routes that read stored responses are in
api/response_routes.py."""

import time
from collections.abc import AsyncGenerator, Collection, Mapping
from typing import Any, ClassVar

import msgspec

from modelrunner.engine.runner import Runner
from modelrunner.errors import ModelRunnerError, NotFound
from modelrunner.gateway.calls import Call, Fields, Inference, Preparing, Translation
from modelrunner.gateway.dialects.answershapes import ResponseAnswer
from modelrunner.gateway.dialects.chunks import engine_request
from modelrunner.gateway.dialects.dialect import streamed
from modelrunner.gateway.dialects.openai import OpenAI
from modelrunner.gateway.dialects.responses_answer import ResponseEvents, WholeResponse
from modelrunner.gateway.dialects.responses_background import BackgroundResponse
from modelrunner.gateway.dialects.responses_request import PreparedFields, ResponseFields, new_id, resolved
from modelrunner.gateway.engine_request import EngineRequest
from modelrunner.gateway.headers import own_headers
from modelrunner.types import Mode

_CHAT = "/v1/chat/completions"


class Responses(OpenAI):
    calls: ClassVar[Mapping[str, Call]] = {
        "/v1/responses": Call(
            Mode.COMPLETION,
            _CHAT,
            text="Makes a response. It is stored unless `store` is false.",
            body=ResponseFields,
            answer=streamed(ResponseAnswer),
        )
    }
    decoder = msgspec.json.Decoder(ResponseFields)
    refuses_unread = False

    def read(self, body: bytes) -> Fields:
        fields = super().read(body)
        assert isinstance(fields, ResponseFields)
        fields.check()
        return fields

    def reads(self, ask: Inference, path: str, runner: Runner) -> Collection[str] | None:
        return ResponseFields.__struct_fields__

    async def prepare(self, preparing: Preparing, ask: Inference) -> Inference | bytes | AsyncGenerator[bytes, None]:
        """Returns the request with its conversation. A response in the background goes on alone, and the client gets
        its ID or follows its events. Raises `NotFound`, `Conflict`, `PayloadTooLarge`."""
        fields = ask.fields
        assert isinstance(fields, ResponseFields)
        history: list[dict[str, Any]] = []
        size = 0
        if fields.previous_response_id:
            if preparing.responses is None:
                raise NotFound("no response is stored here", param="previous_response_id")
            history, size = await preparing.responses.before(
                fields.previous_response_id, ask.head.owner, preparing.limits.body
            )
        items, more = await resolved(fields.items(), preparing.responses, ask.head.owner, preparing.limits.body)
        prepared = PreparedFields(
            **(msgspec.structs.asdict(fields) | {"input": items}),
            id=new_id("resp"),
            created=time.time(),
            history=history,
            kept=preparing.responses if fields.store is not False else None,
            owner=ask.head.owner,
            size=len(ask.body),
        )
        continued = msgspec.structs.replace(ask, fields=prepared, held=size + more)
        if not fields.background:
            return continued
        return _in_background(preparing, continued, prepared)

    def request(self, ask: Inference, runner: Runner) -> tuple[EngineRequest, Translation | None]:
        fields = ask.fields
        assert isinstance(fields, PreparedFields)
        headers = own_headers("", tuple(fields.ignored()))
        make = ResponseEvents if fields.stream else WholeResponse
        return engine_request(runner, _CHAT, fields.model, fields.chat(fields.history)), make(fields, headers)

    def error_event(self, error: ModelRunnerError, request_id: str) -> bytes:
        event = {"type": "error", "sequence_number": 0, "code": error.code, "message": error.message}
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(
            event | {"param": error.param} | error.as_dict(request_id)
        )


def _in_background(preparing: Preparing, ask: Inference, fields: PreparedFields) -> bytes | AsyncGenerator[bytes, None]:
    """Begins the work on a response, and returns its first state, or its events. Raises `NotFound`."""
    store = fields.responses
    if store is None:
        raise NotFound("no response is stored here, so none can be made in the background", param="background")
    background = BackgroundResponse(fields)
    background.work = preparing.go_on(ask, background)
    background.begin(store)
    return background.follow(-1) if background.streams else msgspec.json.encode(background.queued)
