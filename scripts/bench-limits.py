"""`scripts/bench limits`: clients over the limit of their key, beside a client of another key.

--seconds N (30)  --clients N (64)  --limit N (30) requests a minute. Needs gcc. Prints how many requests were admitted
against the limit, how many clients that obeyed Retry-After were refused again, and what the other key's client waited
for its answers, with the crowd and without.
"""

import argparse
import asyncio
import json
import socket as sockets
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp

HERE = Path(__file__).resolve().parent / "proxybench"
CHAT = {"model": "bench", "messages": [{"role": "user", "content": "hi"}]}


async def ask(session: aiohttp.ClientSession, key: str) -> tuple[int, float]:
    """The status, and the seconds of its Retry-After."""
    async with session.post("/v1/chat/completions", json=CHAT, headers={"X-API-Key": key}) as answer:
        await answer.read()
        return answer.status, float(answer.headers.get("Retry-After", 0))


async def patient(url: str, key: str, until: float, counts: Counter[str]) -> None:
    """Comes when it was told to, also after the end of the crowd: each refusal is one promise, which is kept or not."""
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=1)) as session:
        obeyed = False
        while obeyed or time.monotonic() < until:
            status, wait = await ask(session, key)
            counts["admitted" if status == 200 else "refused"] += 1
            if obeyed:
                counts["obeyed and admitted" if status == 200 else "obeyed and refused"] += 1
            obeyed = status == 429 and wait < 70
            await asyncio.sleep(wait if obeyed else max(0.0, until - time.monotonic()) if status == 429 else 0.02)


async def impatient(url: str, key: str, until: float, counts: Counter[str]) -> None:
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=1)) as session:
        while time.monotonic() < until:
            status, _ = await ask(session, key)
            counts["admitted" if status == 200 else "refused"] += 1
            await asyncio.sleep(0.02)


async def waits(url: str, key: str, until: float) -> list[float]:
    """Seconds of each answer to the client of another key."""
    found = []
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=1)) as session:
        while time.monotonic() < until:
            began = time.perf_counter()
            status, _ = await ask(session, key)
            found.append(time.perf_counter() - began)
            assert status == 200
            await asyncio.sleep(0.01)
    return found


async def bystander(url: str, key: str, seconds: float) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--bystander", url, key, str(seconds), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return out.decode().strip()


def told(found: list[float]) -> str:
    ordered = sorted(found)
    return json.dumps([statistics.median(ordered) * 1e3, ordered[int(0.99 * (len(ordered) - 1))] * 1e3])


async def measure(url: str, socket: Path, seconds: float, clients: int, limit: int) -> None:
    connector = aiohttp.UnixConnector(str(socket))
    async with aiohttp.ClientSession("http://localhost", connector=connector) as owner:
        async with owner.post("/v1/chat/completions", json=CHAT) as answer:
            answer.raise_for_status()
        keys = {}
        for name, wanted in (("crowd", limit), ("patient", limit), ("other", None)):
            async with owner.post("/keys", json={"name": name, "requests_per_minute": wanted}) as answer:
                keys[name] = (await answer.json())["text"]
    quiet = json.loads(await bystander(url, keys["other"], seconds))
    counts, promises = Counter[str](), Counter[str]()
    until = time.monotonic() + seconds
    asked = asyncio.gather(
        *(impatient(url, keys["crowd"], until, counts) for _ in range(clients // 2)),
        *(patient(url, keys["patient"], until, promises) for _ in range(clients // 2)),
    )
    crowded = json.loads(await bystander(url, keys["other"], seconds))
    half = clients // 2
    print(
        f"{half} clients that do not wait: {counts['admitted']} admitted in {seconds:.0f} s (limit {limit}),"
        f" {counts['refused']} refused"
    )
    print(
        f"another key's client: p50 {crowded[0]:.2f} ms, p99 {crowded[1]:.2f} ms beside them; p50 {quiet[0]:.2f} ms,"
        f" p99 {quiet[1]:.2f} ms alone: p99 {crowded[1] / quiet[1]:.2f} times (target 1.2)"
    )
    await asked
    print(
        f"{half} clients that obey Retry-After: {promises['obeyed and admitted']} came when they were told to and were"
        f" admitted, {promises['obeyed and refused']} were refused (target 0)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench limits", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--limit", type=int, default=30)
    parser.add_argument("--bystander", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bystander:
        url, key, seconds = options.bystander
        print(told(asyncio.run(waits(url, key, time.monotonic() + float(seconds)))))
        return
    with sockets.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(["gcc", "-O2", "-o", folder / "engine", HERE / "engine.c", "-lpthread"], check=True)
        daemon = subprocess.Popen([sys.executable, HERE / "daemon.py", folder, folder / "engine", str(port)])
        try:
            socket = folder / "runtime_dir" / "modelrunner.sock"
            while not socket.exists():
                time.sleep(0.05)
            time.sleep(1)
            asyncio.run(measure(f"http://127.0.0.1:{port}", socket, options.seconds, options.clients, options.limit))
        finally:
            daemon.terminate()
            daemon.wait(20)


if __name__ == "__main__":
    main()
