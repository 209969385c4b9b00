"""Streams that pass, but for a few of their events."""

from abc import ABC, abstractmethod

from modelrunner.errors import EngineProtocolError
from modelrunner.gateway.calls import EVENT_STREAM
from modelrunner.gateway.dialects.assembly import LIMIT, UNLIKE
from modelrunner.gateway.request.tokens import Tokens
from modelrunner.http.answers import Header

_ENDS = (b"\n\n", b"\n\r\n")
"""The ends of an event, after the last line's own CR."""


class RewrittenEvents(ABC):
    """A `Translation` that changes events one by one."""

    headers: tuple[Header, ...] = EVENT_STREAM
    whole: bool = False
    chunk_per_line: bool = False

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def counted(self) -> Tokens | None:
        return None

    def piece(self, data: bytes) -> bytes:
        new = max(0, len(self._rest) - 2)  # the end of an event may have begun before
        self._rest += data
        ends = ((self._rest.rfind(last, new), len(last)) for last in _ENDS)
        end = max((at + length for at, length in ends if at >= 0), default=0)
        events: list[bytes] = []
        if end:
            *events, rest = bytes(self._rest[:end]).replace(b"\r\n", b"\n").split(b"\n\n")
            self._rest[:end] = rest
        if len(self._rest) > LIMIT:
            raise EngineProtocolError(f"the engine's stream has an event of more than {LIMIT >> 20} MiB")
        return b"".join([written + b"\n\n" for event in events if (written := self._rewritten(event))])

    def end(self) -> bytes:
        return bytes(self._rest).replace(b"\r\n", b"\n")

    def _rewritten(self, event: bytes) -> bytes:
        try:
            return self.event(event)
        except UNLIKE as error:
            raise EngineProtocolError(f"the engine's stream cannot be read: {error}") from None

    @abstractmethod
    def event(self, event: bytes) -> bytes:
        """Returns the client's event, without the empty line at its end; b"" leaves it out. Raises any of `UNLIKE` for
        an event of an unknown shape."""
