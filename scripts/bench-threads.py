"""`scripts/bench threads`: two engines on the same processors, by how long their threads wait for each other in a busy
loop (GOMP_SPINCOUNT, which the daemon sets): each alone, with one client and with many, and both.

--counts 300,100 (the daemon's is in backends/modelrunner_llamacpp/environment.py)  --rounds N (9)  --seconds N (2)
--clients N (5) of each engine. A figure is sequences times batches per second, the median of the rounds; in each round
the counts are asked one after the other, and the ratios to the first count are medians of the rounds' own. Needs the
native engine: the wheel's has no such setting.
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


async def ask(client: httpx.AsyncClient, model: str, answered: asyncio.Event, enough: asyncio.Event) -> None:
    """Ends after an answer: an engine that is told to end at work may take its time."""
    chooser = random.Random(0)
    while not enough.is_set():
        path, body = question(model, chooser)
        (await client.post(path, json=body)).raise_for_status()
        answered.set()


async def rates(engines: Mapping[str, httpx.AsyncClient], clients: Sequence[int], seconds: float) -> list[float]:
    """Of each of MODELS, with so many clients, once each of them has had an answer."""
    asked = [model for model, count in zip(MODELS, clients, strict=True) for _ in range(count)]
    answered, enough = [asyncio.Event() for _ in asked], asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for model, event in zip(asked, answered, strict=True):
            group.create_task(ask(engines[model], model, event, enough))
        await asyncio.gather(*(event.wait() for event in answered))
        began, before = time.monotonic(), [await computed(engines[model]) for model in MODELS]
        await asyncio.sleep(seconds)
        after = [await computed(engines[model]) for model in MODELS]
        passed = time.monotonic() - began
        enough.set()
    return [(b - a) / passed for a, b in zip(before, after, strict=True)]


async def run(options: argparse.Namespace, folder: Path) -> None:
    with daemon():
        async with connected() as client:
            known = await look(client)
    many, counts = options.clients, options.counts.split(",")
    cases = [(1, 0), (many, 0), (0, many), (many, many)]
    found: dict[tuple[tuple[int, int], str], list[list[float]]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        engines: dict[str, dict[str, httpx.AsyncClient]] = defaultdict(dict)
        for count in counts:
            for model in MODELS:
                running = engine(folder, known.commands[model], {"GOMP_SPINCOUNT": count})
                client = await stack.enter_async_context(connected(stack.enter_context(running)))
                engines[count][model] = client
        for number in range(options.rounds):
            for case in cases:
                for count in counts if number % 2 == 0 else reversed(counts):
                    found[case, count].append(await rates(engines[count], case, options.seconds))
    for (case, count), figures in sorted(found.items()):
        told = [f"  clients {case[0]} and {case[1]}, GOMP_SPINCOUNT={count:4}"]
        for number, model in enumerate(MODELS):
            if case[number]:
                pairs = zip(figures, found[case, counts[0]], strict=True)
                ratio = statistics.median(one[number] / first[number] for one, first in pairs)
                told.append(f"{model} {statistics.median(f[number] for f in figures):6.1f} ({ratio:.3f})")
        print(*told)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench threads", description=__doc__)
    parser.add_argument("--counts", default="300,100")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--clients", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        asyncio.run(run(options, Path(name)))


if __name__ == "__main__":
    main()
