"""A model over two hosts, over HTTP: a daemon and its hosts as processes, the double of Ray, and the fake engine in
place of vLLM."""

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from modelrunner.types import RAY_GROUP
from tests.cluster.rig import Rig, killed
from tests.e2e.daemons import until


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Every run of the engine `over` needs two hosts."""
    made = Rig(tmp_path, ("b", "c"), ("m", "n"), shared=True)
    made.start()
    made.add_models()
    assert made.head.run("configure", "m", "--backend", "over").returncode == 0
    yield made
    made.close()


def over(rig: Rig) -> tuple[list[str], psutil.Process]:
    """The hosts and the engine of the runner over two hosts, which answers."""
    answer = rig.ask("m", "over")
    assert answer.status_code == 200, answer.text
    [runner] = [runner for runner in rig.head.runners() if runner["backend_name"] == "over"]
    [engine] = [engine for engine in rig.engines() if RAY_GROUP in engine.environ()]
    return runner["host"].split(", "), engine


def ended(engine: psutil.Process) -> bool:
    return not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def groups(rig: Rig) -> list[list[str]]:
    """The nodes of each placement group that is held in Ray, by their names."""
    names = {id: node["name"] for id, node in rig.nodes.items()}
    found = [json.loads(file.read_text()) for file in rig.ray.glob("group-*")]
    assert {bundle["memory"] for bundles in found for _, bundle in bundles} <= {64 << 20}
    return [[names[node] for node, _ in bundles] for bundles in found]


def test_a_model_that_no_host_holds_runs_over_two(rig: Rig) -> None:
    reason = rig.head.get("/models/m/fit").json()["reason"]
    assert reason in ("m fits into what is free on b and on c", "m fits into what is free on c and on b")
    hosts, engine = over(rig)
    assert reason.endswith(f"on {hosts[0]} and on {hosts[1]}")
    assert groups(rig) == [hosts], "one for all its workers"
    assert (rig.ray / f"group-{engine.environ()[RAY_GROUP]}").exists()
    assert {host["name"]: host["runners"] for host in rig.head.get("/hosts").json()["hosts"]} == {"b": 1, "c": 1}
    assert not [copy for name in hosts for copy in (rig.folder / name).rglob("*.gguf")], "read where the head has it"
    assert rig.ask("n").status_code == 200, "for which it made room"
    assert ended(engine)
    until(lambda: [len(nodes) for nodes in groups(rig)] == [1])
    hosts, engine = over(rig)
    assert rig.head.run("hosts", "drain", hosts[1]).returncode == 0
    until(lambda: ended(engine))
    assert rig.head.run("hosts", "use", hosts[1]).returncode == 0
    over(rig)


@pytest.mark.nightly
def test_it_ends_with_either_of_them_and_comes_back(rig: Rig) -> None:
    for which in 0, 1:
        hosts, engine = over(rig)
        lose(rig, hosts[which], engine)
        until(lambda: set(rig.states().values()) == {"ready"})
    hosts, engine = over(rig)
    rig.die(hosts[1])
    until(lambda: ended(engine))
    refused = rig.ask("m", "over")
    assert refused.status_code == 503
    assert "m runs over several hosts, and not as many are there" in refused.text
    until(lambda: groups(rig) == [])


def lose(rig: Rig, host: str, engine: psutil.Process) -> None:
    """The host's process dies, and with it the engine wherever it is. Ray starts the host anew."""
    process = rig.host(host)
    assert killed(process)
    until(lambda: ended(engine))
    until(lambda: rig.host(host) not in (None, process))
