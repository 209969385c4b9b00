"""The engine behind a daemon, asked by itself, and clients that leave it."""

import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from tests.e2e.daemons import Daemon
from tests.waiting import HUNG


def engine(daemon: Daemon, mode: str = "completion") -> httpx.Client:
    [endpoint] = [runner["endpoint"] for runner in daemon.runners() if runner["mode"] == mode]
    transport = httpx.HTTPTransport(uds=endpoint.removeprefix("unix://"))
    return httpx.Client(transport=transport, base_url="http://localhost", timeout=HUNG)


def counter(daemon: Daemon, name: str, mode: str = "completion") -> int:
    """Of llama.cpp's own metrics."""
    with engine(daemon, mode) as client:
        found = re.search(rf"^llamacpp:{name} (\d+)", client.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return int(found[1])


def processing(daemon: Daemon, mode: str = "completion") -> int:
    """The sequences that the engine works on, by its own count."""
    return counter(daemon, "requests_processing", mode)


@contextmanager
def sent(daemon: Daemon, path: str, body: Mapping[str, Any]) -> Iterator[None]:
    """A request of a client that reads nothing, and leaves at the end of the block."""
    data = json.dumps(body).encode()
    with socket.socket(socket.AF_UNIX) as leaver:
        leaver.connect(str(daemon.socket))
        leaver.sendall(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data)))
        leaver.sendall(data)
        yield
