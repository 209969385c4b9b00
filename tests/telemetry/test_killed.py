"""The daemon is killed with SIGKILL under load: usage lacks at most the last seconds, and a revoked key stays so."""

import asyncio
import json
import signal
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import httpx

from tests.batches.test_killed import daemon
from tests.waiting import HUNG

CHAT = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
CLIENTS = 8
LOAD = 5.0  # seconds between the first and the last answer, by the daemon's records
LOST = 2.0  # seconds of answers that may be lost


def connect(socket: Path) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=str(socket))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=HUNG)


async def test_what_was_answered_two_seconds_before_stays_and_a_revoked_key_is_refused(tmp_path: Path) -> None:
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
        ended: dict[str, float] = {}  # by request ID, as the daemon tells them
        async with connect(socket) as watching:
            follow = watching.stream("GET", "/engines/requests?status=200", headers={"Accept": "text/event-stream"})
            async with follow as told:
                clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
                async for line in told.aiter_lines():
                    if line.startswith("data: "):
                        record = json.loads(line.removeprefix("data: "))
                        ended[record["request_id"]] = datetime.fromisoformat(record["time"]).timestamp()
                        if max(ended.values()) - min(ended.values()) > LOAD:
                            break
                control.delete("http://localhost/keys/kim").raise_for_status()
                process.send_signal(signal.SIGKILL)
        await asyncio.gather(*clients)
    before = [time for time in ended.values() if time < max(ended.values()) - LOST]
    assert len(before) > CLIENTS
    with daemon(tmp_path) as (_, control):
        usage = control.get("http://localhost/usage").raise_for_status().json()
        assert len(before) <= sum(each["requests"] for each in usage) <= sent
        listen = control.get("http://localhost/version").json()["listen"]
        async with httpx.AsyncClient() as client_of_kim:
            asked = await client_of_kim.post(f"{listen}/v1/chat/completions", json=CHAT, headers={"X-API-Key": text})
        assert asked.status_code == 401
