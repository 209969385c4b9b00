"""What it is worth that single embeddings are gathered: two daemons with the same engine and model, one without a
window and one with it, asked in turns.

For each number of clients that ask at once, one after another each: embeddings per second of both, and the median time
of a request. With one client the difference of the medians is the added delay. Medians of the rounds.

Usage: bench-embeddings.py [--window 2ms] [--rounds 5] [--clients 1,8,32] [--requests 200]
"""

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.e2e.daemons import Daemon, environment
from tests.models.prepare import MINILM, prepared

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "brew")


def text(number: int) -> str:
    return " ".join(WORDS[number % 7 : number % 7 + 3 + number % 9]) + f" {number}"


async def round_of(daemon: Daemon, clients: int, requests: int) -> tuple[float, float]:
    """Embeddings per second, and the median time of one in seconds."""
    times: list[float] = []
    numbers = iter(range(requests))

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            began = time.perf_counter()
            body = {"model": MINILM, "input": text(number)}
            async with session.post("http://localhost/v1/embeddings", json=body) as answer:
                found = await answer.json()
                if answer.status != 200 or len(found["data"]) != 1:
                    raise SystemExit(found)
            times.append(time.perf_counter() - began)

    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(daemon.socket), limit=0)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        return requests / (time.perf_counter() - began), statistics.median(times)


@contextmanager
def daemon_in(folder: Path, window: str) -> Iterator[Daemon]:
    folder.mkdir()
    ignore = shutil.ignore_patterns("daemon.lock", "logs", "state")
    shutil.copytree(prepared(), folder / "data", copy_function=os.link, ignore=ignore)
    daemon = Daemon(folder / "data", folder / "run" / "modelrunner.sock", environment(folder / "data", folder / "run"))
    done = daemon.run("install", "llama.cpp")
    if done.returncode:
        raise SystemExit(done.stderr)
    daemon.run("shutdown")
    daemon.start(embedding_window=window)
    try:
        yield daemon
    finally:
        daemon.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window", default="2ms")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--requests", type=int, default=200)
    options = parser.parse_args()
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
        sides = {window: ends.enter_context(daemon_in(folder / window, window)) for window in ("0", options.window)}
        for daemon in sides.values():
            asyncio.run(round_of(daemon, 2, 20))
        for clients in map(int, options.clients.split(",")):
            found: dict[str, list[tuple[float, float]]] = {window: [] for window in sides}
            for number in range(options.rounds):
                for window in list(sides)[:: 1 if number % 2 else -1]:  # the machine may become slower meanwhile
                    found[window].append(asyncio.run(round_of(sides[window], clients, options.requests)))
            rates = {window: statistics.median(rate for rate, _ in each) for window, each in found.items()}
            times = {window: statistics.median(time for _, time in each) * 1e3 for window, each in found.items()}
            gain = statistics.median(
                with_it / without for (without, _), (with_it, _) in zip(*found.values(), strict=True)
            )
            print(
                f"{clients:3} clients   alone {rates['0']:7.1f}/s {times['0']:7.2f} ms   gathered "
                f"{rates[options.window]:7.1f}/s {times[options.window]:7.2f} ms   throughput x{gain:.2f}, "
                f"a request {times[options.window] - times['0']:+.2f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
