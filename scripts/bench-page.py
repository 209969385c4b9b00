"""`scripts/bench page`: requests/s of the warm daemon while nobody watches and while ten pages do, in turn in one run.

--rounds N (6)  --seconds N (3) per measurement. A page is a reader of its stream, `GET /engines/now`, with curl. Prints
medians, the ratio of each round, and the daemon's CPU time per request: a page's own work is not the daemon's.
"""

import argparse
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent / "proxybench"
PAGES = 10


@contextmanager
def running(*argv: object) -> Iterator[psutil.Process]:
    process = subprocess.Popen([str(each) for each in argv], stdout=subprocess.DEVNULL)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(20)


def wait_for(port: int) -> None:
    for _ in range(400):
        try:
            body = b'{"model": "bench", "messages": []}'
            headers = {"Content-Type": "application/json"}
            ask = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)
            urllib.request.urlopen(ask, timeout=20).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit("the daemon does not answer")


def measure(port: int, daemon: psutil.Process, seconds: int) -> tuple[float, float]:
    """Requests/s, and the daemon's CPU time per request in microseconds."""
    before = sum(daemon.cpu_times()[:2])
    command = ["wrk", "-t1", "-c32", f"-d{seconds}s", "-s", str(HERE / "ask.lua")]
    environment = os.environ | {"MODEL": "bench", "STREAM": "false"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    printed = subprocess.run([*command, url], env=environment, capture_output=True, text=True, check=True).stdout
    found = re.search(r"Requests/sec:\s+([\d.]+)", printed)
    assert found
    assert "Non-2xx" not in printed
    rate = float(found[1])
    return rate, (sum(daemon.cpu_times()[:2]) - before) / (rate * seconds) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="page") as name, ExitStack() as stack:
        folder = Path(name)
        for program in ("engine", "listen"):
            subprocess.run(["gcc", "-O2", "-o", folder / program, HERE / f"{program}.c", "-lpthread"], check=True)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        daemon = stack.enter_context(running(sys.executable, HERE / "daemon.py", folder, folder / "engine", port))
        wait_for(port)
        rounds = []
        for number in range(options.rounds):
            figures = {}
            for pages in (0, PAGES) if number % 2 else (PAGES, 0):
                with ExitStack() as opened:
                    watch = ("curl", "-sN", "-H", "Accept: text/event-stream", f"http://127.0.0.1:{port}/engines/now")
                    for _ in range(pages):
                        opened.enter_context(running(*watch))
                    figures[pages] = measure(port, daemon, options.seconds)
            rounds.append(figures)
        for pages in (0, PAGES):
            rate, cost = (statistics.median(each[pages][part] for each in rounds) for part in (0, 1))
            print(f"{pages:2} pages: {rate:9,.0f} requests/s, {cost:6.1f} us of the daemon's CPU time each")
        for part, what in ((0, "requests/s"), (1, "CPU time")):
            ratios = sorted(each[PAGES][part] / each[0][part] for each in rounds)
            shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            print(f"ten pages against none, {what}: {statistics.median(ratios):.3f} (rounds {shown})")


main()
