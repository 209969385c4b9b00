"""What the engine behind a daemon counts, asked of the engine itself."""

from typing import Any

import httpx

from tests.e2e.daemons import Daemon
from tests.waiting import HUNG


def runner(daemon: Daemon) -> dict[str, Any]:
    return next(each for each in daemon.runners() if each["backend_name"] == "vllm")


def counter(daemon: Daemon, name: str) -> float:
    """A gauge or counter of vLLM's, the sum where it comes in several; 0 if there is none."""
    path = runner(daemon)["endpoint"].removeprefix("unix://")
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x", timeout=HUNG) as client:
        lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))
