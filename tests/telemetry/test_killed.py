"""The daemon is killed with SIGKILL under load: the usage that was written stays, and a revoked key stays so."""

import asyncio
import signal
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import httpx

from modelrunner.telemetry.usage import Grouping, Usage
from tests.batches.test_killed import daemon
from tests.waiting import HUNG

CHAT = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
CLIENTS = 8
ANSWERED = 50 * CLIENTS
ALL = timedelta(days=2)


def connect(socket: Path) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=str(socket))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=HUNG)


async def test_what_was_written_under_load_stays_and_a_revoked_key_is_refused(tmp_path: Path) -> None:
    """What is answered is on the disk soon, while others are being answered; how soon, `test_usage.py` tells."""
    socket = tmp_path / "r" / "modelrunner.sock"
    sent = 0

    async def client() -> None:
        nonlocal sent
        async with connect(socket) as asking:
            with suppress(httpx.TransportError):
                while True:
                    sent += 1
                    await asking.post("/v1/chat/completions", json=CHAT)

    with daemon(tmp_path) as (process, control):
        text = control.post("http://localhost/keys", json={"name": "kim"}).raise_for_status().json()["text"]
        control.post("http://localhost/keys", json={"name": "other"}).raise_for_status()
        usage = Usage(tmp_path / "data_dir" / "state" / "usage.sqlite")
        answered = written = 0
        async with connect(socket) as watching, asyncio.timeout(HUNG):
            follow = watching.stream("GET", "/engines/requests?status=200", headers={"Accept": "text/event-stream"})
            async with follow as told:
                clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
                async for line in told.aiter_lines():
                    answered += line.startswith("data: ")
                    if answered == ANSWERED:
                        break
            while written < answered:
                written = sum(each.requests for each in await usage.sums(Grouping.DAY, ALL))
            control.delete("http://localhost/keys/kim").raise_for_status()
            process.send_signal(signal.SIGKILL)
        await asyncio.gather(*clients)
    with daemon(tmp_path) as (_, control):
        found = control.get("http://localhost/usage").raise_for_status().json()
        assert written <= sum(each["requests"] for each in found) <= sent
        listen = control.get("http://localhost/version").json()["listen"]
        async with httpx.AsyncClient(timeout=HUNG) as client_of_kim:
            asked = await client_of_kim.post(f"{listen}/v1/chat/completions", json=CHAT, headers={"X-API-Key": text})
        assert asked.status_code == 401
