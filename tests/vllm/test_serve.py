"""The child process of vLLM, without vLLM."""

import os
import subprocess
import sys

from modelrunner.types import RAY_GROUP
from modelrunner_vllm.environment import INSIDE

PACKAGES = """
import sys
from types import ModuleType, SimpleNamespace

def module(name, **members):
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__dict__.update(members)
    return sys.modules[name]

groups = module("ray.util.placement_group", PlacementGroup=lambda id: f"the group {id}")
util = module("ray.util", placement_group=groups, get_current_placement_group=lambda: None)
module("ray", util=util, init=lambda *given, **options: (given, options), PlacementGroupID=lambda id: id.hex())
"""
ASKS_AS_VLLM = """
import modelrunner_serve, ray
print(ray.util.get_current_placement_group())
here, own = {"py_executable": sys.executable}, {"env_vars": {"A": "1"}}
print(ray.init(address=None, runtime_env=None) == ((), {"address": None, "runtime_env": here}))
print(ray.init(runtime_env=own) == ((), {"runtime_env": here | own}))
"""


def test_its_workers_run_in_the_group_that_it_is_told_by_its_own_python() -> None:
    environment = os.environ | {"PYTHONPATH": str(INSIDE), "MODELRUNNER_SHARED_MEMORY": "x"}
    for group, expected in ({RAY_GROUP: "0aff"}, "the group 0aff\nTrue\nTrue\n"), ({}, "None\nFalse\nFalse\n"):
        command = [sys.executable, "-c", PACKAGES + ASKS_AS_VLLM]
        asked = subprocess.run(command, env=environment | group, capture_output=True, text=True, check=False)
        assert asked.stdout == expected, asked.stderr
