"""Finds the place of a key in the text of a TOML file, which tomllib does not report. Takes time in proportion to the
text."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

_PART = r"""(?:[\w-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
_KEY = rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*"
_STATEMENT = re.compile(rf"\s*(?:\[\[?[ \t]*(?P<table>{_KEY})[ \t]*\]|(?P<key>{_KEY})[ \t]*=)")
# Strings and comments match as a whole, so that a bracket or a line's end inside them does not count.
_TOKEN = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|\'\'\'.*?\'\'\'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}\n]', re.DOTALL
)


def place(text: str, wanted: Sequence[str]) -> tuple[int, int] | None:
    """Returns line and column, both from 1, of the key `wanted`, or else of the innermost table around it; None if not
    even its first part exists. `text` is valid TOML."""
    best, deepest = None, 0
    for start, statement, path in _statements(text):
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(path, wanted, strict=False))))
        # The rest of the key may stand inside this one's value, an inline table.
        longest = len(wanted) if shared == len(path) else shared
        for depth in range(longest, max(deepest, shared - 1), -1):
            if match := re.search(rf"(?<![\w-]){re.escape(wanted[depth - 1])}(?![\w-])", statement):
                best, deepest = start + match.start(), depth
                break
    return None if best is None else (1 + text.count("\n", 0, best), best - text.rfind("\n", 0, best))


def _statements(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """Yields the offset, text and path of keys of every table's head and every assignment."""
    table: list[str] = []
    for start, statement in _split(text):
        if match := _STATEMENT.match(statement):
            if match["table"]:
                table = path = _parts(match["table"])
            else:
                path = table + _parts(match["key"])
            yield start, statement, path


def _split(text: str) -> Iterator[tuple[int, str]]:
    """Yields the offset and text of every part that ends with a line outside of brackets and strings."""
    start = depth = 0
    for token in _TOKEN.finditer(text):
        match token[0]:
            case "[" | "{":
                depth += 1
            case "]" | "}":
                depth -= 1
            case "\n" if depth == 0:
                yield start, text[start : token.start()]
                start = token.end()
    yield start, text[start:]


def _parts(key: str) -> list[str]:
    """Returns the parts of a key: `a."b.c"` has the parts `a` and `b.c`."""
    value: Any = tomllib.loads(f"{key} = 0")
    parts = []
    while isinstance(value, dict):
        ((name, value),) = value.items()
        parts.append(name)
    return parts
