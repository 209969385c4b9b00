"""A daemon as a process of its own, in folders of its own, and the little HTTP that tests speak to it."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.models.prompts import QUESTION, SYSTEM
from tests.waiting import HUNG

MODELRUNNER = (sys.executable, "-m", "modelrunner")


@dataclass
class Daemon:
    """`environment` is what its command line and it itself are run with."""

    data: Path
    socket: Path
    environment: dict[str, str]
    process: "subprocess.Popen[bytes] | None" = None
    settings: dict[str, str] = field(default_factory=dict)

    def start(self, **settings: str) -> None:
        self.settings = {f"MODELRUNNER_{name.upper()}": value for name, value in settings.items()}
        log = self.data.parent / "serve.log"
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*MODELRUNNER, "serve"], env=self.environment | self.settings, stdout=file, stderr=file
            )
        while not self.answers():  # a busy machine may take long
            assert self.process.poll() is None, f"the daemon ended: {log.read_text('utf-8', 'replace')[-2000:]}"
            time.sleep(0.01)

    def answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:  # httpx leaves a socket open that it could not connect
            if probe.connect_ex(str(self.socket)):
                return False
        return self.get("/health").status_code == 200

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(HUNG) == 0
            self.process = None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.process = None

    @contextlib.contextmanager
    def client(self, timeout: float = 5 * HUNG) -> Iterator[httpx.Client]:
        transport = httpx.HTTPTransport(uds=str(self.socket))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=timeout) as client:
            yield client

    def get(self, path: str) -> httpx.Response:
        with self.client() as client:
            return client.get(path)

    def post(self, path: str, body: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.client() as client:
            return client.post(path, content=content)

    def chat(self, model: str, text: str = QUESTION, **fields: Any) -> httpx.Response:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
        return self.post("/v1/chat/completions", {"model": model, "messages": messages, "temperature": 0, **fields})

    def run(self, *arguments: str, stdin: str = "", timeout: float = 5 * HUNG) -> "subprocess.CompletedProcess[str]":
        """One command of the command line."""
        command = [*MODELRUNNER, *arguments]
        environment = self.environment | self.settings
        return subprocess.run(
            command, env=environment, input=stdin, capture_output=True, text=True, timeout=timeout, check=False
        )

    def runners(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("/engines/ps").json()
        return found

    def descendants(self) -> list[psutil.Process]:
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)


def command_line(process: psutil.Process) -> str:
    """Empty for a process that has ended, even if nobody has waited for it yet."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def until(condition: Callable[[], Any]) -> Any:
    """The first true value of `condition`."""
    deadline = time.monotonic() + HUNG
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail("what was waited for did not come")
        time.sleep(0.01)
    return value


def environment(data: Path, runtime: Path) -> dict[str, str]:
    """Ours alone, but for the cache of engines, which every data directory shares."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MODELRUNNER_")}
    cache = os.environ.get("MODELRUNNER_CACHE_DIR")
    return (
        kept
        | ({"MODELRUNNER_CACHE_DIR": cache} if cache else {})
        | {
            "MODELRUNNER_DATA_DIR": str(data),
            "MODELRUNNER_RUNTIME_DIR": str(runtime),
            "MODELRUNNER_CONFIG": str(data.parent / "config.toml"),
            "MODELRUNNER_LISTEN": "",
        }
    )
