"""The interface of an API family, and the parts that most families share."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from modelrunner.errors import BadRequest, ModelRunnerError
from modelrunner.http.answers import Header
from modelrunner.progress import LoadProgress
from modelrunner.types import Mode

if TYPE_CHECKING:
    from modelrunner.engine.runner import Runner
    from modelrunner.gateway.calls import Inference
    from modelrunner.gateway.request.pipeline import Pipeline

JSON: Header = (b"Content-Type", b"application/json")
EVENT_STREAM: tuple[Header, ...] = (
    (b"Content-Type", b"text/event-stream"),
    (b"Cache-Control", b"no-store"),
    (b"X-Accel-Buffering", b"no"),  # nginx in front of the daemon passes each event on at once
)
WITH_ENGINE = ("", "/engines", "/engines/{backend}", "/runners/{runner}")
"""The path prefixes of the calls of an engine's own API."""


ANYTHING: Mapping[str, Any] = {"*/*": bytes}
"""A body that the document of the interface does not describe."""


_ABSENT = msgspec.Raw()


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a family: the mode of its runner, and the engine's endpoint that answers it. For an engine without this
    endpoint, the call is translated to the endpoint `instead`. `text`, `body` and `answer` describe the call in the
    document of the interface, as in `modelrunner.openapi.Operation`."""

    mode: Mode
    path: str
    instead: str | None = None
    text: str = "Asks a model."
    body: Any = field(default_factory=lambda: ANYTHING)
    answer: Any = field(default_factory=lambda: ANYTHING)

    @property
    def streams(self) -> bool:
        """True if the answer may be a stream. An answer that is described by a type alone is one piece of JSON."""
        return isinstance(self.answer, Mapping)


def streamed(answer: type, media_type: str = "text/event-stream") -> Mapping[str, Any]:
    """Describes an answer of this type in JSON, or a stream if the client asks for one."""
    return {"application/json": answer, media_type: Any}


class Fields(msgspec.Struct, frozen=True, gc=False):
    """The fields of a body that the gateway needs. `keep_alive` is a Go duration or seconds, None if absent. An engine
    may ignore the fields after it (`ChecksRequests.check_request`): raw JSON, or empty."""

    model: str
    stream: bool | None = None
    keep_alive: str | int | float | None = None
    tools: msgspec.Raw = _ABSENT
    tool_choice: msgspec.Raw = _ABSENT
    dimensions: msgspec.Raw = _ABSENT
    return_documents: msgspec.Raw = _ABSENT

    only_loads: ClassVar[bool] = False
    """True for a request without work for the engine: it is answered as soon as its model is loaded."""
    prepares: ClassVar[bool] = False
    """True for a request that needs `Dialect.prepare` before it gets a runner."""

    def watched(self) -> dict[str, Any]:
        """Returns the fields after `keep_alive` that the body has and that are not null, decoded. Raises
        `BadRequest`."""
        found = {name: decoded(getattr(self, name), name) for name in _WATCHED}
        return {name: value for name, value in found.items() if value is not None}

    def check_choice(self) -> None:
        """Raises `BadRequest` for a `tool_choice` that requires a call where there are no tools. Engines differ here:
        some answer with a text."""
        if not self.tool_choice or bytes(self.tools) not in _NO_TOOLS:
            return
        choice = decoded(self.tool_choice, "tool_choice")
        word = choice.get("type") if isinstance(choice, dict) else choice
        if word not in (None, "auto", "none"):
            raise BadRequest("`tool_choice` requires the call of a tool, and there are no `tools`", param="tool_choice")


_WATCHED = Fields.__struct_fields__[3:]
_NO_TOOLS = (b"", b"null", b"[]")


def decoded(raw: msgspec.Raw, name: str) -> Any:
    """Decodes the raw field `name`; None if it is absent. Raises `BadRequest` for a number that does not fit in a
    double, such as 1e400, since reading the body did not check it."""
    try:
        return msgspec.json.decode(raw) if raw else None
    except msgspec.ValidationError as error:
        raise BadRequest(f"`{name}`: {error}", param=name) from None


class Translation(Protocol):
    """Translates one successful answer of an engine into a family's own form. Its methods may raise
    `EngineProtocolError` for an answer that cannot be translated. With `whole`, nothing goes to the client before the
    end: `end` may then raise any `ModelRunnerError`, or `EngineRefused`, and the client gets that error's status."""

    headers: tuple[Header, ...]
    whole: ClassVar[bool] = False
    chunk_per_line: ClassVar[bool] = False
    """True if each line gets a chunk of HTTP of its own: clients parse what one read gives them as one line."""

    def piece(self, data: bytes) -> bytes:
        """Returns the client's bytes for the next bytes of the engine's body, which may end anywhere."""

    def end(self) -> bytes:
        """Returns the client's last bytes, once the engine's body is complete."""


class Dialect(ABC):
    """One API family. A single object serves all its requests, so it keeps no state of a request.

    `calls` has a `Call` for each path, which is found under each of `prefixes`. `{backend}` and `{runner}` in a prefix
    stand for a name. `stream_headers` begin a streamed answer that still waits for its engine. `error_shape` is the
    struct of an error in JSON, for the document of the interface."""

    name: ClassVar[str]
    calls: ClassVar[Mapping[str, Call]]
    prefixes: ClassVar[tuple[str, ...]] = ("",)
    stream_headers: ClassVar[tuple[Header, ...]] = EVENT_STREAM
    error_shape: ClassVar[type | None] = None

    refuses_unread: ClassVar[bool] = False
    """True if its fields are the engine's own: an unread field that changes the meaning of an answer is refused."""

    counts_at_start: ClassVar[bool] = False
    """True if the first event of its streams counts the tokens of the prompt."""

    def owns(self, path: str) -> bool:
        """True for a path without a call whose errors have this family's shape."""
        return False

    @abstractmethod
    def read(self, body: bytes) -> Fields:
        """Returns the fields of a body. Raises `BadRequest`."""

    @abstractmethod
    def request(self, ask: "Inference", runner: "Runner") -> tuple[str, bytes, Translation | None]:
        """Returns the engine's path, the body for the engine, and the translation of its answer, None if the answer
        passes unchanged. `runner` is the leased one. Raises `ModelRunnerError`."""

    def reads(self, ask: "Inference", path: str, runner: "Runner") -> Collection[str] | None:
        """Returns the names of the fields in the client's body that are read: by the translation or, if the body goes
        to the engine's `path` unchanged, by the engine. None if they are unknown."""
        return None

    async def prepare(self, pipeline: "Pipeline", ask: "Inference") -> "Inference | bytes":
        """Returns the request that continues in place of one that `prepares`; or the answer in JSON, if it needs no
        runner. Raises `ModelRunnerError`."""
        return ask

    def loaded(self, ask: "Inference") -> bytes:
        """Returns the answer, in JSON, to a request that only loads its model."""
        return b"{}"

    @abstractmethod
    def error(self, error: ModelRunnerError, request_id: str) -> tuple[tuple[Header, ...], bytes]:
        """Returns headers and body of an error's answer. The headers are without the length and the request's ID."""

    @abstractmethod
    def error_event(self, error: ModelRunnerError, request_id: str) -> bytes:
        """Returns the last bytes of a stream that fails after its head."""

    @abstractmethod
    def waiting(self, progress: LoadProgress | None, waited: float) -> bytes:
        """Returns a sign of life for a stream that has waited for its runner for `waited` seconds. `progress` is the
        progress of the load if the client asked for it, else None."""


def refusal_headers(error: ModelRunnerError) -> tuple[Header, ...]:
    """Returns the headers of every family's errors: when to try again, or that a retry is useless."""
    headers: tuple[Header, ...] = ()
    if error.retry_after is not None:
        headers += ((b"Retry-After", b"%d" % max(1, ceil(min(error.retry_after, 1e6)))),)  # never too early
    if error.status == 401:
        headers += ((b"WWW-Authenticate", b"Bearer"),)
    if error.permanent:
        headers += ((b"x-should-retry", b"false"),)
    return headers


def engine_model(runner: "Runner", model: str) -> str:
    """The name by which the engine knows the model: `model`, unless the engine checks names and has others."""
    names = runner.names
    return model if names is None or model in names else names[0]
