"""A person at a pseudo-terminal."""

import array
import fcntl
import os
import select
import termios

from tests.waiting import HUNG


class Terminal:
    """The person's side of the terminal `descriptor`; `program_side` is the other one."""

    def __init__(self, descriptor: int, program_side: int = -1) -> None:
        self._descriptor = descriptor
        self._program_side = program_side
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def type_a_line(self, text: str) -> None:
        """Types a line that the program does not read yet, and returns once it could: the kernel takes its time."""
        self.type(text + "\r")
        waiting = array.array("i", [0])
        while waiting[0] < len(text):
            fcntl.ioctl(self._program_side, termios.FIONREAD, waiting)

    def rest(self) -> str:
        """What has come after the text of the last call of `wait_for`; for a program that has ended."""
        while select.select([self._descriptor], [], [], 0)[0]:
            self._seen += os.read(self._descriptor, 4096).decode("utf-8", "replace")
        return self._seen

    def wait_for(self, text: str, limit: float = HUNG) -> None:
        """Reads until `text` comes, after the text of the last call. Fails after `limit` silent seconds."""
        while text not in self._seen:
            ready, _, _ = select.select([self._descriptor], [], [], limit)
            assert ready, f"{text!r} did not come, only {self._seen!r}"
            came = os.read(self._descriptor, 4096).decode("utf-8", "replace")
            if "\x1b[6n" in came:  # it asks where the cursor is, as it would ask any terminal
                self.type("\x1b[1;1R")
            self._seen += came
        self._seen = self._seen.partition(text)[2]
