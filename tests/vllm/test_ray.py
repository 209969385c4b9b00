"""A Ray cluster of two nodes on this machine: the address and the sizes reach vLLM, which joins it. The CPU build then
says that it runs nothing on Ray; a build for GPUs would place its workers."""

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from modelrunner.errors import BackendExited
from modelrunner.processes.process import scrubbed_environment
from modelrunner.testing import running
from modelrunner.types import RunSpec
from modelrunner_vllm import VllmBackend
from tests.e2e.daemons import command_line
from tests.ports import reserved_port
from tests.waiting import HUNG

pytestmark = [pytest.mark.engine, pytest.mark.nightly]


def own_address() -> str:
    """Ray puts the machine's own address wherever loopback is given."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])


@pytest.fixture
def nothing_left() -> None:
    """Ray's processes leave their sessions; the cluster below ends them by its folder and its address."""


class Cluster(NamedTuple):
    address: str
    folder: str  # RAY_TMPDIR


@pytest.fixture
def cluster(installed: Path) -> Iterator[Cluster]:
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets are below it, and their paths have 107 bytes
    with reserved_port("") as port:
        address = f"{own_address()}:{port}"
        env = scrubbed_environment() | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}
        python = str(installed / "bin/python")
        command = [python, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", "--num-cpus=1"]
        nodes = (
            ["--head", f"--port={port}", "--include-dashboard=false"],
            [f"--address={address}"],
        )
        try:
            for words in nodes:
                subprocess.run([*command, *words], env=env, check=True, timeout=HUNG, capture_output=True)
            yield Cluster(address, folder)
        finally:
            _end(folder, address)
            shutil.rmtree(folder, ignore_errors=True)


def _end(*marks: str) -> None:
    """Those whose command line has one of the marks, and the workers, which rename themselves: all are our orphans."""
    orphans = psutil.Process().children(recursive=True)
    ours = [p for p in orphans if any(mark in command_line(p) for mark in (*marks, "ray::"))]
    for process in ours:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(ours, timeout=HUNG)


async def test_the_address_and_the_sizes_reach_vllm(
    backend: VllmBackend, spec: RunSpec, cluster: Cluster, tmp_path: Path
) -> None:
    options = {"executor": "ray", "ray-address": cluster.address, "pipeline-parallel-size": 2}
    spec = replace(spec, options=options, environment={"RAY_TMPDIR": cluster.folder})
    with pytest.raises(BackendExited, match="joins a Ray cluster, but runs nothing on it"):
        async with running(backend, spec, 300, log=tmp_path / "engine.log"):
            pass
    log = (tmp_path / "engine.log").read_text("utf-8", "replace")
    assert f"Connecting to existing Ray cluster at address: {cluster.address}" in log
    assert "Connected to Ray cluster" in log
    assert "'distributed_executor_backend': 'ray', 'pipeline_parallel_size': 2" in log
