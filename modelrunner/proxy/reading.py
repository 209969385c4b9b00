"""A request's body while it arrives."""

from modelrunner.proxy.inference import Terms

_SLOWEST = 500  # bytes per second, on average, after the first `idle` seconds: a trickle is not let hold a connection


class IncomingBody:
    """A body of `length` bytes being read."""

    def __init__(self, terms: Terms, length: int) -> None:
        self.terms = terms
        self.length = length
        self.size = 0
        self._began = 0.0
        self._pieces: list[bytes] = []

    def add(self, data: bytes) -> bool:
        """True once it is whole."""
        self._pieces.append(data)
        self.size += len(data)
        return self.size >= self.length

    def whole(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def deadline(self, now: float, idle: float) -> float:
        """When it is given up: after `idle` seconds without a byte, or when it comes too slowly on the whole."""
        self._began = self._began or now
        return min(now + idle, self._began + idle + self.size / _SLOWEST)
