"""What requests cost that their clients give up, and what it costs that they end.

For each engine: a short plain request beside a stream, and the same after three clients have given up long plain
requests, with the leases that `ps` shows when it begins. The second may take 1.5 times as long as the first (median of
the pairs); otherwise the exit status is 1.

Of llama.cpp's engines there are two daemons in one run: one as it is, and one that passes plain requests on instead of
asking for streams. For each also a short plain request alone: client's time, processor time of the daemon.

Usage: bench-leavers.py [--rounds 10] [--pairs 5] [--kinds wheel,native,vllm]
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
from tests.models.prepare import SMOLLM2, SMOLLM2_SAFETENSORS, prepared

INSTALL = {"wheel": ["llama.cpp"], "native": ["llama.cpp", "--build"], "vllm": ["vllm"]}
MODELS = {"wheel": SMOLLM2, "native": SMOLLM2, "vllm": SMOLLM2_SAFETENSORS}
SERVE = [sys.executable, "-m", "modelrunner", "serve"]
MOST = 1.5
PLAIN = (
    "import sys; from modelrunner_llamacpp import requests; requests._AS_STREAMS.clear(); "
    "requests._ENDPOINTS = {path: requests._of_llama_server(path, one) for path, one in requests._SHAPES.items()}; "
    "from modelrunner.cli import main; sys.argv = ['modelrunner', 'serve']; sys.exit(main())"
)


@dataclass
class Side:
    name: str
    model: str
    daemon: Daemon
    client: httpx.Client
    process: psutil.Process

    def ask(self, tokens: int) -> float:
        """Seconds of a plain answer of so many tokens."""
        began = time.perf_counter()
        answer = self.client.post("/v1/chat/completions", content=self.body(tokens)).json()
        if answer.get("usage", {}).get("completion_tokens") != tokens:
            raise SystemExit(f"{self.name} answered {answer}")
        return time.perf_counter() - began

    def processor(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def body(self, tokens: int, **more: object) -> bytes:
        messages = [{"role": "user", "content": "Write a long story about the sea."}]
        fields = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
        return json.dumps(fields | more).encode()

    def leases(self) -> int:
        return sum(runner["leases"] for runner in self.daemon.runners())


@contextmanager
def side(folder: Path, name: str, kind: str, program: list[str]) -> Iterator[Side]:
    folder.mkdir()
    ignore = shutil.ignore_patterns("daemon.lock", "logs", "state")
    shutil.copytree(prepared(), folder / "data", copy_function=os.link, ignore=ignore)
    own = environment(folder / "data", folder / "run")
    daemon = Daemon(folder / "data", folder / "run" / "modelrunner.sock", own)
    for words in (["install", *INSTALL[kind]], ["configure", MODELS[kind], "--parallel", "5"], ["shutdown"]):
        done = daemon.run(*words)
        if done.returncode:
            raise SystemExit(done.stderr)
    process = subprocess.Popen(program, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(daemon.socket.exists)
        with daemon.client(600) as client:
            found = Side(name, MODELS[kind], daemon, client, psutil.Process(process.pid))
            found.ask(4)
            yield found
    finally:
        process.terminate()
        process.wait()


def give_up(one: Side, after: float) -> None:
    """A client that sends a long plain request, and leaves."""
    data = one.body(1500)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(one.daemon.socket))
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
            content = one.body(1800, stream=True)
            with client.stream("POST", "/v1/chat/completions", content=content) as answer:
                for _ in answer.iter_lines():
                    begun.set()
                    if ended.is_set():
                        return

    streaming = threading.Thread(target=stream)
    streaming.start()
    begun.wait()
    leaving = [threading.Thread(target=give_up, args=(one, 1.0)) for _ in range(leavers)]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join()
    time.sleep(1.0)
    leases = one.leases()
    try:
        return one.ask(tokens), leases
    finally:
        ended.set()
        streaming.join()
        until(lambda: not one.leases())
        time.sleep(2.0)  # without a result of anybody the engine notices after a second whom it still works for


def alone(kind: str, ours: Side, plain: Side, rounds: int) -> None:
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
            f"{kind:7} {tokens:3} tokens   as it is {mine:7.1f} ms  passed on {other:7.1f} ms  "
            f"ratio {mine / other:.3f}   daemon's processor {each['ours']:.2f} and {each['plain']:.2f} ms",
            flush=True,
        )


def after_leavers(kind: str, one: Side, count: int) -> float:
    """How many times as long a short request takes after three others were given up: the median of the pairs."""
    pairs, leases = [], 0
    for number in range(count):
        times = {}
        for leavers in (0, 3) if number % 2 == 0 else (3, 0):  # the machine may become slower meanwhile
            times[leavers], shown = beside_a_stream(one, leavers, 16)
            leases = max(leases, shown) if leavers else leases
        pairs.append((times[0], times[3]))
    without, after = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = sorted(after / without for without, after in pairs)
    ratio = statistics.median(ratios)
    print(
        f"{kind:7} {one.name:13} 16 tokens beside a stream {without:.2f} s, after three that left {after:.2f} s: "
        f"ratio {ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}); ps showed at most {leases} leases before it",
        flush=True,
    )
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--kinds", default="wheel,native,vllm")
    arguments = parser.parse_args()
    ratios = []
    for kind in arguments.kinds.split(","):
        with ExitStack() as ends:
            folder = Path(ends.enter_context(tempfile.TemporaryDirectory()))
            ours = ends.enter_context(side(folder / "ours", "as it is", kind, SERVE))
            if kind != "vllm":
                plain = ends.enter_context(side(folder / "plain", "passed on", kind, [sys.executable, "-c", PLAIN]))
                alone(kind, ours, plain, arguments.rounds)
                after_leavers(kind, plain, arguments.pairs)
            ratios.append(after_leavers(kind, ours, arguments.pairs))
    sys.exit(max(ratios) > MOST)


if __name__ == "__main__":
    main()
