"""Wall time of starting the command line, next to what Python and click alone take.

    python scripts/bench-cli.py [ROUNDS]

Runs `python -c "import click"`, `modelrunner --help` and `modelrunner ps` in turn, so that a busy machine slows all
three, and prints the medians and their ratios. `ps` asks the daemon that MODELRUNNER_HOST names, else one that is
started for this in a folder of its own. Targets: 2 for --help, 4 for ps.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BASE = "import click"
PROGRAM = str(Path(sys.executable).with_name("modelrunner"))
COMMANDS = {
    BASE: [sys.executable, "-c", "import click"],
    "modelrunner --help": [PROGRAM, "--help"],
    "modelrunner ps": [PROGRAM, "ps"],
}


@contextmanager
def daemon() -> Iterator[None]:
    if "MODELRUNNER_HOST" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in ("DATA_DIR", "CACHE_DIR", "RUNTIME_DIR"):
            os.environ[f"MODELRUNNER_{name}"] = f"{folder}/{name.lower()}"
        os.environ |= {"MODELRUNNER_LISTEN": "", "MODELRUNNER_CONFIG": f"{folder}/config.toml"}
        subprocess.run([PROGRAM, "list"], check=True, capture_output=True)
        try:
            yield
        finally:
            subprocess.run([PROGRAM, "shutdown"], check=True, capture_output=True)


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with daemon():
        for _ in range(rounds + 1):
            for name, command in COMMANDS.items():
                times[name].append(seconds(command))
    medians = {name: statistics.median(measured[1:]) for name, measured in times.items()}  # the first fills caches
    for name, median in medians.items():
        print(f"{name:<20}{median * 1000:8.1f} ms{median / medians[BASE]:8.2f}")


if __name__ == "__main__":
    main()
