"""The lock of a data directory: the process that holds it, and the addresses of that daemon. Every command reads it
first, so the module is light."""

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "daemon.lock"


@dataclass(frozen=True, slots=True)
class Holder:
    """A daemon: its process ID, the path of its Unix socket, and its TCP address (`http://127.0.0.1:12434`, or "")."""

    pid: int
    socket: str
    listen: str = ""


def holder(data: Path) -> Holder | None:
    """Returns the daemon that holds the data directory `data`; None if there is none, or if it has just begun."""
    try:
        lock = os.open(data / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return read(lock)
    finally:
        os.close(lock)
    return None


def read(lock: int) -> Holder | None:
    """Returns the content of the open lock file, None if it is empty."""
    try:
        holder = json.loads(os.pread(lock, 4096, 0))
        return Holder(int(holder["pid"]), str(holder["socket"]), str(holder["listen"]))
    except (ValueError, KeyError, TypeError):  # not written yet, or cleared
        return None


def write(lock: int, holder: Holder) -> None:
    text = json.dumps(asdict(holder)).encode()
    os.pwrite(lock, text, 0)
    os.ftruncate(lock, len(text))
