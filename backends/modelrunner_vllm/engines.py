"""The engines of vLLM: their versions in this release, the installed one, and a running engine's
counters."""

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from modelrunner.sdk import BackendContext, Endpoint, calls, enginecache

# scripts/lock writes the locks, which pin all other packages.
VERSION = "0.32.0"
# The CPU build of torch is on an index of PyTorch's own, whose files the locks cannot name: the version is pinned and
# the index is trusted.
TORCH_CPU = "2.13.0+cpu"
LOCKS = Path(__file__).with_name("locks")
# The number of batches that gave an answer something, and the share of the cache in use, 0 to 1. While a long prompt is
# computed in pieces, only the share moves before the last piece.
_FIGURES = re.compile(rb"^vllm:(?:iteration_tokens_total_count|kv_cache_usage_perc)\{[^}]*\} (\S+)$", re.MULTILINE)
_COUNTERS_LIMIT = 5.0  # seconds, for the engine's counters


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


async def work_done(endpoint: Endpoint) -> float | None:
    """Returns a figure that changes with every batch, None if the engine does not say it. The API server answers this
    while another process computes, so a stuck engine reports the same figure again. Raises `OSError`,
    `ModelRunnerError`."""
    status, text = await calls.fetch(endpoint, "GET", "/metrics", timeout=_COUNTERS_LIMIT)
    found = _FIGURES.findall(text) if status == 200 else []
    return sum(map(float, found)) if found else None
