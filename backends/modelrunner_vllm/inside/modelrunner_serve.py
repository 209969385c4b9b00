"""Runs vLLM's API server: the child process of a runner, in the engine's own environment, where modelrunner is not
installed. Its arguments are vLLM's. The first line of its log tells what takes the next ten seconds."""

import os
import sys
from multiprocessing import process, shared_memory


def name_shared_memory(prefix: str) -> None:
    """Whoever cleans up after a killed engine has to know its segments and semaphores by their names, and Python offers
    no public way to choose those. Both are 30 characters at most on systems other than Linux, which vLLM does not run
    on."""
    shared_memory._SHM_NAME_PREFIX = f"/{prefix}-"  # type: ignore[attr-defined]
    shared_memory._SHM_SAFE_NAME_LENGTH = len(prefix) + 12  # type: ignore[attr-defined]
    process.current_process()._config["semprefix"] = f"/{prefix}"  # type: ignore[attr-defined]


# Not only for the API server: its child processes import this file as well.
name_shared_memory(os.environ["MODELRUNNER_SHARED_MEMORY"])

if __name__ == "__main__":
    print("importing vLLM", file=sys.stderr, flush=True)
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
