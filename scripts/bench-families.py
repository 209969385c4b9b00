"""What each family costs against OpenAI's route in one run: an engine in C that costs next to nothing, and one client
that asks one thing after the other on one connection, a family after the other in each round.

A request is a plain answer of one token; a chunk is the difference of streams of 201 tokens and of one, for each of the
200. Both are compared with OpenAI's route to the same endpoint of the engine: medians of the rounds' differences. CPU
is the daemon's own for a request, the mean of all: it says most where other programs use the machine as well.

Usage: bench-families.py [--rounds 9] [--requests 200]
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).with_name("proxybench")
TOKENS = 200
TARGETS = {"passed through": 0.3, "translated": 1.0}  # milliseconds of a request
CHUNK_TARGET = 50.0  # microseconds
_TEXT = "Tell me about Paris. " * 20
_MESSAGES = [{"role": "user", "content": _TEXT}]


@dataclass(frozen=True, eq=False)
class Family:
    """`against` is the family of OpenAI's route. `limit` is the field that holds the number of tokens, "" for a family
    without streams. `messages` is False for an engine without Anthropic's messages."""

    name: str
    path: str
    body: dict[str, Any]
    against: str
    kind: str
    limit: str = ""
    messages: bool = True

    def request(self, port: int, *, stream: bool, tokens: int) -> bytes:
        body: dict[str, Any] = {"model": "bench", **self.body, "stream": stream}
        if self.limit == "options.num_predict":
            body["options"] = {"num_predict": tokens}
        elif self.limit:
            body[self.limit] = tokens
        data = json.dumps(body, separators=(",", ":")).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(data)}\r\n\r\n"
        return head.encode() + data


_RANKED = {"model": "ranker", "query": "cities", "documents": ["Paris", "a cat", "Rome"]}
FAMILIES = (
    Family("chat", "/v1/chat/completions", {"messages": _MESSAGES}, "chat", "", "max_tokens"),
    Family("embeddings", "/v1/embeddings", {"input": _TEXT}, "embeddings", ""),
    Family("Jina", "/v1/rerank", _RANKED, "Jina", ""),
    Family("Anthropic", "/v1/messages", {"messages": _MESSAGES}, "chat", "passed through", "max_tokens"),
    Family("Anthropic", "/v1/messages", {"messages": _MESSAGES}, "chat", "translated", "max_tokens", messages=False),
    Family("Ollama's chat", "/api/chat", {"messages": _MESSAGES}, "chat", "translated", "options.num_predict"),
    Family("Ollama's embed", "/api/embed", {"input": _TEXT}, "embeddings", "translated"),
    Family("Responses", "/v1/responses", {"input": _TEXT}, "chat", "translated", "max_output_tokens"),
    Family("Responses, not stored", "/v1/responses", {"input": _TEXT, "store": False}, "chat", "translated",
           "max_output_tokens"),
    Family("Cohere", "/v2/rerank", _RANKED, "Jina", "translated"),
)  # fmt: skip


class Client:
    def __init__(self, port: int, daemon: psutil.Process) -> None:
        self.port = port
        self._daemon = daemon
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._connection.makefile("rb")

    def close(self) -> None:
        self._answers.close()
        self._connection.close()

    def ask(self, data: bytes) -> float:
        """Seconds until the whole answer was here."""
        began = time.perf_counter()
        self._connection.sendall(data)
        status = self._answers.readline()
        length, chunked = 0, False
        while (line := self._answers.readline().lower()) != b"\r\n":
            if line.startswith(b"content-length:"):
                length = int(line[15:])
            chunked = chunked or line.startswith(b"transfer-encoding:")
        body = self._answers.read(length)
        while chunked:
            size = int(self._answers.readline(), 16)
            body = self._answers.read(size + 2)
            chunked = size > 0
        took = time.perf_counter() - began
        if b" 200 " not in status:
            raise SystemExit(f"{data[:60]!r}: {status!r} {body!r}")
        return took

    def median(self, data: bytes, count: int) -> float:
        return statistics.median(self.ask(data) for _ in range(count))

    def cpu(self) -> float:
        """Seconds of a processor that the daemon has used."""
        times = self._daemon.cpu_times()
        return float(times.user + times.system)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def connected(stack: ExitStack, folder: Path, engine: Path, *, messages: bool) -> Client:
    """A client of a daemon of its own."""
    port, place = free_port(), folder / ("with" if messages else "without")
    place.mkdir()
    environment = os.environ | ({"MESSAGES": "1"} if messages else {})
    argv = [sys.executable, str(HERE / "daemon.py"), str(place), str(engine), str(port)]
    log = stack.enter_context((place / "log").open("wb"))
    process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
    stack.callback(process.wait, 20)
    stack.callback(process.terminate)
    deadline = time.monotonic() + 60
    daemon = psutil.Process(process.pid)
    while not any(one.laddr.port == port for one in daemon.net_connections("tcp")):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit((place / "log").read_text("utf-8", "replace")[-2000:])
        time.sleep(0.05)
    client = Client(port, daemon)
    stack.callback(client.close)
    return client


def measured(clients: dict[bool, Client], requests: int) -> dict[Family, tuple[float, float, float]]:
    """Seconds of a request, of a processor for it, and of a chunk for each family, of one round."""
    found = {}
    for family in FAMILIES:
        client = clients[family.messages]
        before = client.cpu()
        plain = client.median(family.request(client.port, stream=False, tokens=1), requests)
        cpu, chunk = (client.cpu() - before) / requests, 0.0
        if family.limit:
            few, many = (
                client.median(family.request(client.port, stream=True, tokens=tokens), requests // 4)
                for tokens in (1, TOKENS + 1)
            )
            chunk = (many - few) / TOKENS
        found[family] = plain, cpu, chunk
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench families", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=200)
    options = parser.parse_args()
    figures: dict[Family, list[tuple[float, ...]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        subprocess.run(["gcc", "-O2", "-pthread", "-o", folder / "engine", HERE / "engine.c"], check=True)
        clients = {has: connected(stack, folder, folder / "engine", messages=has) for has in (True, False)}
        measured(clients, 8)  # loads and warms up
        for _ in range(options.rounds):
            found = measured(clients, options.requests)
            bases = {family.name: times for family, times in found.items() if not family.kind}
            for family, times in found.items():
                base = bases[family.against]
                figures[family].append((*times, *(mine - its for mine, its in zip(times, base, strict=True))))
    print(f"{'':38} {'request':>10} {'overhead':>11} {'CPU':>9} {'overhead':>11} {'chunk':>10} {'overhead':>10}")
    for family, rows in figures.items():
        plain, cpu, chunk, more, cpu_more, chunk_more = map(statistics.fmean, zip(*rows, strict=True))
        plain, chunk, more, chunk_more = (statistics.median(row[at] for row in rows) for at in (0, 2, 3, 5))
        target = f"  (targets {TARGETS[family.kind]} ms, {CHUNK_TARGET:.0f} us)" if family.kind else ""
        streamed = f"{chunk * 1e6:7.1f} us {chunk_more * 1e6:+7.1f} us" if family.limit else " " * 21
        label = f"{family.name}, {family.kind}" if family.kind else family.name
        cpus = f"{cpu * 1e6:6.0f} us {cpu_more * 1e6:+8.0f} us"
        print(f"{label:38} {plain * 1e3:7.3f} ms {more * 1e3:+8.3f} ms {cpus} {streamed}{target}")


if __name__ == "__main__":
    main()
