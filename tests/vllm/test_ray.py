"""A Ray cluster of two nodes on this machine: the address and the sizes reach vLLM, which joins it. The CPU build then
says that it runs nothing on Ray; a build for GPUs would place its workers."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from modelrunner.errors import BackendExited
from modelrunner.processes.process import scrubbed_environment
from modelrunner.testing import running
from modelrunner.types import RunSpec
from modelrunner_vllm import VllmBackend
from tests.e2e.daemons import command_line
from tests.waiting import HUNG

pytestmark = pytest.mark.engine


def own_address() -> str:
    """Ray puts the machine's own address wherever loopback is given."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


@pytest.fixture
def nothing_left() -> None:
    """Ray's processes leave their sessions; the cluster below ends them by its folder and its address."""


@pytest.fixture
def cluster(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    folder = tmp_path_factory.mktemp("ray")
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    address = f"{own_address()}:{port}"
    env = scrubbed_environment() | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": str(folder)}
    python = str(installed / "bin/python")
    command = [python, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", "--num-cpus=1"]
    nodes = (
        ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"],
        [f"--address={address}"],
    )
    try:
        for words in nodes:
            subprocess.run([*command, *words], env=env, check=True, timeout=HUNG, capture_output=True)
        yield address
    finally:
        _end(str(folder), address)


def _end(*marks: str) -> None:
    """Those whose command line has one of the marks, and the workers, which rename themselves: all are our orphans."""
    orphans = psutil.Process().children(recursive=True)
    ours = [p for p in orphans if any(mark in command_line(p) for mark in (*marks, "ray::"))]
    for process in ours:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(ours, timeout=HUNG)


async def test_the_address_and_the_sizes_reach_vllm(
    backend: VllmBackend, spec: RunSpec, cluster: str, tmp_path: Path
) -> None:
    options = {"executor": "ray", "ray-address": cluster, "pipeline-parallel-size": 2}
    with pytest.raises(BackendExited, match="joins a Ray cluster, but runs nothing on it"):
        async with running(backend, replace(spec, options=options), 300):
            pass
    log = (tmp_path / "engine.log").read_text("utf-8", "replace")
    assert f"Connecting to existing Ray cluster at address: {cluster}" in log
    assert "Connected to Ray cluster" in log
    assert "'distributed_executor_backend': 'ray', 'pipeline_parallel_size': 2" in log
