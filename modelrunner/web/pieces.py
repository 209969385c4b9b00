"""Divides the missing bytes of a file among the connections that bring it."""

from collections.abc import Iterator
from contextlib import contextmanager

from modelrunner.web.partial import ByteRange, PartialFile

_PIECES = 16  # of a file, at least, so that no connection has all that is left
_SHORTEST, _LONGEST = 8 << 20, 256 << 20


class Pieces:
    """Of one file of `size` bytes. A piece is in the hands of one connection at a time; `length` is how long it is at
    most."""

    def __init__(self, partial: PartialFile, size: int) -> None:
        self._partial = partial
        self.length = min(max(size // _PIECES, _SHORTEST), _LONGEST)
        self._claimed: list[ByteRange] = []

    @contextmanager
    def claim(self) -> Iterator[ByteRange | None]:
        """The next piece, which is nobody else's meanwhile; None if all are taken."""
        claim = self.next()
        if claim is None:
            yield None
            return
        self._claimed.append(claim)
        try:
            yield claim
        finally:  # it may have grown
            self._claimed = [other for other in self._claimed if other.start != claim.start]

    def free(self) -> list[ByteRange]:
        """What is missing and in nobody's hands, in order."""
        found = []
        for start, end in self._partial.gaps():
            for claim in sorted(self._claimed):
                if claim.start < end and start < claim.end:
                    if start < claim.start:
                        found.append(ByteRange(start, claim.start))
                    start = max(start, claim.end)
            if start < end:
                found.append(ByteRange(start, end))
        return found

    def next(self, at: int | None = None) -> ByteRange | None:
        """The range to bring next: the first free piece, or only the one that begins `at` a byte."""
        for start, end in self.free():
            if at is None or start == at:
                return ByteRange(start, min(end, start + self.length))
        return None

    def grow(self, claim: ByteRange, wanted: int) -> int:
        """Takes the pieces behind one's own too, as far as `wanted`. Returns the end of what is one's own."""
        own = next(other for other in self._claimed if other.start == claim.start)
        while own.end <= wanted and (more := self.next(own.end)) is not None:
            self._claimed.remove(own)
            own = ByteRange(own.start, more.end)
            self._claimed.append(own)
        return own.end
