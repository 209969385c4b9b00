"""Where vLLM's processes put their sockets, temporary files and shared memory: none of them removes its own when it is
killed, so each run gets names of its own, and they go with it."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Run:
    """`folder` is for files; what the engine makes in shared memory begins with `shared_prefix`."""

    folder: Path
    shared_prefix: str


class Scratch:
    """Of one data directory, `owner` being a path in it."""

    def __init__(self, owner: Path, shared_memory: Path = _SHARED_MEMORY) -> None:
        digest = hashlib.sha256(os.fsencode(owner.absolute())).hexdigest()[:12]
        self._name = f"modelrunner-{digest}-"
        self._shared_memory = shared_memory

    @contextmanager
    def run(self) -> Iterator[Run]:
        """To be left when all processes of the run are gone."""
        # Short, since the path of a socket inside must not exceed 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix=self._name))
        try:
            yield Run(folder, folder.name)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self._forget_shared(folder.name)

    def sweep(self) -> None:
        """Removes what the runs of a daemon that was killed have left; only while none of this one's is under way."""
        for folder in Path(tempfile.gettempdir()).glob(f"{self._name}*"):
            if folder.lstat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
        self._forget_shared(self._name)

    def owns(self, name: str) -> bool:
        """Is that the name of a file that a run of this data directory made?"""
        return name.removeprefix("sem.").startswith(self._name)

    def _forget_shared(self, prefix: str) -> None:
        """Segments, and semaphores, whose files have names that begin with `sem.`."""
        for pattern in (f"{prefix}*", f"sem.{prefix}*"):
            for file in self._shared_memory.glob(pattern):
                file.unlink(missing_ok=True)
