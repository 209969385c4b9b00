"""Finds the number of lines of a batch that go to the engine together."""

MOST = 32
"""Embeddings that go to the engine together."""
_LONGEST = 0.25  # seconds that the engine may work for a group
_FIRST = 8.0  # lines of the first group


class Pace:
    def __init__(self) -> None:
        self._size = _FIRST

    def group(self) -> int:
        """Returns the number of embeddings for the next group."""
        return int(self._size)

    def note(self, seconds: float, lines: int) -> None:
        """Records how long the engine worked for a group. A part of that time is the same for one line and for many, so
        the size is found by trying."""
        if seconds > _LONGEST:
            self._size = max(1.0, 0.75 * self._size)
        elif lines >= int(self._size):
            self._size = min(float(MOST), self._size + 1)
