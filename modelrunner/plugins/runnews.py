"""Passes the news of a run from the backend's thread to the caller's event loop."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import psutil

from modelrunner.processes.processtree import process_tree
from modelrunner.sandbox import Sandbox
from modelrunner.types import ProcessObserver

KEPT_LINES = 50
"""Lines of a log that wait for the caller's loop; older ones are dropped."""


class RunRelay:
    """The observer of one run on the backend's thread. It passes the news to the caller's loop in bundles, so that a
    flood of log lines costs the caller little. `announced` gets each line on the thread, before the caller does."""

    def __init__(self, announced: Callable[[str], None], observer: ProcessObserver | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._announced = announced
        self._observer = observer
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._is_due = False
        self._pid: int | None = None

    def started(self, pid: int, sandbox: Sandbox) -> None:
        self._pid = pid
        if self._observer is not None:
            self._tell(self._observer.started, pid, sandbox)

    def output(self, line: str) -> None:
        self._announced(line)
        self._lines.append(line)
        if not self._is_due:
            self._is_due = True
            self._tell(self._pass_on)

    def kill(self) -> None:
        """Kills the engine without its backend."""
        if self._pid is not None:
            for process in process_tree(self._pid):
                with suppress(psutil.Error):
                    process.kill()

    def _pass_on(self) -> None:
        self._is_due = False
        while self._observer is not None and self._lines:
            self._observer.output(self._lines.popleft())

    def _tell(self, function: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed
            self._loop.call_soon_threadsafe(function, *args)
