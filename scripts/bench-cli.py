"""Wall time of starting the command line, next to what Python and click alone take.

    python scripts/bench-cli.py [ROUNDS]

Runs `python -c "import click"`, `modelrunner --help` and `modelrunner ps` in turn, so that a busy machine slows all
three, and prints the medians and their ratios. `ps` needs a daemon: the one that MODELRUNNER_HOST or
MODELRUNNER_DATA_DIR names. Targets: 2 for --help, 4 for ps.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

BASE = "import click"
COMMANDS = {
    BASE: [sys.executable, "-c", "import click"],
    "modelrunner --help": [str(Path(sys.executable).with_name("modelrunner")), "--help"],
    "modelrunner ps": [str(Path(sys.executable).with_name("modelrunner")), "ps"],
}


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds + 1):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(measured[1:]) for name, measured in times.items()}  # the first fills caches
    for name, median in medians.items():
        print(f"{name:<20}{median * 1000:8.1f} ms{median / medians[BASE]:8.2f}")


if __name__ == "__main__":
    main()
