"""Wraps words at the terminal's edge, holds keys that are typed during an answer, and detects repetitions."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from wcwidth import wcwidth

_FENCE = "```"
_BACK = "\x1b[%dD\x1b[K"  # ECMA-48: the cursor to the left, and the rest of the line erased
_SHOWN, _TIMES = 600, 6  # characters that a repetition fills at least, and how often it says the same
_MARK = 60  # characters at the end of a text that are looked for before


class Wrapper:
    """Wraps text, which comes in pieces, between words. A word that reaches the edge of the terminal is erased and
    begins the next line. Markdown code between fences stays unchanged. `width` returns the terminal's columns, which
    may change between two pieces."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._columns = width() - 1  # in the last column, terminals differ in where the cursor stands
        self._at = 0
        self._word = ""
        self._line = ""
        self._in_code = False

    def feed(self, text: str) -> str:
        """Returns the text to write, with the terminal's control sequences in it."""
        if (columns := self._width() - 1) != self._columns:
            self._columns = columns
            if self._at > columns:  # the terminal has broken the line: only its rest can be erased
                self._at %= columns + 1
                self._word = self._word[-self._at :] if self._at else ""
        return "".join(self._character(character) for character in text)

    def _character(self, character: str) -> str:
        if character == "\n":
            if self._line.lstrip().startswith(_FENCE):
                self._in_code = not self._in_code
            self._at, self._word, self._line = 0, "", ""
            return character
        self._line += character
        if self._in_code:
            return character
        size = max(0, wcwidth(character))
        word, before = self._word, self._at
        # Languages without blanks have wide characters, and break anywhere.
        self._word = "" if character.isspace() or size == 2 else word + character
        self._at += size
        if self._at <= self._columns:
            return character
        if character.isspace():
            self._at = 0
            return "\n"
        self._at = _columns_of(word) + size
        if (
            self._at > self._columns or _columns_of(word) == before
        ):  # one word that fills the line: the terminal cuts it
            self._at = size
            return character
        return _BACK % _columns_of(word) + "\n" + word + character if word else "\n" + character


def _columns_of(text: str) -> int:
    return sum(max(0, wcwidth(character)) for character in text)


@contextmanager
def no_echo() -> Iterator[None]:
    """Within the block, typed keys do not appear between the words of an answer; they wait for what reads the terminal
    next. Ctrl-C still works, and drops them. A job in the background leaves the terminal alone: the system would stop
    it."""
    if sys.stdin is None or not sys.stdin.isatty() or _is_in_background(sys.stdin.fileno()):
        yield
        return
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = list(before)
    quiet[3] &= ~(termios.ECHO | termios.ICANON)  # the next reader edits the line, and takes Ctrl-D
    termios.tcsetattr(descriptor, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _is_in_background(terminal: int) -> bool:
    try:
        return os.tcgetpgrp(terminal) != os.getpgrp()
    except OSError:  # it is not the terminal of this session
        return False


def repeats(text: str) -> bool:
    """Returns whether the text ends with one passage that stands there at least six times in a row, and fills 600
    characters or more. A model that begins to repeat itself at temperature 0 never ends."""
    if len(text) < _SHOWN:
        return False
    mark = text[-_MARK:]
    period = len(text) - _MARK - text.rfind(mark, 0, -1)  # from the mark to where it stood before
    times = max(_TIMES, -(-_SHOWN // period))
    return len(text) >= period * times and text.endswith(text[-period:] * times)
