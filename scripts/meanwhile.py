"""What a chat notices of a pull that runs meanwhile, for `scripts/bench pull`: the time to its first token."""

import asyncio
import json
import os
import shutil
import statistics
from pathlib import Path

from streams import Target, exchange, stream

from tests.e2e.daemons import Daemon, environment
from tests.models.prepare import SMOLLM2, prepared

_CHATS = 20  # without anything else


def first_tokens(folder: Path, name: str, url: str, rounds: int) -> dict[str, float]:
    """Medians in seconds: alone, while the daemon itself pulls `name`, and while curl fetches the same file from `url`
    into sha256sum."""
    folder.mkdir()
    ignore = shutil.ignore_patterns("daemon.lock", "logs", "state")
    shutil.copytree(prepared(), folder / "data", ignore=ignore)
    daemon = Daemon(folder / "data", folder / "run" / "modelrunner.sock", environment(folder / "data", folder / "run"))
    done = daemon.run("install", "llama.cpp")
    if done.returncode:
        raise SystemExit(done.stderr)
    daemon.run("shutdown")
    daemon.start()
    try:
        return asyncio.run(_measure(daemon, name, url, rounds))
    finally:
        daemon.stop()


async def _measure(daemon: Daemon, name: str, url: str, rounds: int) -> dict[str, float]:
    chat = Target(daemon.socket, SMOLLM2)
    await stream(chat, 4)  # loads the model
    found: dict[str, list[float]] = {"alone": [], "while the daemon pulls": [], "while curl | sha256sum runs": []}
    for _ in range(rounds):
        found["alone"] += [await stream(chat, 4) for _ in range(_CHATS)]
        pull = asyncio.create_task(_pull(daemon, name))
        while not pull.done():
            found["while the daemon pulls"].append(await stream(chat, 4))
        await pull
        daemon.run("rm", name)
        line = f"curl -sf {url} | tee {daemon.data / 'curl'} | sha256sum"
        other = await asyncio.create_subprocess_shell(line, stdout=asyncio.subprocess.DEVNULL)
        while other.returncode is None:
            found["while curl | sha256sum runs"].append(await stream(chat, 4))
        os.unlink(daemon.data / "curl")
    return {what: statistics.median(times) for what, times in found.items()}


async def _pull(daemon: Daemon, name: str) -> None:
    body = json.dumps({"from": name}).encode()
    lines = b"".join([piece async for piece in exchange(daemon.socket, "POST", "/models/create", body)])
    if b"error" in lines.rpartition(b"\r\n\r\n")[0].partition(b"\r\n\r\n")[2] or b" 200 " not in lines[:20]:
        raise SystemExit(lines[-500:].decode())
