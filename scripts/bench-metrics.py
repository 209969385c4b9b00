"""`scripts/bench metrics`: Prometheus scrapes a daemon under load, and counts what the clients counted.

--seconds N (60)  --clients N (32). Needs gcc and Debian's package prometheus. Ends with 1 if a count differs, a scrape
failed, or Prometheus' own linter finds something.
"""

import argparse
import asyncio
import os
import shutil
import socket as sockets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import aiohttp

from tests.telemetry.prometheus import prometheus, promtool, query, told

HERE = Path(__file__).resolve().parent / "proxybench"
EVERY = "1s"
MODELS = ("bench", "bench", "bench", "none")


async def client(session: aiohttp.ClientSession, model: str, until: float, counts: Counter[tuple[str, str]]) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    while time.monotonic() < until:
        async with session.post("/v1/chat/completions", json=body) as answer:
            await answer.read()
            counts["bench" if answer.status == 200 else "unknown", str(answer.status)] += 1


async def measure(folder: Path, port: int, socket: Path, seconds: float, clients: int) -> bool:
    counts = Counter[tuple[str, str]]()
    requests = 'sum by (model, status) (modelrunner_requests_total{family!="control"})'
    scrapes = "sum(count_over_time(up[1h]))"
    connector = aiohttp.UnixConnector(str(socket), limit=0)
    async with (
        aiohttp.ClientSession("http://localhost", connector=connector) as session,
        prometheus(folder, port, EVERY) as server,
    ):
        await told(server, scrapes, lambda found: found.get((), 0) >= 1)
        until = time.monotonic() + seconds
        await asyncio.gather(*(client(session, MODELS[n % 4], until, counts) for n in range(clients)))
        seen = (await query(server, scrapes))[()]
        async with asyncio.timeout(seconds):
            await told(server, requests, lambda found: sum(found.values()) >= counts.total())
        found = await query(server, requests)
        took = await query(server, "max(max_over_time(scrape_duration_seconds[1h]))")
        failed = await query(server, "sum(count_over_time(up[1h])) - sum(sum_over_time(up[1h]))")
        async with session.get("/metrics") as answer:
            code, words = promtool("metrics", told=await answer.text())
    print(f"{counts.total()} requests of {clients} clients in {seconds:.0f} s, {seen:.0f} scrapes")
    print(f"the slowest scrape took {took[()] * 1e3:.0f} ms; {failed[()]:.0f} failed")
    print(f"Prometheus' linter says: {words or 'nothing'}")
    print(f"the clients counted {dict(counts)}")
    print(f"Prometheus counted  { ({pair: int(count) for pair, count in found.items()}) }")
    return found == counts and not failed[()] and code == 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench metrics", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=32)
    options = parser.parse_args()
    missing = [program for program in ("gcc", "prometheus", "promtool") if shutil.which(program) is None]
    if missing:
        raise SystemExit(f"not here: {', '.join(missing)} (Debian: gcc, prometheus)")
    with sockets.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(["gcc", "-O2", "-o", folder / "engine", HERE / "engine.c", "-lpthread"], check=True)
        command = [sys.executable, str(HERE / "daemon.py"), str(folder), str(folder / "engine"), str(port)]
        daemon = subprocess.Popen(command, env=os.environ | {"COUNTED": "true"}, stderr=subprocess.DEVNULL)
        try:
            socket = folder / "runtime_dir" / "modelrunner.sock"
            while not socket.exists():
                time.sleep(0.05)
            (folder / "prometheus").mkdir()
            equal = asyncio.run(measure(folder / "prometheus", port, socket, options.seconds, options.clients))
        finally:
            daemon.terminate()
            daemon.wait(20)
    raise SystemExit(not equal)


if __name__ == "__main__":
    main()
