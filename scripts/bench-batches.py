"""A batch beside an interactive client, with the real llama.cpp: what the client's first token takes alone and beside
it, and how fast the batch is against its lines sent to the engine itself, as many at once as a batch has under way.

Usage: bench-batches.py [--embeddings 10000] [--chats 200] [--tokens 32] [--pause 0.5]
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
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from modelrunner.batches.worker import AT_ONCE
from tests.e2e.daemons import Daemon, environment
from tests.models.prepare import MINILM, SMOLLM2, prepared

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
_ALONE = 20  # questions of the client before there is a batch
Lines = list[dict[str, Any]]


def session(socket: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(socket, limit=0))


async def first_token(client: aiohttp.ClientSession, number: int) -> float:
    """Seconds to it. The whole answer is read."""
    messages = [{"role": "user", "content": f"Tell me something about the number {number}."}]
    body = {"model": SMOLLM2, "messages": messages, "max_tokens": 8, "stream": True}
    began, first = time.perf_counter(), 0.0
    async with client.post(CHAT, json=body) as answer:
        async for line in answer.content:
            if not first and b'"content":"' in line:
                first = time.perf_counter() - began
    return first


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


async def as_a_batch(client: aiohttp.ClientSession, path: str, lines: Lines, pause: float) -> tuple[float, list[float]]:
    """Lines per second, and the client's first tokens meanwhile."""
    file = "\n".join(
        json.dumps({"custom_id": str(number), "method": "POST", "url": path, "body": body})
        for number, body in enumerate(lines)
    )
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", file.encode(), filename="lines.jsonl")
    async with client.post("/v1/files", data=form) as answer:
        uploaded = (await answer.json())["id"]
    began = time.perf_counter()
    firsts: list[float] = []
    body = {"input_file_id": uploaded, "endpoint": path, "completion_window": "24h"}
    async with client.post("/v1/batches", json=body) as answer:
        batch = await answer.json()

    async def ask() -> None:
        while True:
            firsts.append(await first_token(client, 1000 + len(firsts)))
            await asyncio.sleep(pause)

    asking = asyncio.create_task(ask())
    while batch["status"] not in ("completed", "failed", "expired"):
        await asyncio.sleep(0.1)
        async with client.get(f"/v1/batches/{batch['id']}") as answer:
            batch = await answer.json()
    took = time.perf_counter() - began
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    if batch["status"] != "completed" or batch["request_counts"]["failed"]:
        raise SystemExit(batch)
    return len(lines) / took, firsts


async def compare(daemon: Daemon, name: str, path: str, lines: Lines, pause: float) -> None:
    async with session(str(daemon.socket)) as client:
        async with client.post(path, json=lines[0]) as answer:  # its model is loaded from here on
            await answer.read()
        await first_token(client, 0)
        alone = [await first_token(client, 1 + number) for number in range(_ALONE)]
        own = await to_the_engine(daemon, path, lines)
        rate, beside = await as_a_batch(client, path, lines, pause)
    before, after = statistics.median(alone) * 1e3, statistics.median(beside) * 1e3
    print(
        f"{name}: {rate:.1f}/s against {own:.1f}/s of the engine itself: {rate / own:.2f} (target 0.9). The client's "
        f"first token {before:.0f} ms alone, {after:.0f} ms beside it ({len(beside)} asked): {after / before:.2f} "
        "(target 1.3)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench batches", description=__doc__)
    parser.add_argument("--embeddings", type=int, default=10_000)
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pause", type=float, default=0.5)
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
                asyncio.run(compare(daemon, f"{len(vectors)} embeddings", EMBEDDINGS, vectors, options.pause))
            if asked:
                chats = [fixed | {"messages": messages} for messages in asked]
                asyncio.run(compare(daemon, f"{len(chats)} chats", CHAT, chats, options.pause))
        finally:
            daemon.stop()


if __name__ == "__main__":
    main()
