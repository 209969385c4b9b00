"""The daemon is killed with SIGKILL under load: usage that was written stays, and so does the end of a key."""

import asyncio
import signal
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import httpx

from tests.batches.test_killed import daemon
from tests.waiting import HUNG

CHAT = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
CLIENTS = 8


def on_disk(folder: Path) -> int:
    """The requests in the file, while its daemon writes it; 0 while there is none."""
    try:
        with closing(sqlite3.connect(f"file:{folder / 'data_dir/state/usage.sqlite'}?mode=ro", uri=True)) as database:
            [[count]] = database.execute("select coalesce(sum(requests), 0) from usage")
            return int(count)
    except sqlite3.OperationalError:
        return 0


async def test_what_was_written_stays_and_a_revoked_key_is_refused(tmp_path: Path) -> None:
    sent = answered = 0

    async def client(socket: Path) -> None:
        nonlocal sent, answered
        transport = httpx.AsyncHTTPTransport(uds=str(socket))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=HUNG) as asking:
            with suppress(httpx.TransportError):
                while True:
                    sent += 1
                    await asking.post("/v1/chat/completions", json=CHAT)
                    answered += 1

    with daemon(tmp_path) as (process, control):
        text = control.post("http://localhost/keys", json={"name": "kim"}).raise_for_status().json()["text"]
        control.post("http://localhost/keys", json={"name": "other"}).raise_for_status()
        clients = [asyncio.create_task(client(tmp_path / "r" / "modelrunner.sock")) for _ in range(CLIENTS)]
        async with asyncio.timeout(HUNG):
            while not (written := on_disk(tmp_path)):  # noqa: ASYNC110  nothing tells of a write
                await asyncio.sleep(0.05)
        control.delete("http://localhost/keys/kim").raise_for_status()
        process.send_signal(signal.SIGKILL)
        await asyncio.gather(*clients)
    with daemon(tmp_path) as (_, control):
        usage = control.get("http://localhost/usage").raise_for_status().json()
        assert written <= sum(each["requests"] for each in usage) <= sent
        listen = control.get("http://localhost/version").json()["listen"]
        async with httpx.AsyncClient() as client_of_kim:
            asked = await client_of_kim.post(f"{listen}/v1/chat/completions", json=CHAT, headers={"X-API-Key": text})
        assert asked.status_code == 401
    assert answered >= written - CLIENTS
