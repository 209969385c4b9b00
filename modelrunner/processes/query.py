"""Short questions to programs that may hang, such as those that ask a driver."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

hung: dict[tuple[str, ...], subprocess.Popen[str]] = {}
"""The programs that a broken driver does not let end, by their commands."""


def output_of(argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, timeout: float = 10.0) -> str:
    """Runs a program to its end, at most `timeout` seconds, and returns what it printed on both streams. `env` is its
    environment, by default ours. Raises `TimeoutError` if it does not end; while it cannot even be killed, it is not
    started again. Raises `OSError` if it cannot be started or fails."""
    command = tuple(map(str, argv))
    if command in hung:
        if hung[command].poll() is None:
            raise TimeoutError(f"{Path(command[0]).name} hangs, and cannot be ended: the driver does not answer")
        del hung[command]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=None if env is None else dict(env),
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        hung[command] = process
        raise TimeoutError(f"{Path(command[0]).name} did not answer within {timeout:g} s") from None
    if process.returncode:
        last = (output.strip().splitlines() or [""])[-1]
        raise OSError(f"{Path(command[0]).name} failed with status {process.returncode}: {last[:200]}")
    return output
