"""A Prometheus and its `promtool`, both of Debian's package `prometheus`."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.ports import reserved_port

CONTRIB = Path(__file__).parents[2] / "contrib"


def promtool(*words: str, told: str = "") -> tuple[int, str]:
    """The exit code and the output of `promtool check`."""
    done = subprocess.run(["promtool", "check", *words], input=told, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@asynccontextmanager
async def prometheus(folder: Path, target: int, every: str = "250ms") -> AsyncIterator[aiohttp.ClientSession]:
    """A Prometheus that scrapes the daemon at that port, and a client for its API."""
    config = folder / "prometheus.yml"
    jobs = [{"job_name": "modelrunner", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}]
    rules = [str(CONTRIB / "prometheus-rules.yml")]
    config.write_text(json.dumps({"global": {"scrape_interval": every}, "scrape_configs": jobs, "rule_files": rules}))
    with reserved_port() as port:
        options = [f"--config.file={config}", f"--storage.tsdb.path={folder}", f"--web.listen-address=127.0.0.1:{port}"]
        with (folder / "prometheus.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec("prometheus", *options, stdout=log, stderr=log)
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
                yield client
        finally:
            process.terminate()
            await process.wait()


async def query(client: aiohttp.ClientSession, expression: str) -> dict[tuple[str, ...], float]:
    """The value for each combination of labels, without those of the scrape; nothing while it starts."""
    try:
        async with client.get("/api/v1/query", params={"query": expression}) as answer:
            found = (await answer.json())["data"]["result"] if answer.status == 200 else []
    except aiohttp.ClientConnectionError:
        return {}
    return {tuple(value for _, value in sorted(each["metric"].items())): float(each["value"][1]) for each in found}


async def told(client: aiohttp.ClientSession, expression: str, enough: Callable[[dict[Any, float]], bool]) -> None:
    """Returns once what Prometheus has scraped is enough."""
    while not enough(await query(client, expression)):  # noqa: ASYNC110 - Prometheus tells no one
        await asyncio.sleep(0.1)
