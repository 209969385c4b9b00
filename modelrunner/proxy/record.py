"""What is known of a request when it is over, and who wants to hear of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Record:
    """Times in seconds: `queued` and `loading` before the engine was asked, `duration` in all. `status` is 499 for a
    client that left; `error` is the code of the error, if one. `body` is the request's."""

    request_id: str
    path: str
    model: str
    runner: str | None
    status: int
    queued: float
    loading: float
    duration: float
    error: str | None
    body: bytes


class Hooks(Protocol):
    """Metrics and recording. Called from the event loop, so it must not wait."""

    def finished(self, record: Record) -> None: ...

    def tap(self, request_id: str) -> Callable[[bytes], None] | None:
        """Where a copy of each piece of the answer goes (with its framing), or None."""


def tee(tap: Callable[[bytes], None], onward: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Gives each piece to both."""

    def both(piece: bytes) -> None:
        tap(piece)
        onward(piece)

    return both
