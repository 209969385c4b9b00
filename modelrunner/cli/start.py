"""Starts the daemon for a command that needs it. Two commands that do so at once get one daemon."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modelrunner import api
from modelrunner.cli.output import note
from modelrunner.client import Client
from modelrunner.errors import AnswerBroken, DaemonUnreachable
from modelrunner.locations import Locations, private_directory

START_LIMIT = 60.0  # seconds until a daemon must answer; it looks through its store first
_POLL = 0.02


def ensure_running(locations: Locations, client: Client) -> None:
    """Returns once the daemon of `locations` answers. Raises `DaemonUnreachable` with its last words if it does not."""
    if _answers(client):
        return
    with _turn(private_directory(locations.runtime) / "start.lock"):
        if not _answers(client):  # nobody else started it while we waited for our turn
            _start(locations, client)


def _answers(client: Client) -> bool:
    """Whether a daemon is there to stay. One that is shutting down is waited for: another takes its place."""
    end = time.monotonic() + START_LIMIT
    while time.monotonic() < end:
        try:
            health = client.call("GET", "/health", api.Health)
        except (DaemonUnreachable, AnswerBroken):
            return False
        if health.status != "shutting_down":
            return True
        time.sleep(_POLL)
    raise DaemonUnreachable(f"the daemon at {client.host} is shutting down and does not end; see `modelrunner logs`")


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _start(locations: Locations, client: Client) -> None:
    log = locations.data / "logs" / "daemon.log"
    locations.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as output:
        begin = output.tell()
        daemon = subprocess.Popen(
            [sys.executable, "-P", "-m", "modelrunner", "serve"],  # -P: the folder we happen to be in is nobody's code
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=locations.data,
            start_new_session=True,
        )
    try:
        note("starting the daemon")
        _wait(daemon, client, log, begin)
    except BaseException:
        daemon.terminate()
        daemon.wait()
        raise


def _wait(daemon: subprocess.Popen[bytes], client: Client, log: Path, begin: int) -> None:
    end = time.monotonic() + START_LIMIT
    while not _answers(client):
        if daemon.poll() is not None:
            if _answers(client):  # it found another one, started by hand a moment ago, in its place
                return
            raise DaemonUnreachable(f"the daemon did not start: {_last_words(log, begin)}; all of it is in {log}")
        if time.monotonic() > end:
            raise DaemonUnreachable(f"the daemon did not answer within {START_LIMIT:.0f} s; see {log}")
        time.sleep(_POLL)


def _last_words(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(max(begin, os.fstat(file.fileno()).st_size - 4096))
        lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].strip().removeprefix("error: ") if lines else "it said nothing"
