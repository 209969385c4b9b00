"""A program in tmux, a real terminal emulator: what its screen shows."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.waiting import HUNG

MODELRUNNER = (sys.executable, "-m", "modelrunner")
_POLL = 0.02
# Ctrl-C is a signal for both: the shell outlives it, to keep the program's exit code.
_KEEP_CODE = 'trap : INT; "$@"; echo $? > "$0.new"; mv "$0.new" "$0"'


class Screen:
    """The screen of one program, in a tmux server of its own."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._code = socket.with_name("exit-code")

    def tmux(self, *arguments: str, text: str = "") -> str:
        command = ["tmux", "-f", os.devnull, "-S", str(self._socket), *arguments]
        # Readline, which pytest loads, sets these two for children, such as the workers of a parallel run.
        own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        done = subprocess.run(command, input=text, env=own, capture_output=True, text=True, check=True, timeout=HUNG)
        return done.stdout

    def type(self, line: str) -> None:
        """Types the line and Enter."""
        self.tmux("send-keys", "-l", line)
        self.press("Enter")

    def press(self, *keys: str) -> None:
        """Presses keys by tmux's names, such as C-c."""
        self.tmux("send-keys", *keys)

    def paste(self, text: str) -> None:
        """Pastes, between the marks of bracketed paste if the program asked for them."""
        self.tmux("load-buffer", "-", text=text)
        self.tmux("paste-buffer", "-p")

    def shows(self, *, styles: bool = False) -> str:
        """What is on the screen and above it, without trailing blanks; with `styles`, with their escape sequences."""
        return self.tmux("capture-pane", "-p", "-S", "-", *(["-e"] if styles else []))

    def wait_for(self, pattern: str, *, times: int = 1) -> str:
        """Returns what is shown once the pattern is on the screen so many times."""
        end = time.monotonic() + HUNG
        while len(re.findall(pattern, seen := self.shows(), re.MULTILINE)) < times:
            if time.monotonic() > end:
                raise AssertionError(f"{pattern!r} did not come, only\n{seen}")
            time.sleep(_POLL)
        return seen

    def resize(self, columns: int) -> None:
        """Changes the width, and returns once the program could know of it: tmux tells it a moment later."""
        self.tmux("resize-window", "-x", str(columns))
        with open(self._pane("pane_tty")) as side:
            end = time.monotonic() + HUNG
            while os.get_terminal_size(side.fileno()).columns != columns:
                if time.monotonic() > end:
                    raise AssertionError(f"it has not {columns} columns")
                time.sleep(_POLL)

    def ended(self) -> int:
        """Waits for the program's end and returns its exit code. tmux 3.3 may lose its own news of that."""
        end = time.monotonic() + HUNG
        while not self._code.exists():
            if time.monotonic() > end:
                raise AssertionError(f"it does not end: {self.shows()}")
            time.sleep(_POLL)
        return int(self._code.read_text())

    def start(self, folder: Path, command: Sequence[str]) -> None:
        self._code.unlink(missing_ok=True)
        self.tmux("respawn-pane", "-k", "-c", str(folder), "sh", "-c", _KEEP_CODE, str(self._code), *command)

    def close(self) -> None:
        """Ends the server and the program, and reaps what becomes a child of the tests."""
        server, pane = psutil.Process(int(self._pane("pid"))), int(self._pane("pane_pid"))
        programs: list[psutil.Process] = []  # an interactive shell has a process group of its own
        with suppress(psutil.NoSuchProcess):
            programs = [psutil.Process(pane), *psutil.Process(pane).children(recursive=True)]
        with suppress(ProcessLookupError):
            os.killpg(pane, signal.SIGKILL)
        for program in programs:
            with suppress(psutil.NoSuchProcess):
                program.kill()
        self.tmux("kill-server")
        server.wait(HUNG)
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-pane, 0)
        for program in programs:
            with suppress(ChildProcessError):
                os.waitpid(program.pid, 0)

    def _pane(self, value: str) -> str:
        return self.tmux("display-message", "-p", f"#{{{value}}}").strip()


@contextmanager
def screen(
    folder: Path, *arguments: str, program: Sequence[str] = MODELRUNNER, columns: int = 80, rows: int = 24
) -> Iterator[Screen]:
    """Runs `modelrunner ARGUMENTS`, or another program, with this process's environment."""
    found = Screen(folder / "tmux.sock")
    size = ["-x", str(columns), "-y", str(rows)]
    # The server's first session holds it until the option is set; the program's window remains after its end.
    found.tmux("new-session", "-d", *size, "sleep infinity", ";", "set-option", "-g", "remain-on-exit", "on")
    try:
        found.start(folder, [*program, *arguments])
        yield found
    finally:
        found.close()
