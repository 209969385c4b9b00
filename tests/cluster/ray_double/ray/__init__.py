"""A Ray of this machine, as much of it as `modelrunner.cluster` asks. The nodes are in the file `nodes.json` of the
folder FAKE_RAY: by their IDs, with `name`, `alive`, `address`, the `environment` of what runs there, and the `command`
that starts it. An actor is a process there, which ends with the program that made it. A file `fault` there is the error
of `init`."""

import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

FOLDER = Path(os.environ["FAKE_RAY"])
ACTOR = """
import json, sys
from modelrunner.cluster.raymembers import HostActor
actor = HostActor()
for line in sys.stdin:
    name, given = json.loads(line)
    print(json.dumps(getattr(actor, name)(*given)), flush=True)
"""


def init(**options):
    if (fault := FOLDER / "fault").exists():
        raise ConnectionError(fault.read_text())


def nodes():
    return [
        {
            "NodeID": id,
            "Alive": node["alive"],
            "NodeName": node["name"],
            "NodeManagerAddress": node["address"],
            "NodeManagerHostname": "here",
            "Labels": {},
            "Resources": {"memory": 1 << 40},
        }
        for id, node in json.loads((FOLDER / "nodes.json").read_text()).items()
    ]


class get_runtime_context:
    def get_node_id(self):
        return "head"


class Actor:
    def __init__(self, node):
        there = json.loads((FOLDER / "nodes.json").read_text())[node]
        pipe, environment = subprocess.PIPE, os.environ | there["environment"]
        command = [*there["command"], sys.executable, "-c", ACTOR, node]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.calls = ThreadPoolExecutor(1)

    def __getattr__(self, name):
        return Method(self, name)

    def call(self, name, given):
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, given]) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise RuntimeError("the actor died")
        return json.loads(line)


class Method:
    def __init__(self, actor, name):
        self.actor, self.name = actor, name

    def remote(self, *given):
        return self.actor.calls.submit(self.actor.call, self.name, given)


class Remote:
    """What `remote` makes of a class."""

    def options(self, scheduling_strategy):
        self.node = scheduling_strategy.node
        return self

    def remote(self):
        return Actor(self.node)


def remote(**options):
    return lambda of: Remote()


def get(call: Future, timeout=None):
    return call.result(timeout)


def wait(calls, timeout):
    done, left = wait_for(calls, timeout)
    return list(done), list(left)


def kill(actor):
    actor.process.kill()
    actor.process.wait()
