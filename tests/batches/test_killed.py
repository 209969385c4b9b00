"""The daemon is killed with SIGKILL in a batch, at twenty random moments: every line is answered exactly once."""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.waiting import HUNG

ROOT = Path(__file__).parents[2]
LINES = 300


@contextmanager
def daemon(folder: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    command = [sys.executable, "-m", "tests.batches.daemon", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        transport = httpx.HTTPTransport(uds=str(folder / "r" / "modelrunner.sock"))
        with httpx.Client(transport=transport, base_url="http://localhost/v1", timeout=HUNG) as client:
            try:
                yield process, client
            finally:
                process.kill()


def answered(client: httpx.Client, batch: dict[str, Any]) -> list[str]:
    found = []
    for name in ("output_file_id", "error_file_id"):
        if batch[name]:
            content = client.get(f"/files/{batch[name]}/content").raise_for_status().text
            found += [json.loads(line)["custom_id"] for line in content.splitlines()]
    return found


@pytest.mark.alone
def test_every_line_is_answered_exactly_once(tmp_path: Path) -> None:
    chance = random.Random(20)
    body = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
    lines = [
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(LINES)
    ]
    with daemon(tmp_path) as (_, client):
        files = {"file": ("lines.jsonl", "\n".join(map(json.dumps, lines)))}
        file = client.post("/files", data={"purpose": "batch"}, files=files).raise_for_status().json()
        wanted = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = client.post("/batches", json=wanted).raise_for_status().json()
    kills, counts = 0, list[int]()
    while batch["status"] not in ("completed", "failed"):
        with daemon(tmp_path) as (process, client):
            goal = counts[-1] + chance.randrange(LINES // 20) if counts else 1
            while True:
                batch = client.get(f"/batches/{batch['id']}").raise_for_status().json()
                done = batch["request_counts"]["completed"]
                if batch["status"] == "completed" or (kills < 20 and done >= goal):
                    break
            assert not counts or done >= counts[-1]  # an answer that was written is never lost
            counts.append(done)
            process.send_signal(signal.SIGKILL)
            kills += 1
    with daemon(tmp_path) as (_, client):
        assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        assert sorted(answered(client, batch)) == sorted(str(line["custom_id"]) for line in lines)
    assert kills >= 10
