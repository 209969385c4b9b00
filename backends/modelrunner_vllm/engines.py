"""The installed vLLM: where it is, and which build."""

import os
from dataclasses import dataclass
from pathlib import Path

from modelrunner import BackendContext, enginecache


@dataclass(frozen=True, slots=True)
class Engine:
    """`program` is the interpreter of its environment; `kind` is "cuda" or "cpu"."""

    program: Path
    version: str
    kind: str

    def __str__(self) -> str:
        return f"vLLM {self.version} ({self.kind})"

    @property
    def cuda(self) -> bool:
        return self.kind == "cuda"

    def marker(self) -> dict[str, str]:
        return {"version": self.version, "kind": self.kind}


def link(context: BackendContext) -> Path:
    """Where this data directory says which engine it uses."""
    return context.engines / "vllm"


def find(context: BackendContext) -> Engine | None:
    return usable(link(context))


def usable(folder: Path) -> Engine | None:
    """The finished engine in `folder`, None for anything else: an interpreter that it needs may be gone by now."""
    folder = folder.resolve()  # an update may point the link elsewhere between now and the start of the program
    marker, program = enginecache.read_marker(folder), folder / "bin/python"
    if marker is None or "kind" not in marker or not os.access(program, os.X_OK):
        return None
    return Engine(program, str(marker.get("version")), str(marker["kind"]))
