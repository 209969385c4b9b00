"""`scripts/bench ways`: how much of the package a request touches: calls of its functions on the event loop's thread,
the files that they are in, and the changes from one file to another, in a whole daemon with a fake engine.

--before FOLDER counts the daemon of another checkout too, which has its .venv. --trace WAY prints each call of one way.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import aiohttp

import modelrunner
from modelrunner.daemon.app import serve
from modelrunner.plugins.registry import BackendRegistry
from modelrunner.store import Store
from tests.api.conftest import make_settings
from tests.fakes import FakeBackend
from tests.store.samples import add_model, write_gguf

OWN = f"{Path(modelrunner.__file__).parent}/"
ROUNDS = 5


async def count(ask: Callable[[], Awaitable[None]]) -> list[tuple[str, str]]:
    """The file and the name of each function that is called until `ask` returns."""
    calls: list[tuple[str, str]] = []

    def called(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            calls.append((frame.f_code.co_filename.removeprefix(OWN), frame.f_code.co_qualname))

    sys.setprofile(called)
    try:
        await ask()
    finally:
        sys.setprofile(None)
    return calls


async def ways(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """The calls of each way; of several requests those of the one with the fewest, since a timer may come between. A
    cold chat and a pull happen once."""
    settings = make_settings(folder, telemetry=False)
    settings.data_dir.mkdir()
    add_model(Store(settings.data_dir), "smol", 0)
    file = folder / "other.gguf"
    write_gguf(file, seed=1)
    ready = asyncio.Event()
    daemon = asyncio.create_task(
        serve(settings, ready=ready.set, registry=BackendRegistry({"fake": FakeBackend(folder)}))
    )
    await ready.wait()
    connector = aiohttp.UnixConnector(str(settings.runtime_dir / "modelrunner.sock"))
    async with aiohttp.ClientSession("http://localhost", connector=connector) as client:

        async def ask(method: str, path: str, body: object = None) -> None:
            async with client.request(method, path, json=body) as answer:
                data = await answer.read()
                if answer.status >= 400:
                    raise SystemExit(f"{path}: {data.decode()}")

        chat = {"model": "smol", "messages": [{"role": "user", "content": "hello"}]}
        setting = iter(range(1024, 4096))
        requests: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "cold chat": (1, lambda: ask("POST", "/v1/chat/completions", chat)),
            "warm chat": (ROUNDS, lambda: ask("POST", "/v1/chat/completions", chat)),
            "GET /models": (ROUNDS, lambda: ask("GET", "/models")),
            "configure": (
                ROUNDS,
                lambda: ask("POST", "/engines/_configure", {"model": "smol", "context-size": next(setting)}),
            ),
            "pull of a file": (1, lambda: ask("POST", "/models/create", {"from": f"file://{file}", "name": "other"})),
        }
        counted = {}
        for way, (rounds, request) in requests.items():
            counted[way] = min([await count(request) for _ in range(rounds)], key=len)
        await ask("POST", "/shutdown")
    await daemon
    return counted


def report(title: str, counted: dict[str, list[tuple[str, str]]]) -> None:
    print(f"{title:16}   calls  files  changes of file")
    for way, calls in counted.items():
        files = [file for file, _ in groupby(file for file, _ in calls)]
        print(f"  {way:16} {len(calls):5}  {len(set(files)):5}  {len(files) - 1:5}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench ways", description=__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--trace", metavar="WAY")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counted = asyncio.run(ways(Path(folder)))
    if options.trace:
        print(*(f"{file}:{name}" for file, name in counted[options.trace]), sep="\n")
        return
    report(Path(OWN).parent.name, counted)
    if options.before is not None:
        environment = os.environ | {"PYTHONPATH": str(options.before)}
        subprocess.run([options.before / ".venv/bin/python", __file__], env=environment, check=True)


if __name__ == "__main__":
    main()
