"""A batch beside an interactive client, with the real llama.cpp: what the client's first token takes alone and beside
it, and how fast the batch is against its lines sent to the engine itself, as many at once as a batch has under way,
without a client and beside the same one. The client thinks for `--pause` seconds after each answer, alone too: a
processor that has rested is slower. What its answers take of the time is no batch's.

Usage: bench-batches.py [--embeddings 10000] [--chats 200] [--tokens 32] [--pause 2] [--rounds 1]
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from modelrunner.batches.worker import AT_ONCE
from tests.e2e.daemons import Daemon, environment
from tests.models.prepare import MINILM, SMOLLM2, prepared

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
_ALONE = 10  # questions of the client before there is a batch
_LOOK = 0.1  # seconds between two looks at the batch
Lines = list[dict[str, Any]]


def session(socket: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(socket, limit=0))


async def first_token(client: aiohttp.ClientSession, number: int) -> tuple[float, float]:
    """Seconds to it, and to the end of the answer."""
    messages = [{"role": "user", "content": f"Tell me something about the number {number}."}]
    body = {"model": SMOLLM2, "messages": messages, "max_tokens": 8, "stream": True}
    began, first = time.perf_counter(), 0.0
    async with client.post(CHAT, json=body) as answer:
        async for line in answer.content:
            if not first and b'"content":"' in line:
                first = time.perf_counter() - began
    return first, time.perf_counter() - began


async def to_the_engine(daemon: Daemon, path: str, lines: Lines) -> float:
    """Lines per second of the engine that has answered last, on its own socket."""
    mode = "completion" if path == CHAT else "embedding"
    endpoint = next(runner["endpoint"] for runner in daemon.runners() if runner["mode"] == mode)
    waiting = iter(lines)

    async def client(engine: aiohttp.ClientSession) -> None:
        for body in waiting:
            async with engine.post(path, json=body) as answer:
                await answer.read()
                if answer.status != 200:
                    raise SystemExit(await answer.text())

    async with session(endpoint.removeprefix("unix://")) as engine:
        began = time.perf_counter()
        await asyncio.gather(*(client(engine) for _ in range(AT_ONCE)))
        return len(lines) / (time.perf_counter() - began)


class Person:
    """A client that asks, and thinks for `pause` seconds. `first` is the median time to its first token, `share` the
    part of the time in which it waited for answers."""

    def __init__(self, client: aiohttp.ClientSession, pause: float) -> None:
        self._client, self._pause = client, pause
        self._answers: list[tuple[float, float]] = []
        self._began = time.perf_counter()
        self.first = self.share = 0.0

    async def ask(self, count: int = sys.maxsize) -> None:
        for number in range(count):
            self._answers.append(await first_token(self._client, number))
            await asyncio.sleep(self._pause)

    def leave(self) -> None:
        self.first = statistics.median(first for first, _ in self._answers)
        self.share = sum(whole for _, whole in self._answers) / (time.perf_counter() - self._began)


@asynccontextmanager
async def beside(client: aiohttp.ClientSession, pause: float) -> AsyncIterator[Person]:
    person = Person(client, pause)
    asking = asyncio.create_task(person.ask())
    try:
        yield person
        person.leave()
    finally:
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking


async def as_a_batch(client: aiohttp.ClientSession, path: str, lines: Lines) -> float:
    """Lines per second."""
    file = "\n".join(
        json.dumps({"custom_id": str(number), "method": "POST", "url": path, "body": body})
        for number, body in enumerate(lines)
    )
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", file.encode(), filename="lines.jsonl")
    async with client.post("/v1/files", data=form) as answer:
        uploaded = (await answer.json())["id"]
    began = time.perf_counter()
    body = {"input_file_id": uploaded, "endpoint": path, "completion_window": "24h"}
    async with client.post("/v1/batches", json=body) as answer:
        batch = await answer.json()
    while batch["status"] not in ("completed", "failed", "expired"):
        await asyncio.sleep(_LOOK)
        async with client.get(f"/v1/batches/{batch['id']}") as answer:
            batch = await answer.json()
    took = time.perf_counter() - began
    if batch["status"] != "completed" or batch["request_counts"]["failed"]:
        raise SystemExit(batch)
    return len(lines) / took


async def compare(daemon: Daemon, name: str, path: str, lines: Lines, pause: float, rounds: int) -> None:
    """Medians of the rounds, and of their ratios: other programs may want the processors for a while."""
    found: dict[str, list[float]] = {}

    def note(what: str, value: float) -> None:
        found.setdefault(what, []).append(value)

    def told(what: str, of: str) -> str:
        return f"{statistics.median(a / b for a, b in zip(found[what], found[of], strict=True)):.2f}"

    async with session(str(daemon.socket)) as client:
        async with client.post(path, json=lines[0]) as answer:  # its model is loaded from here on
            await answer.read()
        await first_token(client, 0)
        for number in range(rounds):
            part = lines[number::rounds]
            person = Person(client, pause)
            await person.ask(_ALONE)
            person.leave()
            note("alone", person.first)
            note("own", await to_the_engine(daemon, path, part))
            note("batch", await as_a_batch(client, path, part))
            async with beside(client, pause) as person:
                note("own beside", await to_the_engine(daemon, path, part))
            note("first beside own", person.first)
            async with beside(client, pause) as person:
                note("batch beside", await as_a_batch(client, path, part))
            note("first beside batch", person.first)
            note("share", person.share)
    rates = {what: f"{statistics.median(values):.1f}/s" for what, values in found.items()}
    print(
        f"{name}, {rounds} rounds. To the engine itself {rates['own']}, beside a client {rates['own beside']}. As a "
        f"batch {rates['batch']}, {told('batch', 'own')} of the engine (target 0.9); beside a client "
        f"{rates['batch beside']}, {told('batch beside', 'own')} and {told('batch beside', 'own beside')}\n"
        f"  the client's first token: {statistics.median(found['alone']) * 1e3:.0f} ms alone; beside the batch "
        f"{told('first beside batch', 'alone')} times (target 1.3), beside lines that are no batch "
        f"{told('first beside own', 'alone')} times. Its answers took {statistics.median(found['share']):.2f} of the "
        "batch's time",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench batches", description=__doc__)
    parser.add_argument("--embeddings", type=int, default=10_000)
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pause", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    vectors: Lines = [{"model": MINILM, "input": f"a sentence about the number {n}"} for n in range(options.embeddings)]
    asked = [[{"role": "user", "content": f"Write about the number {n}."}] for n in range(options.chats)]
    fixed = {"model": SMOLLM2, "max_tokens": options.tokens, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        ignore = shutil.ignore_patterns("daemon.lock", "logs", "state")
        shutil.copytree(prepared(), home / "data", copy_function=os.link, ignore=ignore)
        daemon = Daemon(home / "data", home / "run" / "modelrunner.sock", environment(home / "data", home / "run"))
        installed = daemon.run("install", "llama.cpp")
        if installed.returncode:
            raise SystemExit(installed.stderr)
        daemon.run("shutdown")
        daemon.start(keep_alive="-1")
        try:
            if vectors:
                asyncio.run(
                    compare(daemon, f"{len(vectors)} embeddings", EMBEDDINGS, vectors, options.pause, options.rounds)
                )
            if asked:
                chats = [fixed | {"messages": messages} for messages in asked]
                asyncio.run(compare(daemon, f"{len(chats)} chats", CHAT, chats, options.pause, options.rounds))
        finally:
            daemon.stop()


if __name__ == "__main__":
    main()
