"""Where in the text of a TOML file a key stands: what tomllib forgets, and a person who mistyped one wants to know."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

_QUOTED_OR_MARK = re.compile(r"\"[^\"]*\"|'[^']*'|[.=]")


def place(text: str, wanted: Sequence[str]) -> tuple[int, int] | None:
    """Line and column, both from 1, of the key `wanted`, or else of the innermost table around it that is there; None
    where not even its first part is. `text` is well-formed."""
    best, deepest = None, 0
    for line, statement, path in _statements(text):
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(path, wanted, strict=False))))
        # The rest of the key may stand inside this one's value, an inline table.
        longest = len(wanted) if shared == len(path) else shared
        for depth in range(longest, max(deepest, 0), -1):
            offset = _find(statement, wanted[depth - 1])
            if offset is not None and depth >= shared:
                best, deepest = _position(line, statement, offset), depth
                break
    return best


def _statements(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """(line, text, path of keys) of every table's head and every assignment: the fewest lines that parse alone."""
    lines, table, at = text.split("\n"), list[str](), 0
    while at < len(lines):
        end, found = at, None
        while found is None and end < len(lines):
            end += 1
            found = _parsed("\n".join(lines[at:end]))
        statement = "\n".join(lines[at:end])
        if found:
            if statement.lstrip().startswith("["):
                table = path = _path(found, len(statement))
            else:
                path = table + _path(found, _parts_of_key(statement))
            yield at + 1, statement, path
        at = end


def _parsed(statement: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(statement)
    except tomllib.TOMLDecodeError:
        return None


def _path(value: Any, depth: int) -> list[str]:
    """Down the only key of each table, at most `depth` keys; an array of tables (`[[name]]`) holds one."""
    path: list[str] = []
    while value and len(path) < depth and isinstance(value, dict | list):
        if isinstance(value, list):
            value = value[0]
        else:
            ((name, value),) = value.items()
            path.append(name)
    return path


def _parts_of_key(statement: str) -> int:
    """`a."b.c" = 1` has two."""
    dots = 0
    for mark in _QUOTED_OR_MARK.finditer(statement):
        if mark[0] == "=":
            break
        dots += mark[0] == "."
    return dots + 1


def _find(statement: str, name: str) -> int | None:
    found = re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", statement)
    return found and found.start()


def _position(line: int, statement: str, offset: int) -> tuple[int, int]:
    before = statement[:offset]
    return line + before.count("\n"), offset - before.rfind("\n")
