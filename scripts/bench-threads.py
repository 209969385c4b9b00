"""`scripts/bench threads`: two engines on the same processors, by how long their threads wait for each other in a busy
loop (GOMP_SPINCOUNT, which the daemon sets): each alone, both, and both while one of them has a single client.

--counts 300,100,0 (the daemon's is in backends/modelrunner_llamacpp/backend.py)  --rounds N (3)  --seconds N (6)
--clients N (5) of each engine; a figure is sequences times batches per second, the median of the rounds, which take the
counts in turn. Needs the native engine: the wheel's has no such setting.
"""

import argparse
import asyncio
import random
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
from peers import GEMMA, SMOLLM2, connected, daemon, engine, look, prepare, question

MODELS = (SMOLLM2, GEMMA)


async def computed(client: httpx.AsyncClient) -> float:
    """Sequences times batches, of all batches until now."""
    text = (await client.get("/metrics")).text
    batches, sequences = (
        float(re.search(rf"^llamacpp:{name} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("n_decode_total", "n_busy_slots_per_decode")
    )
    return batches * sequences


async def ask_for_ever(client: httpx.AsyncClient, model: str) -> None:
    chooser = random.Random(0)
    while True:
        path, body = question(model, chooser)
        (await client.post(path, json=body)).raise_for_status()


async def rates(engines: Mapping[str, httpx.AsyncClient], clients: Sequence[int], seconds: float) -> list[float]:
    """Of each of MODELS, with so many clients."""
    counts = zip(MODELS, clients, strict=True)
    tasks = [asyncio.create_task(ask_for_ever(engines[m], m)) for m, count in counts for _ in range(count)]
    try:
        await asyncio.sleep(1)
        began, before = time.monotonic(), [await computed(engines[model]) for model in MODELS]
        await asyncio.sleep(seconds)
        after = [await computed(engines[model]) for model in MODELS]
        passed = time.monotonic() - began
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [(b - a) / passed for a, b in zip(before, after, strict=True)]


async def run(options: argparse.Namespace, folder: Path) -> None:
    with daemon():
        async with connected() as client:
            known = await look(client)
    many = options.clients
    cases = [(many, 0), (0, many), (many, many), (1, many), (many, 1)]
    found: dict[tuple[str, tuple[int, int]], list[list[float]]] = defaultdict(list)
    for _ in range(options.rounds):
        for count in options.counts.split(","):
            async with AsyncExitStack() as stack:
                engines = {}
                for model in MODELS:
                    running = engine(folder, known.commands[model], {"GOMP_SPINCOUNT": count})
                    engines[model] = await stack.enter_async_context(connected(stack.enter_context(running)))
                for case in cases:
                    found[count, case].append(await rates(engines, case, options.seconds))
    for (count, case), figures in found.items():
        medians = [statistics.median(rate) for rate in zip(*figures, strict=True)]
        told = ", ".join(f"{model} {rate:6.1f}" for model, rate, n in zip(MODELS, medians, case, strict=True) if n)
        print(f"  GOMP_SPINCOUNT={count:4} clients {case[0]} and {case[1]}: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench threads", description=__doc__)
    parser.add_argument("--counts", default="300,100,0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--clients", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        asyncio.run(run(options, Path(name)))


if __name__ == "__main__":
    main()
