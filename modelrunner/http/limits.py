"""Limits for each client of the daemon."""

from dataclasses import dataclass, replace
from typing import Any, Self

_RESERVED = 256
"""Descriptors for files, engines and the control plane."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds."""

    body: int = 32 << 20
    """Of one request."""
    total_body: int = 512 << 20
    """Of all requests under way together, in memory."""
    upload: int = 256 << 20
    """Of one request whose body goes through a file; eight times that for all together."""
    head: int = 64 << 10
    header_count: int = 128
    header_timeout: float = 10.0
    """From the first byte of a head (or from accept) to its last."""
    body_idle: float = 30.0
    """Between two pieces of a request's body."""
    body_time: float = 600.0
    """From the first byte of a body for a model to its last: the daemon keeps it until it is whole."""
    idle: float = 75.0
    """Of a connection between two requests."""
    write_stall: float = 60.0
    """For a client that accepts not one byte of a waiting answer."""
    connections: int = 4096
    per_peer: int = 1024
    """Connections from one address."""
    total_unsent: int = 256 << 20
    """Bytes of all answers together that wait for clients which do not read."""
    pipelined: int = 256 << 10
    """Bytes that are read ahead while a request is answered or an answer waits for its client."""
    progress_after: float = 10.0
    """A streamed request that waits longer for its runner gets the head of its answer, and comments that keep the
    connection open."""
    comment_every: float = 10.0
    """Between two such comments."""
    check_every: float = 0.5
    """How often the limits are checked, and whether a client has left where only polling shows it."""

    @classmethod
    def within(cls, descriptors: int, **limits: Any) -> Self:
        """Returns the limits of a process that may open so many descriptors. There are two listeners, and each
        connection may need a second descriptor for its engine."""
        usual = cls(**limits)
        most = max(16, min(usual.connections, (descriptors - _RESERVED) // 4))
        return replace(usual, connections=most, per_peer=min(usual.per_peer, most))
