"""Starts the daemon for a command that needs it. Two commands that start it at the same time get one daemon."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from modelrunner import __version__, durable, wire
from modelrunner.cli.client import HttpClient
from modelrunner.cli.output import note
from modelrunner.config import lockfile
from modelrunner.config.locations import Locations
from modelrunner.errors import AnswerBroken, DaemonUnreachable, StorageFailed

START_LIMIT = 60.0  # seconds until a daemon must answer; it checks its store first
_COMES_BACK = 3.0  # seconds; the daemon replaces a removed socket within one
_POLL = 0.02

Connect = Callable[[str], HttpClient]


def ensure_running(locations: Locations, connect: Connect) -> HttpClient:
    """Returns a client of the daemon of `locations`, which answers. Raises `DaemonUnreachable` with the end of its log
    if it does not start, `StorageFailed` if its data directory cannot be used."""
    client = _living(locations, connect)
    if client is None:
        with _turn(locations.data):  # another command may have started it meanwhile
            client = _living(locations, connect) or _start(locations, connect)
    return client


def address(locations: Locations) -> str:
    """Returns the address of the daemon that holds the data directory, or the one where a daemon would listen. A
    removed socket comes back within a moment."""
    end = time.monotonic() + _COMES_BACK
    while holder := lockfile.holder(locations.data):
        if os.path.exists(holder.socket):
            return f"unix://{holder.socket}"
        if time.monotonic() > end:
            return holder.listen or f"unix://{holder.socket}"
        time.sleep(_POLL)
    return locations.host


def _living(locations: Locations, connect: Connect) -> HttpClient | None:
    """Returns a client of a daemon that is not shutting down, or None. Waits for a daemon that is: another one takes
    its place."""
    end = time.monotonic() + START_LIMIT
    while time.monotonic() < end:
        client = connect(address(locations))
        try:
            health = client.call("GET", "/health", wire.Health)
        except (DaemonUnreachable, AnswerBroken):
            return None
        if health.status != "shutting_down":
            if health.version != __version__:
                note(
                    f"the daemon that runs is version {health.version}, this command {__version__}: `modelrunner "
                    "shutdown` ends it after its last answers, and the next command starts the new one"
                )
            return client
        time.sleep(_POLL)
    raise DaemonUnreachable(f"the daemon at {client.host} is shutting down and does not end; see `modelrunner logs`")


@contextmanager
def _turn(data: Path) -> Iterator[None]:
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(data / "start.lock", "w", opener=durable.open_ours) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise StorageFailed(
            f"the data directory {data} cannot be used: {error.strerror} ({error.filename}); make it writable, or set "
            "another with MODELRUNNER_DATA_DIR"
        ) from error


def _start(locations: Locations, connect: Connect) -> HttpClient:
    log = locations.data / "logs" / "daemon.log"
    log.parent.mkdir(exist_ok=True)
    with open(log, "ab", opener=durable.open_ours) as output:
        begin = output.tell()
        daemon = subprocess.Popen(
            [sys.executable, "-P", "-m", "modelrunner", "serve"],  # -P: ignores code in the current folder
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=locations.data,
            start_new_session=True,
        )
    try:
        note("starting the daemon")
        return _wait(daemon, lambda: _living(locations, connect), log, begin)
    except BaseException:
        daemon.terminate()
        daemon.wait()
        raise


def _wait(
    daemon: subprocess.Popen[bytes], living: Callable[[], HttpClient | None], log: Path, begin: int
) -> HttpClient:
    end = time.monotonic() + START_LIMIT
    while not (client := living()):
        if daemon.poll() is not None:
            if client := living():  # a daemon that was started by hand a moment ago runs instead
                return client
            raise DaemonUnreachable(f"the daemon did not start: {_last_words(log, begin)}; all of it is in {log}")
        if time.monotonic() > end:
            raise DaemonUnreachable(f"the daemon did not answer within {START_LIMIT:.0f} s; see {log}")
        time.sleep(_POLL)
    return client


def _last_words(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(max(begin, os.fstat(file.fileno()).st_size - 4096))
        lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].strip().removeprefix("error: ") if lines else "its log is empty"
