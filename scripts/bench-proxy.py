"""`scripts/bench proxy`: one engine reached directly, through nginx and through the warm daemon, in turn in one run.

--rounds N (3)  --seconds N (3) per measurement  --streams 256,1000  --also NAME=PORT for a further proxy on that port;
--before FOLDER for the daemon of another checkout, which has its .venv;
--tls for TLS to nginx and to a daemon, with the same certificate, compared with each other;
--observed for a second daemon that counts requests and use, writes the access log, and has a key with limits;
--litellm PROGRAM (of `pip install 'litellm[proxy]'` in an environment of its own) measures that too, with one worker.
Each round of the closed loop starts every program anew, and every other round measures them in the opposite order.
Needs gcc, nginx and wrk. Prints medians, and their ratio to nginx: the speed of a machine drifts, a ratio less.
"""

import argparse
import json
import os
import re
import resource
import shutil
import socket
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

from proxybench.subjects import CHAT, HERE, Subject, running, started

SHAPES = [
    ("1 connection, p50 in us", 1, False),
    ("32 connections, requests/s", 32, False),
    ("16 connections, streams/s", 16, True),
]
TARGETS = {SHAPES[0][0]: "<= 1.5", SHAPES[1][0]: ">= 0.6", SHAPES[2][0]: ">= 0.8"}
COMPARED = (
    ("observed", "modelrunner", "target: >= 0.9 of requests/s, at most 5 us"),
    ("modelrunner", "before", "target: at most 15 % more"),
)
LARGE = 30 << 20
CHATS = 2000  # on one connection, after a GET or after another chat


def wrk(subject: Subject, connections: int, stream: bool, seconds: int) -> tuple[float, float]:
    """Median latency in microseconds, and answers per second. An answer other than 200 ends the bench."""
    url = f"{subject.scheme}://127.0.0.1:{subject.port}{CHAT}"
    command = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{seconds}s",
        "--timeout",
        "60s",
        "--latency",
        "-s",
        str(HERE / "ask.lua"),
        url,
    ]
    environment = os.environ | {"MODEL": "bench", "STREAM": "true" if stream else "false", "KEY": subject.key}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in printed or "Socket errors" in printed:
        raise SystemExit(f"{subject.name} failed:\n{printed}")
    latency = re.search(r"50%\s+([\d.]+)(us|ms|s)", printed)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", printed)
    assert latency
    assert rate
    return float(latency[1]) * {"us": 1.0, "ms": 1e3, "s": 1e6}[latency[2]], float(rate[1])


def cpu_seconds(subject: Subject) -> float:
    """0 for a subject that has no process of its own."""
    if subject.process is None:
        return 0.0
    times = subject.process.cpu_times()
    return times.user + times.system


@dataclass
class ClosedLoop:
    """By shape and subject, for each round: microseconds for one connection, else answers per second; and the CPU time
    of an answer in microseconds."""

    subjects: list[Subject] = field(default_factory=list)
    figures: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    spent: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def measure(self, found: list[Subject], seconds: int, *, backwards: bool) -> None:
        """One round, with processes that nobody measured before: two of one kind differ by some per cent for their
        whole life."""
        self.subjects = found
        for shape, connections, stream in SHAPES:
            for subject in reversed(found) if backwards else found:
                before = cpu_seconds(subject)
                latency, rate = wrk(subject, connections, stream, seconds)
                self.figures[shape, subject.name].append(latency if connections == 1 else rate)
                self.spent[shape, subject.name].append((cpu_seconds(subject) - before) / (rate * seconds) * 1e6)

    def report(self) -> None:
        for shape, _, _ in SHAPES:
            print(f"\n{shape} (target {TARGETS[shape]} of nginx)")
            for subject in self.subjects:
                mine = self.figures[shape, subject.name]
                ratio = _of(mine, self.figures[shape, subject.base])
                cpu = (
                    f"; CPU {statistics.median(self.spent[shape, subject.name]):6.1f} us each"
                    if subject.process
                    else ""
                )
                print(f"  {subject.name:16} {statistics.median(mine):10,.0f}   {ratio:6.2f} of {subject.base}{cpu}")
            names = {subject.name for subject in self.subjects}
            for one, other, targets in COMPARED:
                if {one, other} <= names:
                    self._compare((shape, one), (shape, other), targets)

    def _compare(self, one: tuple[str, str], other: tuple[str, str], targets: str) -> None:
        """Medians of the rounds."""
        ratio, cpu = _of(self.figures[one], self.figures[other]), _of(self.spent[one], self.spent[other])
        more = statistics.median(a - b for a, b in zip(self.spent[one], self.spent[other], strict=True))
        print(f"  {one[1]} / {other[1]}: {ratio:.3f}; CPU each {cpu:.3f}, {more:+.1f} us ({targets})")


def _of(mine: list[float], base: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, base, strict=True))


class Client:
    """One connection that asks one thing after the other."""

    def __init__(self, subject: Subject) -> None:
        self._connection = socket.create_connection(("127.0.0.1", subject.port))
        self._answers = self._connection.makefile("rb")
        self._host = b"Host: 127.0.0.1:%d\r\n" % subject.port

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._answers.close()
        self._connection.close()

    def get(self, path: str) -> None:
        self._ask(b"GET %b HTTP/1.1\r\n%b\r\n" % (path.encode(), self._host))

    def chat(self, text: str) -> None:
        body = json.dumps({"model": "bench", "messages": [{"role": "user", "content": text}]}).encode()
        head = b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (CHAT.encode(), self._host, len(body))
        self._ask(head + body)

    def _ask(self, data: bytes) -> None:
        self._connection.sendall(data)
        length = 0
        if b" 200 " not in self._answers.readline():
            raise SystemExit("a request failed")
        while (line := self._answers.readline()) != b"\r\n":
            if line.lower().startswith(b"content-length:"):
                length = int(line[15:])
        self._answers.read(length)


def chats(subject: Subject, first: str, count: int) -> float:
    """CPU time in microseconds of one of `count` chats on a connection that asked for the path `first` before them, or
    chatted."""
    question = "Tell me about Paris. " * 20
    with Client(subject) as client:
        if first:
            client.get(first)
        else:
            client.chat(question)
        before = cpu_seconds(subject)
        for _ in range(count):
            client.chat(question)
        return (cpu_seconds(subject) - before) / count * 1e6


def daemons(all_subjects: list[Subject]) -> list[Subject]:
    return [
        s for s in open_loop_subjects(all_subjects) if s.process is not None and s.name not in ("nginx", "observed")
    ]


def open_loop_subjects(all_subjects: list[Subject]) -> list[Subject]:
    return [s for s in all_subjects if s.name != "litellm" and s.scheme == "http"]


def after_a_get(all_subjects: list[Subject], rounds: int) -> None:
    """A chat on a connection that asked for the models first, against one on a connection that only chats."""
    print(f"\n{CHATS} chats on one connection after GET /v1/models, against after a chat (target <= 1.1)")
    for subject in daemons(all_subjects):
        pairs = [(chats(subject, "", CHATS), chats(subject, "/v1/models", CHATS)) for _ in range(rounds)]
        ratio = statistics.median(get / chat for chat, get in pairs)
        base, mine = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"  {subject.name:12} {mine:6.1f} us CPU, {ratio:5.2f} of {base:.1f} us")


def longest_chat(subject: Subject, over: Callable[[], bool]) -> float:
    """Seconds that the longest of many chats took, one after the other until `over`."""
    longest = 0.0
    with Client(subject) as client:
        while not over():
            began = time.perf_counter()
            client.chat("hello")
            longest = max(longest, time.perf_counter() - began)
    return longest


def beside_a_large_body(all_subjects: list[Subject], folder: Path, rounds: int) -> None:
    """How long a chat takes at worst beside 200 streams, and while a large body comes, is read and is answered too."""
    print(
        f"\nThe longest chat beside 200 streams, in ms: as it is, and while a body of {LARGE >> 20} MiB is asked with"
    )
    for subject in daemons(all_subjects):
        listening = (folder / "listen", subject.port, 200, 60 * rounds, "bench")
        with running(*listening, stdout=subprocess.DEVNULL), Client(subject) as client:
            time.sleep(2)
            plain, beside = [], []
            for _ in range(rounds):
                until = time.perf_counter() + 1
                plain.append(longest_chat(subject, lambda until=until: time.perf_counter() > until))
                large = Thread(target=client.chat, args=("x" * LARGE,))
                large.start()
                beside.append(longest_chat(subject, lambda large=large: not large.is_alive()))
        print(f"  {subject.name:12} {statistics.median(plain) * 1e3:6.1f} {statistics.median(beside) * 1e3:6.1f}")


@dataclass(frozen=True)
class Paced:
    chunks: int
    p50: int
    p99: int
    cpu: float
    memory: int


def paced(subject: Subject, folder: Path, streams: int, seconds: int) -> Paced:
    """`streams` streams of 50 chunks a second: delay of and CPU time for a chunk in microseconds, memory (PSS) in
    bytes."""
    process = subject.process
    assert process is not None
    command = [str(folder / "listen"), str(subject.port), str(streams), str(seconds), "bench", subject.key]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listening:
        assert listening.stdout is not None
        listening.stdout.readline()
        time.sleep(1)
        before = process.cpu_times()
        time.sleep(seconds - 0.5)
        after = process.cpu_times()
        memory = process.memory_full_info().pss
        chunks, p50, p99, _, still = map(int, listening.stdout.readline().split())
    if still != streams:
        raise SystemExit(f"{subject.name} lost {streams - still} of {streams} streams")
    cpu = (after.user + after.system - before.user - before.system) / (seconds - 0.5) * seconds
    return Paced(chunks, p50, p99, cpu / chunks * 1e6, memory)


def open_loop(all_subjects: list[Subject], folder: Path, streams: int, rounds: int, seconds: int) -> None:
    measured = [s for s in all_subjects if s.process is not None]
    figures: dict[str, list[Paced]] = defaultdict(list)
    for _ in range(rounds):
        for subject in measured:
            figures[subject.name].append(paced(subject, folder, streams, seconds))
    print(f"\n{streams} streams of 50 chunks a second (targets: CPU <= 1.5 of nginx; 1,000 streams under 150 MB)")
    for subject in measured:
        mine = figures[subject.name]
        ratio = statistics.median(a.cpu / b.cpu for a, b in zip(mine, figures["nginx"], strict=True))
        share = statistics.median(p.chunks for p in mine) / (streams * seconds * 50)
        p50, p99 = statistics.median(p.p50 for p in mine), statistics.median(p.p99 for p in mine)
        print(
            f"  {subject.name:12} {statistics.median(p.cpu for p in mine):6.1f} us a chunk, {ratio:5.2f} of nginx;"
            f" delay p50 {p50:,.0f} us, p99 {p99:,.0f} us;"
            f" {max(p.memory for p in mine) / 1e6:.0f} MB; {share:.0%} of the chunks"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench proxy", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--streams", default="256,1000")
    parser.add_argument("--also", action="append", default=[])
    parser.add_argument("--litellm")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--observed", action="store_true")
    parser.add_argument("--tls", action="store_true")
    options = parser.parse_args()
    missing = [program for program in ("gcc", "nginx", "wrk") if shutil.which(program) is None]
    if missing:
        raise SystemExit(f"not here: {', '.join(missing)} (Debian: gcc, nginx-light, wrk)")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 16384)), hard))
    asked = (options.also, options.litellm, options.before)
    loop = ClosedLoop()
    for number in range(options.rounds):
        with started(*asked, observed=options.observed, tls=options.tls) as (_, found):
            loop.measure(found, options.seconds, backwards=number % 2 == 1)
    loop.report()
    with started(*asked, observed=options.observed, tls=options.tls) as (folder, found):
        after_a_get(found, options.rounds)
        beside_a_large_body(found, folder, options.rounds)
        for streams in filter(None, options.streams.split(",")):
            open_loop(open_loop_subjects(found), folder, int(streams), options.rounds, options.seconds)


if __name__ == "__main__":
    main()
