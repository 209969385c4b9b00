"""How a family of APIs looks to its clients: what a dialect decides, and what most families have in common."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from modelrunner.errors import ModelRunnerError
from modelrunner.http.answers import Header
from modelrunner.types import Mode

if TYPE_CHECKING:
    from modelrunner.engine.runner import Runner
    from modelrunner.gateway.interfaces import Inference

JSON: Header = (b"Content-Type", b"application/json")
EVENT_STREAM: tuple[Header, ...] = (
    (b"Content-Type", b"text/event-stream"),
    (b"Cache-Control", b"no-store"),
    (b"X-Accel-Buffering", b"no"),  # nginx in front of us passes each event on at once
)
WITH_ENGINE = ("", "/engines", "/engines/{backend}", "/runners/{runner}")
"""The prefixes under which the calls of an engine's own API are found."""


_ABSENT = msgspec.Raw()


@dataclass(frozen=True, slots=True)
class Call:
    """What a path of a family needs: the mode of its runner, and the engine's endpoint that answers it."""

    mode: Mode
    path: str


class Fields(msgspec.Struct, frozen=True, gc=False):
    """What the proxy must know of a body. `keep_alive` is a Go duration or seconds, None where the body has none. The
    fields after it are some that an engine may ignore (`Backend.check_request`), as they were written, or empty."""

    model: str
    stream: bool | None = None
    keep_alive: str | int | float | None = None
    tools: msgspec.Raw = _ABSENT
    tool_choice: msgspec.Raw = _ABSENT
    dimensions: msgspec.Raw = _ABSENT
    return_documents: msgspec.Raw = _ABSENT

    only_loads: ClassVar[bool] = False
    """True for a request without work for the engine: it loads the model or, with a keep-alive of 0, unloads it."""

    def watched(self) -> dict[str, Any]:
        """Those of the fields after `keep_alive` that the body has and that are not null, decoded."""
        found = {name: getattr(self, name) for name in _WATCHED}
        decoded = {name: msgspec.json.decode(raw) for name, raw in found.items() if raw}
        return {name: value for name, value in decoded.items() if value is not None}


_WATCHED = Fields.__struct_fields__[3:]


class Translation(Protocol):
    """An engine's good answer on its way into a family's own form. It is made for one answer. Its methods may raise
    `EngineProtocolError` for an answer that cannot be translated. `whole` is True where nothing of the answer goes to
    the client before its end: `end` may then raise any `ModelRunnerError`, or `EngineRefused`, and the client gets that
    error's status."""

    headers: tuple[Header, ...]
    whole: ClassVar[bool] = False

    def piece(self, data: bytes) -> bytes:
        """What the client gets for the next bytes of the engine's body; they may end anywhere."""

    def end(self) -> bytes:
        """What the client gets once the engine's body is complete."""


class Dialect(ABC):
    """One family. A single object serves all its requests, so it keeps nothing of any of them.

    `calls` has a `Call` for each path, which is found under each of `prefixes`. `{backend}` and `{runner}` in a prefix
    stand for a name. `stream_headers` begin a streamed answer that still waits for its engine."""

    name: ClassVar[str]
    calls: ClassVar[Mapping[str, Call]]
    prefixes: ClassVar[tuple[str, ...]] = ("",)
    stream_headers: ClassVar[tuple[Header, ...]] = EVENT_STREAM

    def owns(self, path: str) -> bool:
        """True for a path without a call whose errors are to be of this family's shape."""
        return False

    @abstractmethod
    def read(self, body: bytes) -> Fields:
        """Raises `BadRequest`."""

    @abstractmethod
    def request(self, ask: "Inference", runner: "Runner") -> tuple[str, bytes, Translation | None]:
        """The engine's path and the body that it gets, once the runner is known, and what its answer goes through; None
        where that is the client's, byte for byte. Raises `ModelRunnerError`."""

    def loaded(self, ask: "Inference") -> bytes:
        """The answer, JSON, to a request that only loads or unloads its model."""
        return b"{}"

    @abstractmethod
    def error(self, error: ModelRunnerError, request_id: str) -> tuple[tuple[Header, ...], bytes]:
        """Headers and body of an error's answer. The headers are without the length and the request's ID."""

    @abstractmethod
    def error_event(self, error: ModelRunnerError, request_id: str) -> bytes:
        """The last bytes of a stream that fails after its head."""

    @abstractmethod
    def waiting(self, progress: Mapping[str, Any] | None, waited: float) -> bytes:
        """A sign of life in a stream that waits for its runner since `waited` seconds. `progress` says what it waits
        for (`stage`, `position`, `expected_seconds`) where the client asked for that, else None."""


def refusal_headers(error: ModelRunnerError) -> tuple[Header, ...]:
    """What every family's errors say in headers: when to try again, or that it is of no use."""
    headers: tuple[Header, ...] = ()
    if error.retry_after is not None:
        headers += ((b"Retry-After", b"%d" % max(1, round(error.retry_after))),)
    if error.permanent:
        headers += ((b"x-should-retry", b"false"),)
    return headers
