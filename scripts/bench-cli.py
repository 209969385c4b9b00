"""Wall time of starting the command line, next to what Python and click alone take.

    python scripts/bench-cli.py [--rounds N] [--before FOLDER]

Runs `python -c "import click"`, `modelrunner --help` and `modelrunner ps` in turn, so that a busy machine slows all
three, and prints the medians and their ratios. `ps` asks the daemon that MODELRUNNER_HOST names, else one that is
started for this in a folder of its own. Targets: 2 for --help, 4 for ps.

With --before it compares daemons instead: this one and that of an older checkout, each with a .venv, in turn. Of each
it prints the medians of the start until /health answers (wall and processor time), of `ps`, and of the wake-ups and the
processor time of ten idle seconds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

IDLE = 10  # seconds
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


def of_a_daemon(tree: Path) -> dict[str, float]:
    """Returns the figures of one daemon of the checkout, from its start to its end."""
    program = str(tree / ".venv/bin/modelrunner")
    with tempfile.TemporaryDirectory() as folder:
        places = {
            f"MODELRUNNER_{name}": f"{folder}/{name.lower()}" for name in ("DATA_DIR", "CACHE_DIR", "RUNTIME_DIR")
        }
        places |= {"MODELRUNNER_LISTEN": "", "MODELRUNNER_CONFIG": f"{folder}/config.toml"}
        environment, begin = os.environ | places, time.perf_counter()
        transport = httpx.HTTPTransport(uds=f"{folder}/runtime_dir/modelrunner.sock")
        daemon = subprocess.Popen([program, "serve"], env=environment, cwd=folder, stderr=subprocess.DEVNULL)
        try:
            with httpx.Client(transport=transport, base_url="http://localhost") as client:
                while not answers(client):
                    time.sleep(0.002)
            found = {"start, ms": (time.perf_counter() - begin) * 1000}
            process = psutil.Process(daemon.pid)
            found["start, processor ms"] = spent(process) * 1000
            time.sleep(5)  # what a start leaves for later is no idleness
            switches, before = woken(daemon.pid), spent(process)
            time.sleep(IDLE)
            found["wake-ups a second, idle"] = (woken(daemon.pid) - switches) / IDLE
            found["processor ms a second, idle"] = (spent(process) - before) / IDLE * 1000
            begin = time.perf_counter()
            subprocess.run([program, "ps"], check=True, env=environment, cwd=folder, stdout=subprocess.DEVNULL)
            return found | {"ps, ms": (time.perf_counter() - begin) * 1000}
        finally:
            daemon.terminate()
            daemon.wait()


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def woken(pid: int) -> int:
    """Returns how often the threads of a process gave up the processor to wait, each of which is a wake-up."""
    files = Path(f"/proc/{pid}/task").glob("*/status")
    lines = (line for file in files for line in file.read_text().splitlines())
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def compare(before: Path, rounds: int) -> None:
    trees = {"before": before, "now": Path(__file__).parents[1]}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(rounds + 1):
        for name, tree in trees.items():
            found[name].append(of_a_daemon(tree))
    print("| | before | now | ratio, lowest to highest of the rounds |\n|---|---|---|---|")
    for figure in found["now"][0]:
        old, new = ([each[figure] for each in found[name][1:]] for name in trees)  # the first fills caches
        ratios = sorted(b / a for a, b in zip(old, new, strict=True) if a)
        middle = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else ""
        print(f"| {figure} | {statistics.median(old):.1f} | {statistics.median(new):.1f} | {middle} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=None, help="30, or 5 of daemons")
    parser.add_argument("--before", type=Path, help="an older checkout")
    arguments = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it every start compiles the modules that have changed
    if arguments.before is not None:
        compare(arguments.before.resolve(), arguments.rounds or 5)
        return
    rounds = arguments.rounds or 30
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
