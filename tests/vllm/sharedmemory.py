"""The shared memory that vLLM's processes hold."""

from pathlib import Path

from modelrunner_vllm.environment import Scratch


def shared_memory_of(engines: Path) -> set[str]:
    """Returns the names of the segments and semaphores of the engines that run from the folder `engines`."""
    prefix = Scratch(engines).prefix
    return {file.name for file in Path("/dev/shm").iterdir() if prefix in file.name}
