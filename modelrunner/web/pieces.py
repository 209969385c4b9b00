"""Divides the missing bytes of a file among the connections that bring it."""

from collections.abc import Iterator
from contextlib import contextmanager

from modelrunner.web.partial import ByteRange, PartialFile

_PIECES = 16  # least number of pieces of a file, so that no connection has the whole rest
_SHORTEST, _LONGEST = 8 << 20, 256 << 20


class Pieces:
    """The pieces of a file of `size` bytes. One connection at a time holds a piece; `length` is the most bytes of a
    piece."""

    def __init__(self, partial: PartialFile, size: int) -> None:
        self._partial = partial
        self.length = min(max(size // _PIECES, _SHORTEST), _LONGEST)
        self._claimed: list[ByteRange] = []

    @contextmanager
    def claim(self) -> Iterator[ByteRange | None]:
        """Yields the next piece, which no other connection holds meanwhile; None if all are taken."""
        claim = self.next()
        if claim is None:
            yield None
            return
        self._claimed.append(claim)
        try:
            yield claim
        finally:  # the piece may have grown
            self._claimed = [other for other in self._claimed if other.start != claim.start]

    def free(self) -> list[ByteRange]:
        """Returns the missing ranges that no connection holds, in order."""
        ranges = []
        for start, end in self._partial.gaps():
            for claim in sorted(self._claimed):
                if claim.start < end and start < claim.end:
                    if start < claim.start:
                        ranges.append(ByteRange(start, claim.start))
                    start = max(start, claim.end)
            if start < end:
                ranges.append(ByteRange(start, end))
        return ranges

    def next(self, at: int | None = None) -> ByteRange | None:
        """Returns the range to bring next: the first free piece, or only the one that begins `at` a byte."""
        for start, end in self.free():
            if at is None or start == at:
                return ByteRange(start, min(end, start + self.length))
        return None

    def grow(self, claim: ByteRange, wanted: int) -> int:
        """Takes the pieces after the held one too, up to `wanted`. Returns the end of the held range."""
        own = next(other for other in self._claimed if other.start == claim.start)
        while own.end <= wanted and (more := self.next(own.end)) is not None:
            self._claimed.remove(own)
            own = ByteRange(own.start, more.end)
            self._claimed.append(own)
        return own.end
