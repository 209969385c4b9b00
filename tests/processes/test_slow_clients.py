"""A daemon that may open 1,024 descriptors, and clients that want all of them and give nothing for it."""

import itertools
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from modelrunner import wire
from modelrunner.cli.client import HttpClient
from modelrunner.errors import ModelRunnerError
from tests.waiting import HUNG

DESCRIPTORS = 1024
BODY_OF_1000 = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{"
CONTROL_BODY = BODY_OF_1000.replace(b"/v1/chat/completions", b"/models/create")
KINDS = [
    b"",  # nothing at all
    b"POST /v1/chat/completions HTTP/1.1\r\nHo",  # half a head
    BODY_OF_1000,
    CONTROL_BODY,
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",  # an answer, then half a head
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200,  # answers that nobody reads
]


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """For the clients, which are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    if wanted < 2 * DESCRIPTORS:
        pytest.skip(f"this process may open {hard} descriptors only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def serving(folder: Path) -> Iterator[tuple[psutil.Popen, HttpClient]]:
    """The daemon and its socket; it ends in order, too."""
    # Short, because a socket's path is.
    places = {name: str(folder / name[0]) for name in ("DATA_DIR", "CACHE_DIR", "RUNTIME_DIR")}
    places["CONFIG"] = str(folder / "modelrunner.toml")
    environment = os.environ | {f"MODELRUNNER_{name}": path for name, path in places.items()}
    limit = (DESCRIPTORS, DESCRIPTORS)
    process = psutil.Popen(
        [sys.executable, "-m", "modelrunner", "serve", "--listen", "127.0.0.1:0"],
        env=environment,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit),
    )
    client = HttpClient(f"unix://{folder}/R/modelrunner.sock")
    try:
        while not asks(client):
            assert process.poll() is None
            time.sleep(0.02)
        yield process, client
    finally:
        process.terminate()
        assert process.wait(HUNG) == 0


def status(client: HttpClient) -> wire.Status:
    return client.call("GET", "/version", wire.Status)


def asks(client: HttpClient) -> bool:
    with suppress(ModelRunnerError):
        return bool(status(client))
    return False


def besiege(port: int, count: int, stack: ExitStack) -> None:
    for data in itertools.islice(itertools.cycle(KINDS), count):
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        client.setblocking(False)
        with suppress(OSError):  # refused, or closed at once, or full
            client.send(data)


@pytest.mark.alone
def test_a_control_client_is_answered(tmp_path: Path, many_descriptors: None) -> None:
    """Each time, within the limits that a client has of its own, while the besiegers hold what they have got."""
    with serving(tmp_path) as (process, local), ExitStack() as stack:
        listen = status(local).listen
        for _ in range(10):
            besiege(int(listen.rpartition(":")[2]), DESCRIPTORS // 5, stack)
            for client in (local, HttpClient(listen)) * 10:
                assert status(client).pid == process.pid
        assert process.num_fds() < DESCRIPTORS - 128
