"""`scripts/bench contention`: more models than memory and many clients: the daemon against llama-server's own router
mode with the same engine, the same flags and the same requests, in one run.

  overhead  one client asks for tokens of a short text, of an engine itself, of the router and of the daemon in turn
  mixed     64 clients ask three models in a seeded random order, with room for two: answers, errors, waits, loads
  starving  three clients stream from one model without a pause, another asks for a second one, with room for one

--parts overhead,mixed,starving
--seconds N (300) of the mixed workload on each side  --clients N (64)  --seed N (1)
--rounds N (2) of it, each with the next seed; every second one asks the router first, against the machine's drift
--as-it-is  the mixed workload on a third side: the router without the environment that the daemon gives its engines
--limit N (60) seconds that the starved request may take
Needs the native engine (`scripts/install-engine --build`): the wheel has no router. Exits with 1 if the daemon gave an
error, held more than its budget and 10 %, gave fewer answers, or did not load less often than the router.
"""

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from peers import (
    GEMMA,
    MINILM,
    SMOLLM2,
    THREADS,
    Engines,
    connected,
    daemon,
    engine,
    look,
    prepare,
    question,
    router,
)


@dataclass
class Figures:
    """What one side did: `answers` and `loads` (process ID and start) until the `end`, when clients stop asking. Later
    answers count in `waits` (seconds until the whole answer) and `errors`. `held` in bytes, the most in any sample."""

    end: float = 0.0
    answers: int = 0
    waits: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    loads: set[tuple[int, float]] = field(default_factory=set)
    held: int = 0

    def add(self, other: "Figures") -> None:
        self.answers += other.answers
        self.waits += other.waits
        self.errors += other.errors
        self.loads |= other.loads
        self.held = max(self.held, other.held)

    def line(self) -> str:
        ranked = sorted(self.waits)
        p50, p99 = (ranked[int(len(ranked) * share)] for share in (0.5, 0.99)) if ranked else (0.0, 0.0)
        share = 100 * len(self.loads) / max(1, self.answers)
        return (
            f"{self.answers:6} answers, {sum(self.errors.values()):4} errors, {len(self.loads):4} loads"
            f" ({share:.2f} for 100 answers), wait p50 {p50:5.1f} s, p99 {p99:5.1f} s,"
            f" most memory {self.held / 2**20:.0f} MiB"
        )


# The requests


async def ask(client: httpx.AsyncClient, chooser: random.Random, figures: Figures) -> None:
    while time.monotonic() < figures.end:
        path, body = question(chooser.choice((SMOLLM2, GEMMA, MINILM)), chooser)
        began = time.monotonic()
        try:
            answer = await client.post(path, json=body)
        except httpx.TransportError as error:
            figures.errors[type(error).__name__] += 1
            continue
        if answer.status_code == 200:
            figures.waits.append(time.monotonic() - began)
            figures.answers += time.monotonic() < figures.end
        else:
            figures.errors[f"{answer.status_code} {answer.text[:100]}"] += 1


def engines(root: psutil.Process) -> dict[tuple[int, float], int]:
    """Bytes (PSS: what processes share counts once) of each engine below `root`, by process ID and start."""
    found = {}
    for process in root.children(recursive=True):
        with suppress(psutil.Error):
            if "--model" in process.cmdline() or "-m" in process.cmdline():
                found[process.pid, process.create_time()] = process.memory_full_info().pss
    return found


async def watch(root: psutil.Process, figures: Figures) -> None:
    """Ten times a second, until cancelled."""
    while True:
        held = await asyncio.to_thread(engines, root)
        if time.monotonic() < figures.end:
            figures.loads |= held.keys()
        figures.held = max(figures.held, sum(held.values()))
        await asyncio.sleep(0.1)


@asynccontextmanager
async def watched(root: psutil.Process, figures: Figures) -> AsyncIterator[None]:
    watching = asyncio.create_task(watch(root, figures))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait([watching])


async def mixed(client: httpx.AsyncClient, root: psutil.Process, options: argparse.Namespace, seed: int) -> Figures:
    figures = Figures(time.monotonic() + options.seconds)
    choosers = [random.Random(f"{seed}/{number}") for number in range(options.clients)]
    async with watched(root, figures):
        await asyncio.gather(*(ask(client, chooser, figures) for chooser in choosers))
    return figures


async def stream_for_ever(client: httpx.AsyncClient, answers: list[float]) -> None:
    body = {"model": SMOLLM2, "prompt": "Once upon a time", "max_tokens": 128, "ignore_eos": True, "stream": True}
    while True:
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_bytes():
                    pass
        except httpx.RemoteProtocolError:
            continue  # llama-server drops some connections after a stream
        answers.append(time.monotonic())


async def starving(client: httpx.AsyncClient, limit: float) -> tuple[float | None, int]:
    """Seconds until the request for the second model was answered (None: not within the limit), and how many streams of
    the first one ended meanwhile."""
    answers: list[float] = []
    busy = [asyncio.create_task(stream_for_ever(client, answers)) for _ in range(3)]
    try:
        while len(answers) < 3:
            await asyncio.sleep(0.05)
            for task in busy:
                if task.done():
                    task.result()
        began = time.monotonic()
        path, body = question(GEMMA, random.Random(0))
        try:
            answer = await asyncio.wait_for(client.post(path, json=body), limit)
        except TimeoutError:
            return None, sum(at > began for at in answers)
        if answer.status_code != 200:
            raise SystemExit(f"the second model: {answer.status_code} {answer.text}")
        return time.monotonic() - began, sum(at > began for at in answers)
    finally:
        for task in busy:
            task.cancel()
        await asyncio.wait(busy)


# Both sides


async def tokenized(client: httpx.AsyncClient, path: str = "/tokenize") -> float:
    """Seconds of one exchange, the median of 200."""
    body = {"model": SMOLLM2, "content": "The capital of France is"}
    found: list[float] = []
    while len(found) < 200:
        began = time.perf_counter()
        try:
            answer = await client.post(path, json=body)
        except httpx.RemoteProtocolError:
            continue  # llama-server closed a connection that was idle
        if answer.status_code != 200:
            raise SystemExit(f"{client.base_url}: {answer.status_code} {answer.text}")
        found.append(time.perf_counter() - began)
    return statistics.median(found)


async def overhead(folder: Path, known: Engines) -> None:
    """Three rounds, each of the three in turn."""
    figures: dict[str, list[float]] = {"engine itself": [], "router": [], "modelrunner": []}
    with engine(folder, known.commands[SMOLLM2]) as direct, router(folder, known.commands, 2) as (_, address), daemon():
        async with connected(direct) as itself, connected(address) as routed, connected() as ours:
            for number in range(4):
                for name, client in zip(figures, (itself, routed, ours), strict=True):
                    median = await tokenized(client, "/v1/tokenize" if client is ours else "/tokenize")
                    if number:  # the first round loads
                        figures[name].append(median)
    base = statistics.median(figures["engine itself"])
    for name, found in figures.items():
        median = statistics.median(found)
        print(f"  {name:13} {median * 1e6:7.0f} us, {(median - base) * 1e6:+7.0f} us to the engine itself")


async def run(options: argparse.Namespace, folder: Path) -> bool:
    """The parts that were asked for. True if the daemon did what it should in all of them."""
    with daemon():
        async with connected() as client:
            known = await look(client)
    print(", ".join(f"{model} {size / 2**20:.0f} MiB" for model, size in known.held.items()))
    parts, good = options.parts.split(","), True
    if "overhead" in parts:
        print("\noverhead")
        await overhead(folder, known)
    if "mixed" in parts:
        good &= await compare_mixed(folder, known, options)
    if "starving" in parts:
        good &= await compare_starving(folder, known, options)
    return good


async def compare_mixed(folder: Path, known: Engines, options: argparse.Namespace) -> bool:
    budget = known.budget([SMOLLM2, GEMMA, MINILM], 2)
    print(f"\nmixed, {options.seconds} s each; budget {budget / 2**20:.0f} MiB; seed {options.seed}", flush=True)

    async def ask_daemon(seed: int) -> Figures:
        with daemon(memory_budget=budget) as process:
            async with connected() as client:
                return await mixed(client, process, options, seed)

    async def ask_router(seed: int, environment: Mapping[str, str] = THREADS) -> Figures:
        with router(folder, known.commands, 2, environment) as (process, address):
            async with connected(address) as client:
                return await mixed(client, process, options, seed)

    sides = [("modelrunner", ask_daemon, ours := Figures()), ("router", ask_router, theirs := Figures())]
    for number in range(options.rounds):
        for name, ask_side, sum_of_it in sides if number % 2 == 0 else reversed(sides):
            figures = await ask_side(options.seed + number)
            print(f"  {name:11} {figures.line()}", *figures.errors.most_common(3), flush=True)
            sum_of_it.add(figures)
    if options.rounds > 1:
        for name, _, sum_of_it in sides:
            print(f"  {name:11} {sum_of_it.line()}, in all")
    if options.as_it_is:
        figures = await ask_router(options.seed, {})
        print(f"  router      {figures.line()}", *figures.errors.most_common(3), "(as it is)")
    better = ours.answers >= theirs.answers and len(ours.loads) < len(theirs.loads)
    return not ours.errors and ours.held <= budget * 1.1 and better


async def compare_starving(folder: Path, known: Engines, options: argparse.Namespace) -> bool:
    print(f"\nstarving, {options.limit} s at most")
    with daemon(memory_budget=known.budget([SMOLLM2, GEMMA], 1)):
        async with connected() as client:
            waited, streams = await starving(client, options.limit)
    print(f"  modelrunner {outcome(waited, streams)}")
    with router(folder, known.commands, 1) as (_, address):
        async with connected(address) as client:
            print(f"  router      {outcome(*await starving(client, options.limit))}")
    return waited is not None


def outcome(waited: float | None, streams: int) -> str:
    answered = "not answered" if waited is None else f"answered after {waited:.1f} s"
    return f"the second model was {answered}; {streams} answers of the first one meanwhile"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench contention", description=__doc__)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--parts", default="overhead,mixed,starving")
    parser.add_argument("--as-it-is", action="store_true")
    parser.add_argument("--limit", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        if not asyncio.run(run(options, Path(name))):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
