"""An admitted request, and the client's side of its answer."""

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec.structs import force_setattr

from modelrunner.aliases import Alias
from modelrunner.errors import ModelRunnerError
from modelrunner.gateway.dialects.dialect import Fields
from modelrunner.gateway.routes import Route
from modelrunner.http.answers import Header
from modelrunner.keys.allowances import Allowance
from modelrunner.keys.ring import KeyHolder
from modelrunner.types import Bundle, KeepAlive

if TYPE_CHECKING:
    from modelrunner.gateway.request.observers import RequestRecord


class Asked(msgspec.Struct, frozen=True, gc=False, eq=False):
    """What many requests have in common: the `family` of the API, the client's path `route` with `{backend}` or
    `{runner}` for a name, the `caller` for the scheduler, and the name of the API `key`, "" without one. A request that
    is refused before its body is read has neither caller nor key. `asked` makes one object of equal ones."""

    family: str
    route: str
    caller: str = ""
    key: str = ""


asked = lru_cache(maxsize=4096)(Asked)


class Terms(msgspec.Struct, frozen=True, gc=False):
    """The head of an admitted inference request. It says nothing about the body, so requests with the same head share
    it. `request_id` is the client's own, `origin` that of a web page, None without one; `caller` and `batch` are for
    the scheduler's order. `key` is the API key that the client sent; None for the owner of the daemon, and for a
    request that was counted before. A `resumable` stream can continue on another connection. `traceparent` is the
    client's header. `owner` is the owner of what the request stores: an `ApiKey.owner`, "" for the owner of the
    daemon."""

    route: Route
    origin: str | None
    request_id: str | None
    caller: str
    batch: bool
    preload: bool
    progress: bool
    key: KeyHolder | None = None
    resumable: bool = False
    traceparent: str | None = None
    owner: str = ""
    asked: Asked = Asked("", "")
    """Set from the other fields."""

    def __post_init__(self) -> None:
        route = self.route
        force_setattr(self, "asked", asked(route.dialect.name, route.pattern, self.caller, self.key_name))

    def check_model(self, bundle: Bundle) -> None:
        """Raises `Forbidden` if the API key may not use the model."""
        if self.key is not None and self.key.key.models:
            self.key.check_model(bundle.name, *bundle.references)

    @property
    def key_name(self) -> str:
        """The name of the API key, "" for the owner of the daemon."""
        return self.key.key.name if self.key is not None else ""


class Inference(msgspec.Struct, frozen=True, gc=False):
    """An admitted request. `body` is the client's. `arrived` is in seconds of `perf_counter`; a request that
    `only_loads` is answered as soon as its model is loaded. `counted` are the allowances that count it until it ends.
    `alias` is set until a model is chosen for the alias that the client wrote; `chosen` is the name of that model.
    `peer` is the client's address, "" on the Unix socket."""

    terms: Terms
    fields: Fields
    keep_alive: KeepAlive | None
    body: bytes
    request_id: str
    arrived: float
    only_loads: bool = False
    counted: tuple[Allowance, ...] = ()
    alias: Alias | None = None
    chosen: str = ""
    peer: str = ""


class Sink(Protocol):
    """The destination of an answer: the client's connection. None of its methods raises or waits."""

    takes_chunks: bool
    """True where a body of unknown length is written with its chunk framing."""

    def respond(self, status: int, headers: tuple[Header, ...], own: bytes, length: int | None, data: bytes) -> None:
        """Writes the head and the available part of the body. `headers` are fields that many answers share; `own` are
        the lines of this answer alone, each with its CR LF. `length` is None if unknown."""

    def write(self, data: bytes) -> None:
        """Writes a part of the body."""

    def finish(self) -> None:
        """Called when the answer is complete."""

    def cut(self) -> None:
        """Breaks the answer off, so that the client must notice: the written bytes go out, then the connection
        closes."""


class UnderWay(Protocol):
    """A request between its admission and the end of its answer."""

    ask: Inference

    def start(self) -> None:
        """Begins the work. Called once."""

    def pause(self) -> None:
        """Called when the client reads no more for now. Safe to call again."""

    def resume(self) -> None: ...

    def cancel(self) -> None:
        """Called when the client is gone."""

    def stop(self, error: ModelRunnerError) -> None:
        """Ends the request with an error, whatever it is doing."""

    def record(self) -> "RequestRecord":
        """Returns the record of the request so far."""


class RecordingTap(Sink, UnderWay, Protocol):
    """Stands between the `work` on a request and the client, and records both bodies."""

    work: UnderWay


class Recorder(Protocol):
    def tap(self, ask: Inference, sink: Sink) -> RecordingTap:
        """Returns a tap for a request to a model that is recorded, or not known yet. Raises nothing."""


class Interceptor(Protocol):
    """Another way to an answer than an exchange of the request's own."""

    def take(self, ask: Inference, sink: Sink) -> UnderWay | None:
        """Returns the work on a request; None for a request that gets an exchange. Raises nothing."""
