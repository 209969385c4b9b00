"""The engines of vLLM: their versions in this release, and the installed one."""

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from modelrunner.sdk import BackendContext, enginecache

# scripts/lock writes the locks, which pin all other packages.
VERSION = "0.32.0"
# The CPU build of torch is on an index of PyTorch's own, whose files the locks cannot name: the version is pinned and
# the index is trusted.
TORCH_CPU = "2.13.0+cpu"
LOCKS = Path(__file__).with_name("locks")


class EngineKind(StrEnum):
    """The kinds of vLLM's engines: its build for NVIDIA GPUs, and that for processors."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Engine:
    """`program` is the interpreter of the engine's environment."""

    kind: EngineKind
    program: Path
    version: str

    def __str__(self) -> str:
        return f"vLLM {self.version} ({self.kind})"

    def marker(self) -> dict[str, Any]:
        return {"kind": self.kind, "version": self.version}


def link(context: BackendContext) -> Path:
    """Returns the link by which this data directory uses an engine."""
    return context.engines / "vllm"


def find(context: BackendContext) -> Engine | None:
    """Returns the engine here, None if there is none."""
    return usable(link(context))


def usable(folder: Path) -> Engine | None:
    """Returns the finished engine in `folder`, None for any other content, or if the interpreter that the engine needs
    is gone."""
    folder = folder.resolve()  # an update may change the link before the program starts
    marker, program = enginecache.read_marker(folder), folder / "bin/python"
    if marker is None or marker.get("kind") not in list(EngineKind) or not os.access(program, os.X_OK):
        return None
    return Engine(EngineKind(marker["kind"]), program, str(marker.get("version")))
