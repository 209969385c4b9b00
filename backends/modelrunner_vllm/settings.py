"""The table `[backends.vllm]` of the configuration."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from modelrunner_vllm.engines import EngineKind


class VllmSettings(BaseModel):
    """All optional.

    `build`: "cuda" or "cpu"; by default what the machine has.
    `torch_index`: the index that has the CPU build of torch (PyTorch's index of CPU builds, or a copy of it); by
    default pip's own configuration decides.
    `python`: the interpreter to make the engine's environment with; by default the one that runs modelrunner.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    build: EngineKind | None = None
    torch_index: str | None = None
    python: Path | None = None
