"""Shows the progress of a pull or an installation: as a bar on a terminal, elsewhere as a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

from modelrunner.cli.output import is_terminal, note, shown
from modelrunner.errors import ModelRunnerError
from modelrunner.units import format_bytes, format_duration
from modelrunner.wire import Progress

_BETWEEN_LINES = 5.0  # seconds
_FEWEST_BYTES = 1000  # a smaller total counts steps


class _ProgressDisplay(Protocol):
    def show(self, line: Progress) -> None: ...


Displays = Callable[[str], _ProgressDisplay]
"""Makes a further line or bar of the same display, with its first text. Threads may call it."""


def follow(lines: Iterable[Progress], work: str, about: str = "", displays: Displays | None = None) -> Progress:
    """Shows every line on stderr and returns the last one, which reports success. `about` is shown until the first line
    comes; `displays` are shared with other work. Raises a `ModelRunnerError` that names the `work` if the lines end
    without a result."""
    last = None
    with shared_displays() if displays is None else nullcontext(displays) as shown_by:
        view = shown_by(about)
        for line in lines:
            last = line
            if line.type == "warning":
                note(f"warning: {line.message}")
            else:
                view.show(line)
    if last is None or last.type != "success":
        raise ModelRunnerError(f"{work} ended without a result; see `modelrunner logs`")
    return last


def amount(line: Progress) -> str:
    """Returns `12MiB of 92MiB, 3.1MiB/s, 26s left`, without the parts that are unknown."""
    if not line.total:
        return format_bytes(line.current) if line.current else ""
    if line.total < _FEWEST_BYTES:
        return f"step {line.current} of {line.total}"
    parts = [f"{format_bytes(line.current)} of {format_bytes(line.total)}"]
    if line.rate > 0:
        parts.append(f"{format_bytes(line.rate)}/s")
        if line.current < line.total:
            parts.append(f"{format_duration(round((line.total - line.current) / line.rate))} left")
    return ", ".join(parts)


def title(line: Progress) -> str:
    """Returns the phase and its subject, on one line."""
    return " ".join(shown(line.message or line.phase, sys.stderr).split())


class _LineDisplay:
    """Shows progress in logs and pipes: prints each new phase, and a line every few seconds."""

    def __init__(self) -> None:
        self._phase = ""
        self._next = 0.0

    def show(self, line: Progress) -> None:
        phase, now = line.phase or line.message, time.monotonic()
        if phase != self._phase or now >= self._next or line.type == "success":
            self._phase, self._next = phase, now + _BETWEEN_LINES
            note(": ".join(filter(None, (title(line), amount(line)))))


@contextmanager
def shared_displays() -> Iterator[Displays]:
    """Yields the displays of work that runs at the same time."""
    if not is_terminal(sys.stderr):
        yield lambda about: _LineDisplay()
        return
    with _bars() as displays:
        yield displays


@contextmanager
def _bars() -> Iterator[Displays]:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Bars
    from rich.table import Column

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[amount]}", markup=False, table_column=Column(no_wrap=True)),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True, expand=True) as bars:

        class Bar:
            def __init__(self, about: str) -> None:
                self._task = bars.add_task(about, total=None, amount="")

            def show(self, line: Progress) -> None:
                bars.update(
                    self._task,
                    description=title(line),
                    total=line.total or None,
                    completed=line.current,
                    amount=amount(line),
                )

        yield Bar
