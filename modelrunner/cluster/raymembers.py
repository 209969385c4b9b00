"""A program: asks Ray for the nodes of a cluster, and keeps an actor on each that runs `modelrunner host`. It prints a
line of JSON (`members.ClusterMember`) for each change, takes and gives back in Ray what its input orders
(`reservations.Order`), and ends, with all its actors and groups, when its input ends.

    python -m modelrunner.cluster.raymembers ADDRESS [LABEL=VALUE]

Ray: https://docs.ray.io/en/latest/ray-core/scheduling (node affinity), and its reference of `ray.nodes`."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from typing import Any

from modelrunner.cluster.raygroups import Groups, NodeLimits

_LOOK = 1.0  # seconds between two looks at the nodes
_AGAIN = 2.0, 60.0  # seconds until a node on which no host came up is tried again, at first and at most
_PATIENCE = 10.0  # seconds in which an actor must answer
_KEY = "MODELRUNNER_HOST_KEY"


class HostActor:
    """Runs on the node, and starts the host there as a process, which ends with this one."""

    def start(self, address: str, key: str) -> dict[str, Any]:
        """Returns what the host prints: its port and its certificate, or a problem."""
        command = [sys.executable, "-m", "modelrunner", "host", address]
        environment = os.environ | {_KEY: key}
        if environment.get("OMP_NUM_THREADS") == "1":  # Ray sets it for actors without processors
            del environment["OMP_NUM_THREADS"]  # engines would compute with one thread
        with suppress(OSError):  # Ray gives its workers niceness 15 (`RAY_worker_niceness`); only some may take it back
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError, TypeError):  # another program's words, as of what a Python is told to import
                return {"address": address, **json.loads(line)}
        return {"address": address, "problem": f"modelrunner does not start there: exit code {self._process.wait()}"}

    def is_there(self) -> bool:
        return self._process.poll() is None


def say(**told: object) -> None:
    sys.stdout.write(json.dumps(told) + "\n")  # whole, since two threads say something
    sys.stdout.flush()


def main(address: str, label: str = "") -> None:
    groups: Future[Groups] = Future()
    threading.Thread(target=_follow_orders, args=(groups,), daemon=True).start()
    try:
        ray: Any = import_module("ray")
        at_node = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    except ImportError as error:
        say(problem=f"Ray is not installed here ({error}): `pip install 'modelrunner[ray]'`")
        return
    try:
        ray.init(address=address, namespace="modelrunner", log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        say(problem=f"Ray at {address} does not answer, or is another version: {' '.join(str(error).split())[:300]}")
        return
    say(problem="")
    groups.set_result(Groups(ray))
    mine = ray.get_runtime_context().get_node_id()
    make = ray.remote(num_cpus=0, max_restarts=0)(HostActor)
    actors: dict[str, Any] = {}
    starts: dict[str, Any] = {}  # those whose host has not said its port yet
    nodes: dict[str, dict[str, Any]] = {}
    failed: dict[str, tuple[float, float]] = {}  # when a node on which no host came up is tried again, and the pause
    limits: dict[str, NodeLimits] = {}  # those that were said
    name, _, value = label.partition("=")
    while True:
        for node in ray.nodes():
            id, labels = node["NodeID"], node.get("Labels") or {}
            if id == mine or (label and labels.get(name) != value):
                continue
            if node["Alive"] and id not in actors and time.monotonic() >= failed.get(id, (0.0, 0.0))[0]:
                nodes[id] = node
                actors[id] = make.options(scheduling_strategy=at_node(id, soft=False)).remote()
                starts[id] = actors[id].start.remote(node["NodeManagerAddress"], os.environ[_KEY])
            elif not node["Alive"] and id in actors:
                _leave(ray, id, actors, starts, nodes)
        for id in [id for id, start in starts.items() if ray.wait([start], timeout=0)[0]]:
            try:
                report = ray.get(starts.pop(id))
            except Exception as error:  # Ray raises what the actor does, and errors of its own
                report = {"problem": f"no host can be started there: {' '.join(str(error).split())[:300]}"}
            if "problem" in report:
                ray.kill(actors.pop(id))
                pause = min(2 * failed[id][1], _AGAIN[1]) if id in failed else _AGAIN[0]
                failed[id] = time.monotonic() + pause, pause
            else:
                failed.pop(id, None)
            limits.pop(id, None)
            cards = int(nodes[id]["Resources"].get("GPU", 0))
            labels = [f"{label}={value}" for label, value in (nodes[id].get("Labels") or {}).items()]
            say(node=id, name=_name(nodes[id], id), cards=cards, labels=labels, **report)
        for id in [id for id in actors if id not in starts]:
            try:
                there = ray.get(actors[id].is_there.remote(), timeout=_PATIENCE)
            except Exception:  # the actor, its node or Ray is gone: Ray has an error for each
                there = False
            if not there:
                _leave(ray, id, actors, starts, nodes)
        there = {id: nodes[id] for id in actors if id not in starts}
        for id, limit in groups.result().limits(there).items():
            if limits.get(id) != limit:
                limits[id] = limit
                say(node=id, name=_name(nodes[id], id), limits=limit._asdict())
        time.sleep(_LOOK)


def _leave(ray: Any, id: str, actors: dict[str, Any], starts: dict[str, Any], nodes: dict[str, Any]) -> None:
    starts.pop(id, None)
    ray.kill(actors.pop(id))
    say(node=id, name=_name(nodes[id], id), gone=True)


def _name(node: dict[str, Any], id: str) -> str:
    """Returns the name that the node was given, or its host's, with the beginning of its ID, which tells two nodes of
    one machine apart."""
    name = node.get("NodeName") or node["NodeManagerHostname"]
    is_own = name not in (node["NodeManagerAddress"], node["NodeManagerHostname"])
    return str(name) if is_own else f"{node['NodeManagerHostname']}-{id[:6]}"


def _follow_orders(ready: Future[Groups]) -> None:
    """One after the other, so that nothing is taken before what came earlier was given back."""
    for line in sys.stdin.buffer:
        order, groups = json.loads(line), ready.result()
        try:
            if order["bundles"]:
                problem, group = groups.take_together(order["name"], order["bundles"])
                say(taken=order["name"], problem=problem, group=group)
            elif order["node"]:
                problem = groups.take(order["name"], order["node"], order["memory"], order["card"])
                say(taken=order["name"], problem=problem)
            else:
                groups.give_back(order["name"])
        except Exception as error:  # Ray's, which has one for each part of it
            say(taken=order["name"], problem=f"Ray fails: {' '.join(str(error).split())[:300]}")
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
