"""Runs vLLM's API server. It is the child process of a runner, in the engine's own environment, where modelrunner is
not installed. Its arguments are vLLM's. The first line of its log announces the imports, which take ten seconds."""

import os
import sys
from importlib import import_module
from multiprocessing import process, shared_memory
from typing import Any


def name_shared_memory(prefix: str) -> None:
    """Chooses the names of segments and semaphores, so that the daemon can remove those of a killed engine. Python
    offers no public way. On systems other than Linux, which vLLM does not run on, names have at most 30 characters."""
    shared_memory._SHM_NAME_PREFIX = f"/{prefix}-"  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(prefix) + 12  # type: ignore[attr-defined]
    process.current_process()._config["semprefix"] = f"/{prefix}"  # type: ignore[attr-defined]


def use_group(group: str) -> None:
    """Has vLLM's workers run in the placement group of Ray with this ID, by this Python, wherever they are. vLLM takes
    the group that it finds itself in (`initialize_ray_cluster` of vllm/v1/executor/ray_utils.py), and a driver is in
    none."""
    ray: Any = import_module("ray")
    groups: Any = import_module("ray.util.placement_group")
    join = ray.init

    def joined(*arguments: Any, **options: Any) -> Any:
        given = options.get("runtime_env") or {}
        return join(*arguments, **options | {"runtime_env": {"py_executable": sys.executable, **given}})

    ray.init = joined
    ray.util.get_current_placement_group = lambda: groups.PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group)))


# The child processes of the API server import this file, too, and need the names as well.
name_shared_memory(os.environ["MODELRUNNER_SHARED_MEMORY"])
if "MODELRUNNER_RAY_GROUP" in os.environ:
    use_group(os.environ["MODELRUNNER_RAY_GROUP"])

if __name__ == "__main__":
    print("importing vLLM", file=sys.stderr, flush=True)
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
