"""Renders Markdown on the terminal while its text comes."""

import shutil
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.syntax import Syntax
from rich.text import Text

_UP = "\x1b[%dA\r\x1b[J"  # ECMA-48: the cursor up by lines, and the rest of the screen erased
_SHARE = 4
"""Rendering takes at most one part in this many of the time: a long block is painted less often than its words come."""


class _Heading(Heading):
    LEVEL_ALIGN: ClassVar = {}


class _CodeBlock(CodeBlock):
    """A code block without an indent or a background, so that the code can be copied from the terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(str(self.text).rstrip(), self.lexer_name, theme="ansi_dark", word_wrap=True)


class _Markdown(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _CodeBlock,
        "code_block": _CodeBlock,
    }


class MarkdownView:
    """Shows text that comes in pieces as Markdown. The last block (a paragraph, a list, a table, a code block) may
    still change and is painted again; the blocks before it are final (https://spec.commonmark.org/0.31.2, appendix,
    "Phase 1"). HTML is shown as text. The view begins at the start of a line, and leaves the cursor at one."""

    def __init__(self, write: Callable[[str], object]) -> None:
        """`write` writes to the terminal. The view is used in the main thread, also by a timer (SIGALRM) there, which
        shows text that came too soon after other text."""
        self._columns = 0
        self._console = Console(file=sys.stdout)
        self._parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
        self._write = write
        self._open = ""
        self._shown: list[str] = []
        self._separated = False
        self._next = 0.0
        self._at_work = False
        self._before = signal.signal(signal.SIGALRM, self._late)

    def feed(self, text: str) -> None:
        """Takes text without control characters."""
        self._at_work = True
        self._open += text
        wait = self._next - time.monotonic()
        if wait > 0:
            signal.setitimer(signal.ITIMER_REAL, wait)
        else:
            self._render()
        self._at_work = False

    def finish(self) -> None:
        """Shows the end of the text."""
        self._at_work = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
        self._render()

    def _late(self, number: int, frame: object) -> None:
        if not self._at_work:
            self._render()

    def _render(self) -> None:
        begin = time.monotonic()
        lines = self._open.splitlines(keepends=True)
        tokens = self._parser.parse(self._open)
        starts = [token.map[0] for token in tokens if token.level == 0 and token.map and token.nesting >= 0]
        for first, after in pairwise(starts):
            self._paint("".join(lines[first:after]))
            self._shown, self._separated = [], True
        if starts:
            self._open = "".join(lines[starts[-1] :])
            self._paint(self._open)
        end = time.monotonic()
        self._next = end + (end - begin) * (_SHARE - 1)

    def _paint(self, block: str) -> None:
        """Changes the shown lines of the block to its new ones. Lines that have left the screen stay. A terminal that
        became narrower has broken the lines that are too long for it."""
        columns, rows = shutil.get_terminal_size()
        resized = columns != self._columns
        self._columns = columns
        self._console.width = max(8, columns - 1)  # terminals differ in the last column
        markdown = _Markdown("", hyperlinks=False)
        markdown.parsed = self._parser.parse(block)
        with self._console.capture() as captured:
            self._console.print(markdown)
        lines = [line.rstrip() for line in captured.get().split("\n")]
        while lines and not lines[-1]:
            lines.pop()
        while lines and not lines[0]:
            lines.pop(0)
        if self._separated and lines:
            lines.insert(0, "")
        same = next((i for i, (old, new) in enumerate(zip(self._shown, lines, strict=False)) if old != new), None)
        if same is None:
            same = min(len(self._shown), len(lines))
        heights = [_height(line, columns) if resized else 1 for line in self._shown]
        while same < len(self._shown) and sum(heights[same:]) >= rows:
            same += 1
        back = sum(heights[same:])
        self._shown = lines
        self._write((_UP % back if back else "") + "".join(f"{line}\n" for line in lines[same:]))


def _height(line: str, columns: int) -> int:
    """Returns the rows that a shown line takes."""
    return max(1, -(-cell_len(Text.from_ansi(line).plain) // columns))
