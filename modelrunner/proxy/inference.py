"""What passes between a lane and an exchange: the request that was found good, and the way back to the client."""

from typing import Protocol

import msgspec

from modelrunner.proxy.render import Header
from modelrunner.proxy.routes import Route
from modelrunner.types import KeepAlive


class Inference(msgspec.Struct, frozen=True, gc=False):
    """A request that was found good. `arrived` is in seconds of `perf_counter`; `headers` are added to the answer."""

    route: Route
    model: str
    stream: bool
    keep_alive: KeepAlive | None
    body: bytes
    request_id: str
    arrived: float
    preload: bool = False
    progress: bool = False
    headers: tuple[Header, ...] = ()


class Sink(Protocol):
    """Where an answer goes: a lane's side of the client's connection. None of its methods raises or waits."""

    takes_chunks: bool
    """True where a body of unknown length is written with its chunk framing."""

    def respond(self, status: int, headers: list[Header], length: int | None, data: bytes) -> None:
        """The head, and what there is of the body. `length` is None if unknown."""

    def write(self, data: bytes) -> None: ...

    def finish(self) -> None:
        """The answer is complete."""

    def cut(self) -> None:
        """The answer ends here, and the client must notice: what was written goes out, then the connection closes."""
