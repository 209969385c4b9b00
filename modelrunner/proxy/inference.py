"""What an exchange is made of: the request that was found good, the way back to the client, and the pipeline behind."""

from typing import Any, Protocol

import msgspec

from modelrunner.errors import ModelRunnerError
from modelrunner.proxy.limits import Limits
from modelrunner.proxy.quarantine import Quarantine
from modelrunner.proxy.record import Hooks
from modelrunner.proxy.routes import Route
from modelrunner.proxy.wire import Header
from modelrunner.scheduler import Lease
from modelrunner.types import KeepAlive


class Terms(msgspec.Struct, frozen=True, gc=False):
    """What a request's head asks for, found good. It says nothing about the body, so requests with the same head share
    it. `request_id` is the client's own, `origin` the page that sends it, if there is one; `caller` and `batch` are for
    the scheduler's order."""

    route: Route
    origin: str | None
    request_id: str | None
    caller: str
    batch: bool
    preload: bool
    progress: bool


class Inference(msgspec.Struct, frozen=True, gc=False):
    """A request that was found good. `arrived` is in seconds of `perf_counter`."""

    terms: Terms
    model: str
    stream: bool
    keep_alive: KeepAlive | None
    body: bytes
    request_id: str
    arrived: float


class Sink(Protocol):
    """Where an answer goes: a lane's side of the client's connection. None of its methods raises or waits."""

    takes_chunks: bool
    """True where a body of unknown length is written with its chunk framing."""

    def respond(self, status: int, headers: tuple[Header, ...], own: bytes, length: int | None, data: bytes) -> None:
        """The head, and what there is of the body. `headers` are those that many answers have, `own` the lines that
        only this one has, each with its CR LF. `length` is None if unknown."""

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None:
        """The answer is complete."""

    def cut(self) -> None:
        """The answer ends here, and the client must notice: what was written goes out, then the connection closes."""


class Host(Protocol):
    """Whom an exchange asks and tells: the pipeline."""

    limits: Limits
    hooks: Hooks | None
    quarantine: Quarantine

    def lease_now(self, ask: Inference) -> Lease | None:
        """A lease for which nothing has to be waited. Raises what `lease` raises."""

    async def lease(self, ask: Inference) -> Lease:
        """Raises whatever resolving and scheduling raise."""

    def progress(self, ask: Inference) -> dict[str, Any]:
        """What a waiting request waits for: `stage`, in a word or two, and how long, as far as that is known."""

    def over(self, ask: Inference, lease: Lease | None, status: int, error: ModelRunnerError | None) -> None:
        """Called once for every exchange."""
