"""Translates Ollama's requests to those of OpenAI's family.

Source of the fields: https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from modelrunner.defaults import SamplingOptions
from modelrunner.errors import BadRequest
from modelrunner.gateway.calls import Fields, decoded
from modelrunner.gateway.dialects.normalize import LEAST_LOGPROBS
from modelrunner.gateway.dialects.ollama_context import Turn, turns_of
from modelrunner.schema import whole_number
from modelrunner.types import KeepAlive

_LEVELS = ("low", "medium", "high", "max")
_THINKS: Mapping[bool | str, bool | str] = {"true": True, "false": False, "none": False}
"""Other forms of `think`."""
_IMAGE_TYPES = {"iVBORw0KGgo": "png", "R0lGOD": "gif", "UklGR": "webp", "/9j/": "jpeg"}  # as their base64 begins


class EmptyFields(Fields, frozen=True, gc=False):
    """The base of requests that may be without work: such a request loads the model or, with a keep-alive of 0, unloads
    it."""

    @property
    def prepares(self) -> bool:  # type: ignore[override]  # of each request
        return self.only_loads and self.keep_alive is not None and KeepAlive.parse(self.keep_alive).seconds == 0


class OllamaFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


class OllamaCall(msgspec.Struct):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaFields(EmptyFields, frozen=True, gc=False):
    """The base of requests for a text. `think` may be a level. A request that is too long is cut unless `truncate` is
    false; `shift` has no effect: an answer ends where the window does."""

    stream: bool | None = True
    options: dict[str, Any] | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None
    shift: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """Returns the sampling options by OpenAI's names. Raises `BadRequest` for an option of a wrong type."""
        fields = SamplingOptions.of(self.options, "options").mapped()
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            schema = {"name": "answer", "schema": self.format, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or LEAST_LOGPROBS}
        if self.think is not None:
            thinks = _THINKS.get(self.think, self.think)
            if isinstance(thinks, str) and thinks not in _LEVELS:
                message = f"`think` is true, false, or one of {', '.join(_LEVELS)}, not {thinks[:40]!r}"
                raise BadRequest(message, param="think")
            fields["chat_template_kwargs"] = {"enable_thinking": thinks is not False}
            if isinstance(thinks, str):
                fields["reasoning_effort"] = thinks
        return fields

    def ignored(self, known: Collection[str] | None) -> list[str]:
        """Returns the names of the options that have no effect. `known` are the fields that the engine reads, None if
        they are unknown."""
        return ignored_options(self.options, known) + (["shift"] if self.shift else [])


class ChatFields(OllamaFields, frozen=True, gc=False):
    """`POST /api/chat`."""

    messages: list[OllamaMessage] | None = None

    @property
    def only_loads(self) -> bool:  # type: ignore[override]  # of each request
        return not self.messages

    def chat(self) -> dict[str, Any]:
        """Raises `BadRequest`."""
        fields = {"messages": _messages(self.messages or ()), **self.sampling()}
        return fields | ({"tools": self.tools} if bytes(self.tools) not in (b"", b"null", b"[]") else {})


class GenerateFields(OllamaFields, frozen=True, gc=False):
    """`POST /api/generate`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None

    @property
    def only_loads(self) -> bool:  # type: ignore[override]  # of each request
        return not self.prompt and not self.images

    def check(self) -> None:
        """Raises `BadRequest` for a field without which the answer would mean something else."""
        if self.template:
            raise BadRequest("a template for one request is not supported: configure the model's own", param="template")
        if self.context and self.raw:
            raise BadRequest("a raw prompt has no context: leave `raw` or `context` out", param="context")
        if self.context:
            turns_of(self.context)
        if self.suffix:
            raise BadRequest("text between a prompt and a suffix is not supported: leave `suffix` out", param="suffix")

    def turns(self) -> list[Turn]:
        """Returns the conversation up to this prompt, none for a raw one. A new system text takes the place of the
        earlier one. Raises `BadRequest`."""
        if self.raw:
            return []
        earlier = turns_of(self.context) if self.context else []
        if self.system:
            earlier = [("system", self.system), *(turn for turn in earlier if turn[0] != "system")]
        return [*earlier, ("user", self.prompt or "")]

    def chat(self) -> dict[str, Any]:
        """Raises `BadRequest`."""
        messages = [OllamaMessage(role, text) for role, text in self.turns()]
        messages[-1].images = self.images
        return {"messages": _messages(messages), **self.sampling()}

    def completion(self) -> dict[str, Any]:
        """Returns a completion of the prompt without the model's chat template. Raises `BadRequest`."""
        if self.images:
            raise BadRequest("a raw prompt has no images: leave `raw` or `images` out", param="images")
        fields = self.sampling()
        for chat_only in ("logprobs", "top_logprobs", "chat_template_kwargs", "reasoning_effort"):
            fields.pop(chat_only, None)
        texts = [f"{text}\n" if role == "system" else text for role, text in self.turns()]
        return {"prompt": "".join(texts) if texts else self.prompt, **fields}


class EmbedFields(EmptyFields, frozen=True, gc=False):
    """`POST /api/embed`, and `/api/embeddings` with `prompt`."""

    input: str | list[str] | None = None
    prompt: str | None = None
    options: dict[str, Any] | None = None
    truncate: bool | None = None

    cut: ClassVar[bool] = False

    @property
    def only_loads(self) -> bool:  # type: ignore[override]  # of each request
        return not self.input and not self.prompt

    def watched(self) -> dict[str, Any]:
        """Returns nothing: no engine is asked for `dimensions`."""
        return {}

    @property
    def length(self) -> int | None:
        """The length of each vector, None for all of it. Raises `BadRequest`."""
        wanted = whole_number(decoded(self.dimensions, "dimensions"))
        if wanted is not None and (type(wanted) is not int or wanted < 0):
            raise BadRequest("`dimensions` is a whole number", param="dimensions")
        return wanted or None

    def embedding(self) -> dict[str, Any]:
        return {"input": self.input or self.prompt, "encoding_format": "float"}

    def ignored(self) -> list[str]:
        """Returns the names of all options: none has an effect on an embedding."""
        return [f"options.{name}" for name in self.options or {}]


class CutEmbedFields(EmbedFields, frozen=True, gc=False):
    """A request that was cut at the window: by the engine, or to `inputs`, which are texts and lists of tokens."""

    cut: ClassVar[bool] = True
    inputs: Sequence[Any] = ()
    by_engine: bool = False

    def embedding(self) -> dict[str, Any]:
        cut = {"truncate_prompt_tokens": -1} if self.by_engine else {"input": self.inputs}
        return EmbedFields.embedding(self) | cut


def ignored_options(options: Mapping[str, Any] | None, known: Collection[str] | None) -> list[str]:
    """Returns the names of options that are not in `SamplingOptions`, or that the engine does not read."""
    names = [name for name, value in (options or {}).items() if value is not None]
    return [f"options.{name}" for name in names if not _is_used(name, known)]


def _is_used(option: str, known: Collection[str] | None) -> bool:
    if option not in SamplingOptions.__struct_fields__ or known is None:
        return option in SamplingOptions.__struct_fields__
    return any(name in known for name in SamplingOptions.names(option))


class _OpenCalls:
    """The calls of a message that have no result yet, from their IDs and names."""

    def __init__(self, calls: Sequence[tuple[str, str]]) -> None:
        self._ids = [id for id, _ in calls]
        self._open = set(range(len(calls)))
        self._places: dict[tuple[str, str], list[int]] = {}  # the first at the end; it may be taken already
        for place in reversed(range(len(calls))):
            id, name = calls[place]
            for key in (("id", id), ("name", name), ("", "")):
                self._places.setdefault(key, []).append(place)

    def take(self, id: str | None, name: str | None) -> str | None:
        """Takes the first call with this ID, without an ID that of this tool, without both any; returns its ID."""
        places = self._places.get(("id", id) if id else ("name", name) if name else ("", ""), [])
        while places:
            place = places.pop()
            if place in self._open:
                self._open.remove(place)
                return self._ids[place]
        return None


def _messages(messages: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Returns OpenAI's messages. Their tool calls have IDs, which Ollama's may lack: a result belongs to the call with
    its ID, else to the first call of its tool without a result. Raises `BadRequest` for an image that is not
    base64."""
    converted: list[dict[str, Any]] = []
    open_calls = _OpenCalls(())
    for number, message in enumerate(messages):
        one: dict[str, Any] = {"role": message.role, "content": _content(message)}
        if message.thinking:
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            functions = [call.function for call in message.tool_calls]
            ids = [call.id or f"call_{number}_{place}" for place, call in enumerate(message.tool_calls)]
            open_calls = _OpenCalls([(id, function.name) for id, function in zip(ids, functions, strict=True)])
            one["tool_calls"] = [
                {
                    "id": id,
                    "type": "function",
                    "function": {"name": function.name, "arguments": msgspec.json.encode(function.arguments).decode()},
                }
                for id, function in zip(ids, functions, strict=True)
            ]
        if message.role == "tool":
            answered = open_calls.take(message.tool_call_id, message.tool_name)
            one["tool_call_id"] = message.tool_call_id or answered or "call_0"
        converted.append(one)
    return converted


def _content(message: OllamaMessage) -> Any:
    if not message.images:
        return message.content or ""
    text = [{"type": "text", "text": message.content}] if message.content else []
    images = [{"type": "image_url", "image_url": {"url": _data_url(image)}} for image in message.images]
    return [*text, *images]


def _data_url(image: str) -> str:
    if image.startswith("data:"):
        return image
    kind = next((kind for start, kind in _IMAGE_TYPES.items() if image.startswith(start)), "jpeg")
    return f"data:image/{kind};base64,{image}"
