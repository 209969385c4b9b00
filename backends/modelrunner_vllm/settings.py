"""The table `[backends.vllm]` of the configuration."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from modelrunner_vllm.engines import EngineKind


class VllmSettings(BaseModel):
    """The settings are all optional.

    - `build` is "cuda" or "cpu". By default the machine's devices decide.
    - `torch_index` is the index that has the CPU build of torch: PyTorch's index of CPU builds, or a copy of it. By
      default pip's own configuration decides.
    - `python` makes the engine's environment. By default it is the interpreter that runs modelrunner.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    build: EngineKind | None = None
    torch_index: str | None = None
    python: Path | None = None
