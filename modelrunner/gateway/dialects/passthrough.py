"""Calls of engines whose bodies the gateway does not read: forms with a file, and whatever else an engine takes. Only
the model's name is looked for."""

from collections.abc import Collection, Mapping
from typing import ClassVar
from urllib.parse import parse_qs

import msgspec

from modelrunner.engine.runner import Runner
from modelrunner.errors import BadRequest
from modelrunner.gateway.calls import Call, Fields, Inference, Translation
from modelrunner.gateway.dialects.assembly import WholeBody
from modelrunner.gateway.dialects.dialect import WITH_ENGINE, engine_model
from modelrunner.gateway.dialects.openai import OpenAI
from modelrunner.gateway.engine_request import EngineRequest
from modelrunner.gateway.multipart import FormWord, words_of
from modelrunner.gateway.uploads import RequestUpload
from modelrunner.http.answers import Header

_FORM = "multipart/form-data"
_NO_WORD = FormWord("", 0, 0)
_PLAIN: Header = (b"Content-Type", b"text/plain; charset=utf-8")


class UploadFields(Fields, frozen=True, gc=False):
    """The fields of a body that passes."""

    span: tuple[int, int] | None = None
    """Where a form has the model's name; None for another body."""
    text_at: tuple[int, int] | None = None
    """Where a form asks for the format "text", in one piece."""


class PassThrough(OpenAI):
    """The calls that backends bring, with OpenAI's errors. The body of a call that `uploads` passes: a form names the
    model in its part `model`, any other body in the query of its path (`?model=NAME`). Another call has a JSON body, of
    which the engine alone knows the other fields: `response_format` is a word for sounds and images."""

    decoder = msgspec.json.Decoder(Fields)
    prefixes: ClassVar[tuple[str, ...]] = WITH_ENGINE

    def __init__(self, calls: Mapping[str, Call]) -> None:
        self.calls = calls  # type: ignore[misc]  # those of other families are known when they are written

    def read_upload(self, upload: RequestUpload, content_type: str, query: str) -> Fields:
        if content_type.partition(";")[0].strip().lower() == _FORM:
            words = words_of(content_type, upload.pieces())
            model, format = words["model"], words.get("response_format", _NO_WORD)
            in_one = words.get("stream", _NO_WORD).text.lower() in ("", "false", "0")
            text_at = (format.start, format.end) if format.text == "text" and in_one else None
            return UploadFields(model.text, span=(model.start, model.end), text_at=text_at)
        names = parse_qs(query, max_num_fields=100).get("model", [])
        if len(names) != 1:
            raise BadRequest("name the model once in the query: ?model=NAME", param="model")
        return UploadFields(names[0])

    def request(self, ask: Inference, runner: Runner) -> tuple[EngineRequest, Translation | None]:
        fields, upload = ask.fields, ask.upload
        if upload is None or not isinstance(fields, UploadFields):
            return super().request(ask, runner)
        request = EngineRequest(ask.head.route.path, upload, ask.head.content_type or "application/octet-stream")
        name = engine_model(runner, fields.model)
        if fields.span is not None and (ask.chosen or name != fields.model):
            request.splice(*fields.span, name.encode())
        endpoint = runner.api.endpoints.get(request.path)
        if fields.text_at is None or endpoint is None or not endpoint.lacks_text:
            return request, None
        request.splice(*fields.text_at, b"json")
        return request, _WrittenDown()

    def reads(self, ask: Inference, path: str, runner: Runner) -> Collection[str] | None:
        return super().reads(ask, path, runner) if ask.upload is None else None


class _Transcript(msgspec.Struct):
    text: str


class _WrittenDown(WholeBody):
    """The text of a transcription as JSON."""

    def __init__(self) -> None:
        super().__init__(())
        self.headers = (_PLAIN,)

    def end(self) -> bytes:
        return f"{self.decoded(_Transcript).text}\n".encode()
