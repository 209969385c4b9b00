"""The values of a request, and the interfaces between an API family, the work on a request, and its client."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any, ClassVar, Protocol

import msgspec
from msgspec.structs import force_setattr

from modelrunner.aliases import Alias
from modelrunner.engine.runner import Runner
from modelrunner.errors import BadRequest, ContextTooLong, ModelRunnerError
from modelrunner.gateway.engine_request import EngineRequest
from modelrunner.gateway.request.tokens import Tokens
from modelrunner.gateway.response_store import ResponseStore
from modelrunner.gateway.uploads import RequestUpload
from modelrunner.http.answers import Header
from modelrunner.http.limits import Limits
from modelrunner.keys.allowances import Allowance, network_of
from modelrunner.keys.ring import KeyHolder
from modelrunner.progress import LoadProgress
from modelrunner.types import Bundle, KeepAlive, Mode

JSON: Header = (b"Content-Type", b"application/json")
EVENT_STREAM: tuple[Header, ...] = (
    (b"Content-Type", b"text/event-stream"),
    (b"Cache-Control", b"no-store"),
    (b"X-Accel-Buffering", b"no"),  # nginx in front of the daemon passes each event on at once
)
ANYTHING: Mapping[str, Any] = {"*/*": bytes}
"""A body that the document of the interface does not describe."""
_ABSENT = msgspec.Raw()


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a family, which an engine answers."""

    mode: Mode
    """That of its runner."""
    path: str
    """The engine's endpoint."""
    instead: str | None = None
    """The endpoint to which the call is translated for an engine without `path`."""
    text: str = "Asks a model."
    """Describes the call in the document of the interface, as in `modelrunner.openapi.Operation`; so do the next
    two."""
    body: Any = field(default_factory=lambda: ANYTHING)
    answer: Any = field(default_factory=lambda: ANYTHING)
    uploads: bool = False
    """True if its body is not read as JSON: it passes to the engine as it comes."""

    @property
    def streams(self) -> bool:
        """True if the answer may be a stream. An answer that is described by a type alone is one piece of JSON."""
        return isinstance(self.answer, Mapping)


class Fields(msgspec.Struct, frozen=True, gc=False):
    """The fields of a body that the gateway needs. An engine may not read those after `keep_alive` in some runs
    (`EngineApi.no_tools`, `embedding_length`): raw JSON, or empty."""

    model: str
    stream: bool | None = None
    keep_alive: str | int | float | None = None
    """A Go duration or seconds, None if absent."""
    tools: msgspec.Raw = _ABSENT
    tool_choice: msgspec.Raw = _ABSENT
    dimensions: msgspec.Raw = _ABSENT

    only_loads: ClassVar[bool] = False
    """True for a request without work for the engine: it is answered as soon as its model is loaded."""
    prepares: ClassVar[bool] = False
    """True for a request that needs `Dialect.prepare` before it gets a runner."""

    @property
    def copies(self) -> int:
        """How many choices each prompt gets."""
        return 1

    def watched(self) -> dict[str, Any]:
        """Returns the fields after `keep_alive` that the body has and that are not null, decoded. Raises
        `BadRequest`."""
        values = {name: decoded(getattr(self, name), name) for name in _WATCHED}
        return {name: value for name, value in values.items() if value is not None}

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

    @property
    def whole(self) -> bool: ...

    @property
    def chunk_per_line(self) -> bool:
        """True if each line gets a chunk of HTTP of its own: clients parse what one read gives them as one line."""

    @property
    def counted(self) -> Tokens | None:
        """The tokens of all choices so far; None where the end of the engine's body counts them all."""

    def piece(self, data: bytes) -> bytes:
        """Returns the client's bytes for the next bytes of the engine's body, which may end anywhere."""

    def end(self) -> bytes:
        """Returns the client's last bytes, once the engine's body is complete."""


class Sink(Protocol):
    """The destination of an answer: the client's connection. None of its methods raises or waits."""

    takes_chunks: bool
    """True where a body of unknown length is written with its chunk framing."""

    def respond(self, status: int, headers: tuple[Header, ...], own: bytes, length: int | None, data: bytes) -> None:
        """Writes the head and the available part of the body. `headers` are fields that many answers share; `own` are
        the lines of this answer alone, each with its CR LF. `length` is None if unknown."""

    def write(self, data: bytes) -> None:
        """Writes a part of the body."""

    def finish(self, *, failed: bool = False) -> None:
        """Called when the answer is complete. It `failed` if it is a stream whose last event is an error: the client
        gets it whole, so that it reads the reason, but it is no answer to keep."""

    def cut(self) -> None:
        """Breaks the answer off where no error can be told, so that the client must notice: the written bytes go out,
        then the connection closes."""


class BackgroundWork(Protocol):
    """The work on one request."""

    def start(self) -> None:
        """Begins the work. Called once."""

    def cancel(self) -> None:
        """Called when the client is gone."""


class Preparing(Protocol):
    """What `Dialect.prepare` may use."""

    responses: ResponseStore | None
    """The stored responses of OpenAI's API; None without them."""
    limits: Limits

    async def unload(self, ask: "Inference") -> None:
        """Ends the runners of the request's model once they are free. Raises `ModelRunnerError`."""

    def go_on(self, ask: "Inference", sink: Sink) -> BackgroundWork:
        """Makes the work on a request that goes on without its client. Raises `ModelRunnerError`."""


class Dialect(ABC):
    """One API family. A single object serves all its requests, so it keeps no state of a request."""

    name: ClassVar[str]
    calls: ClassVar[Mapping[str, Call]]
    """By the path, which is found under each of `prefixes`."""
    prefixes: ClassVar[tuple[str, ...]] = ("",)
    """`{backend}` and `{runner}` stand for a name."""
    stream_headers: ClassVar[tuple[Header, ...]] = EVENT_STREAM
    """They begin a streamed answer that still waits for its engine."""
    error_shape: ClassVar[type | None] = None
    """The struct of an error in JSON, for the document of the interface."""
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

    def read_upload(self, upload: RequestUpload, content_type: str, query: str) -> Fields:
        """Returns the fields of a call that `uploads`: from its body, of the media type `content_type`, or from the
        `query` of its path. Raises `BadRequest`."""
        raise NotImplementedError

    @abstractmethod
    def request(self, ask: "Inference", runner: Runner) -> tuple[EngineRequest, Translation | None]:
        """Returns the request for the engine, and the translation of its answer, None if the answer passes unchanged.
        `runner` is the leased one. Raises `ModelRunnerError`."""

    def reads(self, ask: "Inference", path: str, runner: Runner) -> Collection[str] | None:
        """Returns the names of the fields in the client's body that are read: by the translation or, if the body goes
        to the engine's `path` unchanged, by the engine. None if they are unknown."""
        return None

    async def prepare(
        self, preparing: Preparing, ask: "Inference"
    ) -> "Inference | bytes | AsyncGenerator[bytes, None]":
        """Returns the request that continues in place of one that `prepares`; or its answer, if it needs no runner: in
        JSON, or a stream that is made elsewhere. Raises `ModelRunnerError`."""
        return ask

    async def shortened(self, ask: "Inference", runner: Runner, error: ContextTooLong) -> "Inference | None":
        """Returns a shorter request, to be asked in place of one that did not fit in the model's window; None if the
        client gets the `error`. Raises `ModelRunnerError`."""
        return None

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


@dataclass(frozen=True, slots=True)
class Route:
    """A path of inference."""

    dialect: Dialect
    pattern: str
    """The client's path, with `{backend}` or `{runner}` in place of a name."""
    mode: Mode
    path: str
    """The engine's endpoint."""
    instead: str | None = None
    """The endpoint for engines without `path`."""
    streams: bool = False
    uploads: bool = False
    """This and `streams` are those of the `Call`."""
    backend: str | None = None
    """The backend that the client's path names."""
    runner: str | None = None
    """The ID of the runner that the client's path names."""


class Labels(msgspec.Struct, frozen=True, gc=False, eq=False):
    """What many requests have in common. A request that is refused before its body is read has neither caller nor key.
    `labels` makes one object of equal ones."""

    family: str
    """The name of the API family."""
    route: str
    """`Route.pattern`."""
    caller: str = ""
    """The caller for the scheduler."""
    key: str = ""
    """The name of the API key, "" without one."""


labels = lru_cache(maxsize=4096)(Labels)


class InferenceHead(msgspec.Struct, frozen=True, gc=False):
    """The head of an admitted inference request. It says nothing about the body, so requests with the same head share
    it."""

    route: Route
    origin: str | None
    """That of a web page, None without one."""
    request_id: str | None
    """The client's own."""
    caller: str
    """This and `batch` are for the scheduler's order."""
    batch: bool
    preload: bool
    progress: bool
    key: KeyHolder | None = None
    """The API key that the client sent; None for the owner of the daemon, and for a request that was counted before."""
    resumable: bool = False
    """A stream that can continue on another connection."""
    traceparent: str | None = None
    """The client's header."""
    owner: str = ""
    """The owner of what the request stores: an `ApiKey.owner`, "" for the owner of the daemon."""
    content_type: str = ""
    query: str = ""
    """That of the path, without its question mark."""
    labels: Labels = Labels("", "")
    """Set from the other fields."""

    def __post_init__(self) -> None:
        route = self.route
        key = self.key.key.name if self.key is not None else ""
        force_setattr(self, "labels", labels(route.dialect.name, route.pattern, self.caller, key))

    def check_model(self, bundle: Bundle) -> None:
        """Raises `Forbidden` if the API key may not use the model."""
        if self.key is not None and self.key.key.models:
            self.key.check_model(bundle.name, *bundle.references)


def client_of(head: InferenceHead, peer: str) -> str:
    """Returns what the bodies of a request count for: its API key, else its network; "" on the Unix socket without a
    key. `peer` is its address."""
    return head.labels.key or network_of(peer)


class Inference(msgspec.Struct, frozen=True, gc=False):
    """An admitted request."""

    head: InferenceHead
    fields: Fields
    keep_alive: KeepAlive | None
    body: bytes
    """The client's JSON; b"" with an upload."""
    request_id: str
    arrived: float
    """In seconds of `perf_counter`."""
    only_loads: bool = False
    """True for a request that is answered as soon as its model is loaded."""
    counted: tuple[Allowance, ...] = ()
    """The allowances that count it until it ends."""
    alias: Alias | None = None
    """Set until a model is chosen for the alias that the client wrote."""
    chosen: str = ""
    """The name of the model that was chosen for an alias."""
    peer: str = ""
    """The client's address, "" on the Unix socket."""
    upload: RequestUpload | None = None
    """The body of a call that `uploads`."""
    lost: tuple[str, ...] = ()
    """What was dropped since it did not fit in the model's window, by name: `X-Modelrunner-Truncated`."""
    tries: int = 0
    """How often it was shortened."""
    held: int = 0
    """Bytes of a stored conversation that are in memory for it, beside its body."""

    @property
    def size(self) -> int:
        """The bytes of the body."""
        return len(self.body) if self.upload is None else self.upload.size

    def digest(self) -> bytes:
        """Returns a SHA-256 of the body; of an upload that of its size and its first bytes."""
        if self.upload is None:
            return sha256(self.body).digest()
        return sha256(b"%d %b" % (self.size, next(self.upload.pieces(), b""))).digest()
