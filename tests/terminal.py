"""A person at a pseudo-terminal."""

import os
import select

from tests.waiting import HUNG


class Terminal:
    """The person's side of the terminal `descriptor`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

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
