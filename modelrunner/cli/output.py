"""Prints text made safe for a terminal, tables, JSON, notes and errors.

A terminal obeys control characters, and names, logs and answers come from elsewhere: such characters are shown as text,
never sent. Only whole texts (an answer, a log, a template, JSON) go into a pipe or a file unchanged.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

# Characters that control a terminal: C0 except newline and tab, DEL, C1, and the marks that turn the direction of text.
_ACTED_UPON = [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN: dict[int, str | None] = {c: f"\\x{c:02x}" if c < 0x100 else f"\\u{c:04x}" for c in _ACTED_UPON}
_SHOWN |= {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): None}

_NARROWEST = 8  # columns of the narrowest cell
_ERROR = "error:"

DIM, BOLD, RED, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[0m"


def clean(text: str) -> str:
    """Replaces the characters that control a terminal: ESC becomes `\\x1b`, carriage returns vanish, newline and tab
    stay."""
    return text.translate(_SHOWN)


def is_terminal(stream: TextIO) -> bool:
    return not stream.closed and stream.isatty()


def shown(text: str, stream: TextIO) -> str:
    """Returns the form of `text` that is safe for `stream`."""
    return clean(text) if is_terminal(stream) else text


def styled(text: str, style: str, stream: TextIO) -> str:
    """Returns `text` in `style` if `stream` is a terminal that may have colour (https://no-color.org)."""
    return f"{style}{text}{PLAIN}" if has_styles(stream) else text


def has_styles(stream: TextIO) -> bool:
    return moves_cursor(stream) and not os.environ.get("NO_COLOR")


def moves_cursor(stream: TextIO) -> bool:
    """Returns whether a written line can be replaced. NO_COLOR forbids colour only (https://no-color.org)."""
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def width() -> int | None:
    """Returns the columns of stdout's terminal; None for a pipe or a file, where a line may have any length."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def wrapped(text: str, stream: TextIO, indent: int = 0) -> str:
    """Returns the text in lines that break between words, if `stream` is a terminal; those that are added begin with so
    many blanks where there is room. Longer words are left to the terminal."""
    if not is_terminal(stream):
        return text
    try:
        columns = int(os.environ.get("COLUMNS") or os.get_terminal_size(stream.fileno()).columns)
    except (ValueError, OSError):
        return text
    from textwrap import fill

    room = max(_NARROWEST, columns - 1)  # terminals differ in the last column
    begin = " " * (indent if 2 * indent <= room else 2)
    form: dict[str, Any] = {"subsequent_indent": begin, "break_long_words": False, "break_on_hyphens": False}
    return "\n".join(fill(line, room, **form) for line in text.split("\n"))


def say(text: str, *, flush: bool = False) -> None:
    """Prints a line of the result. `flush` sends it at once, because the next line may come much later."""
    _print(shown(text, sys.stdout), sys.stdout, flush=flush)


def done(text: str, as_json: bool, **fields: object) -> None:
    """Prints what a command did, in a line of text, or with `as_json` as a line of JSON with the `fields`."""
    if as_json:
        import msgspec

        text = msgspec.json.encode(fields).decode()
    say(text, flush=True)


def heading(text: str, *, first: bool = True) -> None:
    """Prints a line above a part of the result, after an empty line unless it is the `first`."""
    line = styled(f"[{clean(text)}]", BOLD, sys.stdout)
    print(line if first else f"\n{line}", flush=True)


def clear() -> None:
    """Empties the screen, if stdout is a terminal, for a table that is shown again as it changes."""
    if moves_cursor(sys.stdout):
        print("\x1b[H\x1b[2J", end="", flush=True)


def note(text: str) -> None:
    """Prints a line about progress."""
    _print(wrapped(clean(text), sys.stderr), sys.stderr)


def report(message: str, *, retry_after: float | None = None) -> None:
    """Prints an error: on one line, unless it is longer than the terminal's."""
    again = f"; try again in {retry_after:.0f} s" if retry_after else ""
    line = wrapped(f"{_ERROR} {_on_one_line(message)}{again}", sys.stderr)
    _print(styled(_ERROR, RED, sys.stderr) + line.removeprefix(_ERROR), sys.stderr)


def _print(line: str, file: TextIO, *, flush: bool = True) -> None:
    """Prints a line in one write, which the lines of other threads cannot tear."""
    print(f"{line}\n", end="", file=file, flush=flush)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, expendable: Sequence[str] = ()) -> None:
    """Prints columns as wide as their widest cell. If the terminal is too narrow, the columns named in `expendable` are
    left out, the first one first, and then the widest cells are cut."""
    cells = [[_on_one_line(cell) for cell in row] for row in rows]
    columns = [list(column) for column in zip(headings, *cells, strict=True)]
    limit = width()
    for name in expendable:
        if limit is not None and _total(columns) > limit:
            columns = [column for column in columns if column[0] != name]
    while limit is not None and _total(columns) > limit and (widest := max(_widths(columns))) > _NARROWEST:
        over = _total(columns) - limit
        column = columns[_widths(columns).index(widest)]
        column[1:] = [_cut(cell, max(_NARROWEST, len(column[0]), widest - over)) for cell in column[1:]]
        if max(map(len, column)) == widest:
            break
    widths = _widths(columns)
    for number, row in enumerate(zip(*columns, strict=True)):
        line = "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        print(styled(line, BOLD, sys.stdout) if number == 0 else line)


def _widths(columns: Iterable[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in columns]


def _total(columns: Sequence[Sequence[str]]) -> int:
    return sum(_widths(columns)) + 2 * (len(columns) - 1)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def fields(pairs: Iterable[tuple[str, str]]) -> None:
    """Prints names and values, one pair a line, or in lines as long as the terminal's. Blanks that align the parts of a
    name stay."""
    known = [(" ".join(clean(name).splitlines()), _on_one_line(value)) for name, value in pairs]
    width = max((len(name) for name, _ in known), default=0)
    for name, value in known:
        print(wrapped(f"{name.ljust(width)}  {value}".rstrip(), sys.stdout, width + 2))


def _on_one_line(text: str) -> str:
    return " ".join(clean(text).split())


def json(text: bytes) -> None:
    """Prints the daemon's own JSON, indented."""
    import msgspec

    print(shown(msgspec.json.format(text, indent=2).decode(), sys.stdout))
