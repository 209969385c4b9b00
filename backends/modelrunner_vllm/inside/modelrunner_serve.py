"""Runs vLLM's API server. It is the child process of a runner, in the engine's own environment, where modelrunner is
not installed. Its arguments are vLLM's. The first line of its log announces the imports, which take ten seconds."""

import os
import sys
from multiprocessing import process, shared_memory


def name_shared_memory(prefix: str) -> None:
    """Chooses the names of segments and semaphores, so that the daemon can remove those of a killed engine. Python
    offers no public way. On systems other than Linux, which vLLM does not run on, names have at most 30 characters."""
    shared_memory._SHM_NAME_PREFIX = f"/{prefix}-"  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(prefix) + 12  # type: ignore[attr-defined]
    process.current_process()._config["semprefix"] = f"/{prefix}"  # type: ignore[attr-defined]


# The child processes of the API server import this file, too, and need the names as well.
name_shared_memory(os.environ["MODELRUNNER_SHARED_MEMORY"])

if __name__ == "__main__":
    print("importing vLLM", file=sys.stderr, flush=True)
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
